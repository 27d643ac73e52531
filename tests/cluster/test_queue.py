"""`elasticrun k8s run --queue` on an API server without Kueue, and with its LocalQueue but without its controller.

The CRD has the name, group and scope that Kueue documents, and accepts any fields.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.api import PATHS
from cluster.control_plane import ControlPlane
from cluster.release import Release

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

CRDS = PATHS["CustomResourceDefinition"]
NAME = "localqueues.kueue.x-k8s.io"
LOCAL_QUEUE = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": NAME,
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue"},
    },
    "spec": {
        "group": "kueue.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "LocalQueue", "plural": "localqueues"},
        "versions": [
            {
                "name": "v1beta2",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


@pytest.fixture
def queues(control_plane: ControlPlane, release: Release) -> Iterator[str]:
    """The path of the LocalQueues of the release's namespace."""
    control_plane.api.create(CRDS, LOCAL_QUEUE)

    def established(found: object) -> bool:
        conditions = found["status"].get("conditions", ()) if isinstance(found, dict) else ()
        return ("Established", "True") in {(each["type"], each["status"]) for each in conditions}

    control_plane.api.wait(f"{CRDS}/{NAME}", established)
    yield f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{release.namespace.name}/localqueues"
    control_plane.api.delete(f"{CRDS}/{NAME}")


def run(release: Release) -> str:
    words = ["--queue", "team-a", "--image", "train:1", "--workers", "1", "--name", "job"]
    refusal = release.k8s_refuses("run", *words, "--", "python", "train.py")
    assert not release.namespace.list("StatefulSet")
    return refusal


def test_queue_without_kueue_is_refused_before_installation(release: Release) -> None:
    assert "kueue.x-k8s.io" in run(release)


def test_missing_queue_and_unmanaged_pods_are_refused(release: Release, queues: str) -> None:
    assert "no LocalQueue team-a" in run(release)
    queue = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "LocalQueue",
        "metadata": {"name": "team-a"},
        "spec": {"clusterQueue": "all"},
    }
    release.plane.api.create(queues, queue)
    assert "managedJobsNamespaceSelector" in run(release)
    assert not release.namespace.list("Pod"), "the dry run created a pod"
