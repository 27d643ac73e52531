"""Pods, permissions, tokens and the cluster's own store are lost, also temporarily; training continues."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.api import Object
from cluster.control_plane import Node, eventually
from cluster.release import Release
from harness import wording

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly, pytest.mark.timeout(300)]

ETCD_FROZEN_S = 60.0
RENEWED_S = 60.0  # a refused token is retried after 30 s at most


def test_a_pod_that_is_killed_without_notice_is_replaced(
    release: Release, nodes: list[Node]
) -> None:
    release.install(3)
    release.until(3)
    release.kill("job-worker-1")
    release.until(2, more=1)
    release.until(3)
    release.end()
    assert wording.RECOVERED in release.said() and wording.GOES_AWAY not in release.said()
    assert len(release.steps()) == 4
    pod = release.namespace.get("Pod", "job-worker-1")
    assert [each["restartCount"] for each in pod["status"]["containerStatuses"]] == [1]


def test_driver_and_worker_killed_together_are_replaced(
    release: Release, nodes: list[Node]
) -> None:
    release.install(3)
    release.until(3)
    begun = release.last().step
    driver = release.driver()
    for name in (driver, "job-worker-2"):
        release.namespace.delete("Pod", name, grace_s=0)
    eventually(lambda: len(release.drivers()) == 2, "another driver comes", 60.0)
    release.until(3, timeout_s=90.0)
    assert wording.WORKERS_FIND_AGAIN in release.said()
    release.end()
    made = {each.step for steps in release.steps().values() for each in steps}
    assert made == {*range(1, max(made) + 1)} and max(made) > begun, "nothing is forgotten"
    assert len(release.steps()) == 4, "two of the three lived on"


def test_training_continues_when_etcd_of_the_cluster_is_frozen_for_a_minute(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    with release.plane.etcd_frozen():
        until = time.monotonic() + ETCD_FROZEN_S
        while time.monotonic() < until:
            release.until(2, more=50)
    release.scale(3)
    release.until(3, timeout_s=120.0)
    assert len(release.drivers()) == 1
    release.end()
    release.nothing_repeated()
    assert wording.RECOVERED not in release.said()


def test_revoked_permission_is_logged_and_used_again_when_granted(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    binding = release.namespace.get("RoleBinding", "job-driver")
    release.namespace.delete("RoleBinding", "job-driver")
    refused = "grant list and watch of pods; keeping"
    eventually(lambda: refused in release.said(), "it is missed when the watch begins anew", 90.0)
    release.until(2, more=50)
    kept = {key: binding[key] for key in ("kind", "roleRef", "subjects")}
    release.namespace.create({**kept, "metadata": {"name": "job-driver"}})
    eventually(
        lambda: wording.ANSWERS_AGAIN_ABOUT_PODS in release.said(), "it is asked again", 60.0
    )
    release.scale(3)
    release.until(3)
    release.end()
    release.nothing_repeated()


def test_expired_token_is_logged_and_the_renewed_one_is_used(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    file = mounted_token(release)
    file.write_text(release.plane.token(release.namespace, "job-driver", lives_s=0))
    refused = "it rejects this token (Unauthorized); the token is read again at each attempt"
    eventually(lambda: refused in release.said(), "it is missed when the watch begins anew", 90.0)
    release.until(2, more=50)
    file.write_text(release.plane.token(release.namespace, "job-driver", lives_s=600))
    eventually(lambda: wording.ANSWERS_AGAIN_ABOUT_PODS in release.said(), "it is read", RENEWED_S)
    release.until(2, more=50)
    release.end()
    release.nothing_repeated()


def mounted_token(release: Release) -> Path:
    """Return the file that the driver's pod sees."""
    uid = release.namespace.get("Pod", release.driver())["metadata"]["uid"]
    [file] = release.plane.folder.glob(f"nodes/*/pods/{uid}/volumes/*/token")
    return file


def test_pods_of_another_namespace_with_the_same_labels_are_ignored(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    labels = release.namespace.get("Pod", "job-worker-0")["metadata"]["labels"]
    with release.plane.namespace() as other:
        other.create(alike("job-worker-0", labels), alike("job-worker-7", labels))
        address = other.wait_pod("job-worker-7")["status"]["podIP"]
        release.until(2, more=50)
        other.delete("Pod", "job-worker-0")
        other.wait_gone("Pod", "job-worker-0")
        release.until(2, more=50)
        assert address not in release.said() and wording.GOES_AWAY not in release.said()
    release.end()
    release.nothing_repeated()


def alike(name: str, labels: Object) -> Object:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "agent", "image": "x", "command": ["sleep", "1000"]}],
        },
    }
