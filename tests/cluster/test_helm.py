"""helm with a release of the chart during training, and the API server's acceptance of the chart's objects."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from charts.rendering import Helm
from charts.test_chart import MATRIX, OTHERS
from cluster.api import PATHS
from cluster.control_plane import ControlPlane, Node, cache, eventually
from cluster.release import SCRIPT, Release
from harness import wording

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly, pytest.mark.timeout(300)]

MADE = ("Pod", "StatefulSet", "Job", "Service", "ServiceAccount", "Secret", "Role", "RoleBinding")
OWN = "app.kubernetes.io/instance=job"


def test_upgrade_and_rollback_change_the_number_of_workers_during_training(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    secret = release.namespace.get("Secret", "job-job")["data"]
    release.upgrade(3)
    release.until(3)
    assert release.namespace.get("Secret", "job-job")["data"] == secret
    release.helm("rollback", "job", "1")
    release.until(2)
    assert len(release.drivers()) == 1, "the driver went on"
    release.end()
    release.nothing_repeated()


def test_an_upgrade_resets_the_scale_and_refuses_impossible_changes(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    release.scale(3)
    release.until(3)
    fixed = "its command, flags, image and pod can't change; uninstall the release first"
    others: list[dict[str, object]] = [
        {"job": {"command": ["python", "other.py"]}},
        {"image": {"tag": "2"}},
        {"driver": {"podLabels": {"a": "b"}}},
    ]
    for other in others:
        with pytest.raises(AssertionError, match=fixed):
            release.upgrade(3, **other)
    secret = release.namespace.get("Secret", "job-job")
    release.namespace.delete("Secret", "job-job")
    with pytest.raises(AssertionError, match=wording.SECRET_JOB_JOB_GONE):
        release.upgrade(3)
    kept = {key: secret["metadata"][key] for key in ("name", "labels", "annotations")}
    release.namespace.create({**secret, "metadata": kept})
    release.until(3)
    # Newer servers record who scaled it, and an upgrade that resets it needs --force-conflicts.
    release.upgrade(2, "--force-conflicts")
    release.until(2)
    release.end()
    release.nothing_repeated()


def test_uninstall_removes_all_objects_and_processes(release: Release, nodes: list[Node]) -> None:
    release.install(2, tls={"kind": "chart"}, disruptionBudget={"enabled": True})
    release.until(2)
    name = release.namespace.name
    assert all(release.namespace.list(kind, OWN) for kind in MADE)
    release.helm("uninstall", "job")
    for kind in MADE:
        for each in release.namespace.list(kind, OWN):
            release.namespace.wait_gone(kind, each["metadata"]["name"])
    release.namespace.wait_gone("PersistentVolumeClaim", "job-journal")
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        found = release.plane.api.get(PATHS[kind], labelSelector=OWN)["items"]
        assert not [each for each in found if each["metadata"]["name"].startswith(f"{name}:")]
    for node in nodes:
        node.wait_pids(0)


def test_release_of_a_different_chart_is_neither_scaled_nor_removed(
    release: Release, nodes: list[Node], tmp_path: Path
) -> None:
    """Although its StatefulSet has the name that ours would have."""
    workers = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "other-worker"},
        "spec": {
            "serviceName": "other",
            "replicas": 1,
            "selector": {"matchLabels": {"a": "b"}},
            "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"containers": [{"name": "a", "image": "x", "command": ["sleep", "9"]}]},
            },
        },
    }
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text('{"apiVersion": "v2", "name": "queue", "version": "0.1.0"}')
    (chart / "templates" / "workers.yaml").write_text(json.dumps(workers))
    release.helm("install", "other", str(chart))
    assert wording.NO_JOB_OTHER_HELM in release.k8s_refuses("scale", "other", "3")
    assert wording.RELEASE_QUEUE_NO_JOB in release.k8s_refuses("stop", "other")
    assert release.namespace.get("StatefulSet", "other-worker")["spec"]["replicas"] == 1
    assert "other" in release.helm("list", "-q").split()
    assert wording.NO_JOB_NOBODY_HELM in release.k8s_refuses("stop", "nobody")


def test_a_job_is_not_scaled_below_its_minimum(release: Release, nodes: list[Node]) -> None:
    release.install(2, at_least=2)
    assert wording.WOULD_END_WITHOUT_POD in release.k8s_refuses("scale", "job", "0")
    assert wording.NEEDS_WORKER_PODS_GO in release.k8s_refuses("scale", "job", "1")
    assert release.namespace.get("StatefulSet", "job-worker")["spec"]["replicas"] == 2


def test_second_of_two_concurrent_jobs_with_one_name_is_refused(
    release: Release, nodes: list[Node]
) -> None:
    """The conflict is found by the chart or by helm: the other job is not changed either way."""
    both = [release.k8s_run("python", str(SCRIPT), "/steps") for _ in range(2)]
    eventually(lambda: any(each.poll() is not None for each in both), "one is refused", 60.0)
    [refused] = [each for each in both if each.poll() is not None]
    [running] = [each for each in both if each is not refused]
    _, errors = refused.communicate(timeout=60)
    assert refused.returncode == 2 and wording.JOB_JOB_ALREADY_GIVE in errors
    release.until(2)
    (release.folder / "stop").touch()
    _, errors = running.communicate(timeout=110)
    assert running.returncode == 0, errors


@pytest.mark.timeout(600)
def test_api_server_accepts_every_combination(control_plane: ControlPlane, tmp_path: Path) -> None:
    """As helm 4 gives them to it, each once that is in several combinations, secrets alike but for their drawn bytes.
    Without those objects whose kinds others bring; nothing is kept of them.
    """
    helm = Helm(str(cache() / "helm"))
    different: dict[str, str] = {}
    for objects in helm.render_all(MATRIX, version="1.20"):
        parts = [part for part in objects.text.split("\n---\n") if "\nkind: " in part]
        kept = [part for part in parts if not any(f": {other}\n" in part for other in OTHERS)]
        assert len(kept) > 5
        for part in kept:
            secret = "\nkind: Secret\n" in part
            different.setdefault(
                re.sub(r": [\w+/=\"]{40,}\n", ": drawn\n", part) if secret else part, part
            )
    assert sum("\nkind: StatefulSet\n" in part for part in different) >= len(MATRIX) / 4
    file = tmp_path / "all.yaml"
    file.write_text("\n---\n".join(different.values()))
    said = control_plane.kubectl(
        *("apply", "--server-side", "--dry-run=server", "-f", str(file)), timeout_s=250
    )
    assert said.count("serverside-applied (server dry run)") == len(said.splitlines())
    assert len(said.splitlines()) == len(different)
