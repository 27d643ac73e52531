"""A release of the chart trains while its cluster changes: real controllers, real pods, real steps."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from cluster.api import PATHS, STRATEGIC_MERGE
from cluster.control_plane import Node, eventually
from cluster.release import IMAGE, SCRIPT, SPOT, Release
from elastic.driver.settings import Settings
from harness import wording

pytestmark = pytest.mark.kubernetes


@pytest.mark.nightly  # one that `elasticrun k8s` runs is scaled in every run
def test_release_grows_and_shrinks_by_kubectl_scale_and_completes(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    release.scale(3)
    release.until(3)
    release.scale(1)
    release.until(1)
    release.end()
    release.nothing_repeated()
    assert wording.GOES_AWAY in release.said()


@pytest.mark.nightly
def test_deleted_or_evicted_pod_leaves_at_a_commit_and_is_replaced(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    release.namespace.delete("Pod", "job-worker-1")
    release.until(1, more=1)
    release.until(2)
    release.namespace.evict("job-worker-0")
    release.until(1, more=1)
    release.until(2)
    release.end()
    release.nothing_repeated()
    assert len(release.steps()) == 4


@pytest.mark.nightly
def test_deleted_or_killed_driver_is_replaced_without_repeated_steps(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    release.replace_driver(grace_s=None)
    release.replace_driver(grace_s=0)
    release.scale(3)
    release.until(3)
    release.end()
    release.nothing_repeated()
    assert len(release.steps()) == 3


@pytest.mark.nightly
def test_training_continues_without_the_api_server(release: Release, nodes: list[Node]) -> None:
    release.install(2)
    release.until(2)
    release.plane.kill_api_server()
    eventually(lambda: wording.CANT_BE_WATCHED in release.said(), "the driver says so")
    release.until(2, more=100)
    release.plane.start_api_server()
    eventually(lambda: wording.ANSWERS_AGAIN in release.said(), "it hears of pods again", 60.0)
    release.scale(3)
    release.until(3)
    release.end()
    release.nothing_repeated()


@pytest.mark.nightly
def test_workers_leave_tainted_and_drained_nodes_at_a_commit_and_stay_on_a_cordoned_one(
    release: Release, add_node: Callable[..., Node]
) -> None:
    add_node(environment=IMAGE, labels={"for": "driver"})
    works = {"environment": IMAGE, "labels": {"for": "work"}}
    names = [add_node(**works).name, add_node(**works).name]
    release.install(
        2,
        driver={"nodeSelector": {"for": "driver"}},
        worker={"number": 2, "graceSeconds": 10, "nodeSelector": {"for": "work"}},
    )
    release.until(2)
    place = release.namespace.get("Pod", "job-worker-1")["spec"]["nodeName"]
    release.plane.kubectl("cordon", place)
    release.until(2, more=100)
    assert wording.GOES_AWAY not in release.said()
    path = f"{PATHS['Node']}/{place}"
    release.plane.api.patch(path, {"spec": {"taints": [SPOT]}})
    release.until(1)
    release.plane.api.patch(path, {"spec": {"taints": []}})
    release.until(2)
    release.plane.kubectl("drain", place, "--ignore-daemonsets", "--delete-emptydir-data")
    [other] = {*names} - {place}
    release.until(2, more=50)
    assert release.namespace.get("Pod", "job-worker-1")["spec"]["nodeName"] == other
    release.end()
    release.nothing_repeated()
    assert wording.RECOVERED not in release.said(), "all have left at commits"


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_workers_leave_a_node_with_a_failed_gpu_until_repaired(
    release: Release, add_node: Callable[..., Node]
) -> None:
    add_node(environment=IMAGE, labels={"for": "driver"})
    add_node(environment=IMAGE)
    add_node(environment=IMAGE)
    worker = {"number": 2, "graceSeconds": 10, "onePerNode": True}
    release.install(2, driver={"nodeSelector": {"for": "driver"}}, worker=worker)
    release.until(2)
    place = release.namespace.get("Pod", "job-worker-1")["spec"]["nodeName"]
    for status, size in (("True", 1), ("False", 2)):
        condition = {"type": "GPUMissing", "status": status, "reason": "Count"}
        body = {"status": {"conditions": [condition]}}
        path = f"{PATHS['Node']}/{place}/status"
        release.plane.api.patch(path, body, content=STRATEGIC_MERGE)
        release.until(size)
    release.end()
    release.nothing_repeated()
    assert wording.RECOVERED not in release.said(), "all have left at commits"


@pytest.mark.nightly
def test_pod_of_a_lost_node_is_replaced_and_its_remaining_processes_have_no_effect(
    release: Release, add_node: Callable[..., Node]
) -> None:
    add_node(environment=IMAGE, labels={"for": "driver"})
    lost = add_node(environment=IMAGE, heartless=True)
    release.install(3, driver={"nodeSelector": {"for": "driver"}})
    release.until(3)
    pods = {
        pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in release.namespace.list("Pod")
    }
    gone = sum(node == lost.name for node in pods.values())
    assert gone in (1, 2), pods
    lost.freeze()
    for pid in lost.pids():
        os.kill(pid, signal.SIGSTOP)
    release.until(3 - gone)
    # They are probed after others have waited for half a lease. A stopped agent alone would have had ten seconds.
    given_up = r"given up: its agent is connected but has not responded for (\d+\.\d) s"
    for waited_s in re.findall(given_up, release.said()):
        assert float(waited_s) <= Settings.lease_s
    assert re.search(given_up, release.said()) and wording.SAID_NOTHING not in release.said()
    release.until(3, timeout_s=90.0)
    assert "its node" in release.said() and wording.NOT_HEARD in release.said()
    for pid in lost.pids():
        os.kill(pid, signal.SIGCONT)
    release.until(3, more=100)
    release.end()
    release.nothing_repeated()


@pytest.mark.nightly
def test_workers_are_found_by_their_service_without_permissions(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2, rbac={"create": False})
    release.until(2)
    assert wording.ASKING_NAME_SERVER in release.said()
    release.end()


@pytest.mark.timeout(240)
def test_elasticrun_k8s_run_shows_the_job_and_removes_the_release_when_done(
    release: Release, nodes: list[Node]
) -> None:
    running = release.k8s_run("python", str(SCRIPT), "/steps")
    release.until(2)
    serves = "job job runs; 2 of 2 worker pods are ready"
    eventually(lambda: serves in release.k8s_says("status", "job"), "their probes say so", 60.0)
    assert "job-worker-1" in release.k8s_says("status", "job")
    assert release.k8s_says("scale", "job", "1") == "job: 2 -> 1 worker pods\n"
    release.until(1)
    (release.folder / "stop").touch()
    output, errors = running.communicate(timeout=110)
    assert running.returncode == 0, errors
    assert "generation 1 has 2 workers" in output and wording.TRAINING_ENDED in output
    assert output.count(wording.TRAINING_ENDED) == 1
    release.removed()


@pytest.mark.nightly
def test_status_shows_warnings_of_kubernetes(release: Release, nodes: list[Node]) -> None:
    release.install(1, worker={"number": 1, "nodeSelector": {"is": "nowhere"}})

    def told() -> bool:
        return "FailedScheduling" in release.k8s_says("status", "job").partition("last hour:")[2]

    eventually(told, "the scheduler has nowhere to put the worker", 60.0)
    assert "job-worker-0: Unschedulable" in release.k8s_says("status", "job")


@pytest.mark.nightly
def test_ctrl_c_removes_the_release_and_a_failed_program_fails_the_job(
    release: Release, nodes: list[Node]
) -> None:
    running = release.k8s_run("python", str(SCRIPT), "/steps")
    release.until(2)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130 and wording.REMOVED_JOB_JOB_EXIT in errors
    release.removed()
    failing = release.k8s_run("python", "-c", "raise SystemExit(7)", name="other")
    output, errors = failing.communicate(timeout=110)
    assert failing.returncode == 1, errors
    assert wording.EVERY_WORKER_ENDED_BEFORE in output
