"""State of a release, as `elasticrun k8s` derives it from a Job and its pods."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from elastic.driver.commandline.kubernetes.release_state import (
    Follow,
    JobOver,
    Wait,
    is_scalable,
    job_names,
    least_instead,
    least_pods,
    next_step,
    pod_state,
    saves,
    table,
    wanted,
    warnings,
)
from harness.golden import recorded

RUNNING = {"running": {"startedAt": "x"}}


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code}}


def a_pod(
    name: str, created: int = 0, state: Any = None, *, leaving: bool = False, **status: Any
) -> Any:
    kind = "driver" if "driver" in name else "worker"
    about: dict[str, Any] = {
        "name": name,
        "labels": {"app.kubernetes.io/component": kind},
        "creationTimestamp": f"2026-01-01T00:00:0{created}Z",
    }
    if leaving:
        about["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    containers = [{"state": state, "restartCount": 0}] if state is not None else []
    phase = "Running" if state else "Pending"
    return pod_state(
        {
            "metadata": about,
            "spec": {"nodeName": "n1"},
            "status": {
                "phase": phase,
                "podIP": "10.0.0.6",
                "containerStatuses": containers,
                **status,
            },
        }
    )


def a_job(*conditions: str) -> Any:
    found = [{"type": each, "status": "True"} for each in conditions]
    return {"metadata": {"name": "bert-driver"}, "status": {"conditions": found}}


def test_log_follows_each_driver_in_turn_until_the_job_ends():
    first, second = a_pod("bert-driver-x", 1, ended(137)), a_pod("bert-driver-a", 2, RUNNING)
    assert next_step(a_job(), [second, first], set()) == Follow("bert-driver-x")
    assert next_step(a_job(), [second, first], {"bert-driver-x"}) == Follow("bert-driver-a")
    both = {"bert-driver-x", "bert-driver-a"}
    assert next_step(a_job(), [second, first], both) == Wait("waiting for a driver pod")
    assert next_step(a_job("Complete"), [second, first], both) == JobOver(0)


def test_log_of_a_finished_job_is_read_to_its_end_first():
    driver = a_pod("bert-driver-x", 1, ended(0))
    assert next_step(a_job("Complete"), [driver], set()) == Follow("bert-driver-x")


def test_failed_job_has_the_exit_code_of_its_last_driver():
    drivers = [a_pod("bert-driver-x", 1, ended(143)), a_pod("bert-driver-y", 2, ended(7))]
    names = {pod.name for pod in drivers}
    assert next_step(a_job("Failed"), drivers, names) == JobOver(7)
    assert next_step(a_job("Failed"), [], names) == JobOver(1)
    untrue = {"metadata": {}, "status": {"conditions": [{"type": "Failed", "status": "False"}]}}
    assert next_step(untrue, drivers, names) == Wait("waiting for a driver pod")


def test_reason_why_a_driver_does_not_run_is_that_of_kubernetes():
    unplaced = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes fit",
    }
    pending = a_pod("bert-driver-x", conditions=[unplaced])
    text = "driver pod bert-driver-x is not running: Unschedulable: 0/3 nodes fit"
    assert next_step(a_job(), [pending], set()) == Wait(text)
    pulling = a_pod(
        "bert-driver-x",
        state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
    )
    text = "driver pod bert-driver-x is not running: ImagePullBackOff: no such image"
    assert next_step(a_job(), [pulling], set()) == Wait(text)
    making = a_pod("bert-driver-x", state={"waiting": {"reason": "ContainerCreating"}})
    assert next_step(a_job(), [making], set()) == Wait("waiting for a driver pod")


def test_table_counts_ready_pods_and_lists_the_state_of_each_pod():
    ready = [{"type": "Ready", "status": "True"}]
    pods = [
        a_pod("bert-worker-10", state=RUNNING, conditions=ready),
        a_pod("bert-worker-9", state=RUNNING, conditions=ready, leaving=True),
        a_pod("bert-worker-2", state={"waiting": {"reason": "CrashLoopBackOff"}}),
        a_pod("bert-driver-x", state=RUNNING, conditions=ready),
        a_pod("bert-driver-a", state=ended(137), phase="Failed"),
    ]
    lines = table(a_job(), pods, 4)
    recorded("log", lines[0])
    assert [line.split()[0] for line in lines[1:7]] == [
        "pod",
        "bert-driver-a",
        "bert-driver-x",
        "bert-worker-2",
        "bert-worker-9",
        "bert-worker-10",
    ]
    states = {line.split()[0]: line.split()[3] for line in lines[2:7]}
    assert states["bert-worker-9"] == "leaving" and states["bert-worker-10"] == "ready"
    assert states["bert-worker-2"] == "CrashLoopBackOff" and states["bert-driver-a"] == "ended"
    assert lines[-1] == "bert-worker-2: CrashLoopBackOff"
    recorded("messages", table(a_job("Failed"), pods, 4)[0])


# ---- warnings of Kubernetes -----------------------------------------------------------------------

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=timezone.utc)


def an_event(name: str, reason: str, text: str = "", kind: str = "Pod", **rest: Any) -> Any:
    about = {"kind": kind, "name": name}
    event = {"metadata": {}, "involvedObject": about, "reason": reason, "message": text}
    return {**event, "lastTimestamp": "2026-01-01T11:59:30Z", **rest}


def test_warnings_are_shown_newest_first_with_their_counts():
    events = [
        an_event("bert-worker-1", "FailedScheduling", "0/2 nodes\n are available", count=4),
        an_event(
            "bert-driver-x2k9q",
            "Failed",
            "Error: ImagePullBackOff",
            lastTimestamp="2026-01-01T11:50:00Z",
        ),
        an_event(
            *("bert-worker", "FailedCreate", "quota", "StatefulSet"),
            lastTimestamp=None,
            series={"count": 2, "lastObservedTime": "2026-01-01T11:59:59.250000Z"},
        ),
    ]
    recorded("messages", warnings(events, "bert", NOW))


def test_equal_warnings_share_a_line():
    events = [an_event("bert-worker-1", "BackOff", "x", count=2) for _ in range(3)]
    [_, line] = warnings(events, "bert", NOW)
    assert line.startswith("  30 s ago, 6 times: ")


def test_warnings_of_other_releases_are_omitted():
    names = ("bert2-worker-1", "bert-worker", "bert-driver", "bert-worker-1-x", "my-bert-worker-1")
    assert warnings([an_event(name, "Failed") for name in names], "bert", NOW) == []
    for name, lines in {"bert-2-journal": 0, "bert-journal": 2}.items():
        event = an_event(name, "ProvisioningFailed", kind="PersistentVolumeClaim")
        assert len(warnings([event], "bert", NOW)) == lines
    assert warnings([], "bert", NOW) == []


def test_warnings_of_a_jobset_are_shown():
    names = ("bert-worker-1-12-x7k2p", "bert-driver-0-0-x7k2p")
    assert all(len(warnings([an_event(name, "Failed")], "bert", NOW)) == 2 for name in names)
    events = [
        an_event("bert-worker-1", "Failed", kind="Job"),
        an_event("bert", "Failed", kind="JobSet"),
    ]
    assert len(warnings(events, "bert", NOW)) == 3


def test_many_or_long_warnings_are_truncated():
    events = [an_event(f"bert-worker-{n}", "Failed", "x" * 1000) for n in range(25)]
    lines = warnings(events, "bert", NOW)
    assert len(lines) == 12
    recorded("log", lines[-1])
    assert max(map(len, lines)) < 400


def test_event_without_fields_is_accepted():
    assert len(warnings([an_event("bert-worker-1", "", lastTimestamp=None)], "bert", NOW)) == 2
    assert warnings([{}], "bert", NOW) == []


def test_job_with_a_checkpoint_folder_outlives_its_pods():
    def job(*arguments: str) -> Any:
        command = ["--", "python", "train.py", "--checkpoint-dir", "/of/the/program"]
        driver = {"name": "driver", "args": ["--job", "bert", *arguments, *command], "env": env}
        return {"spec": {"template": {"spec": {"containers": [driver]}}}}

    env = [{"name": "POD_IP"}]
    assert saves(job("--checkpoint-dir", "s3://a/b"))
    assert saves(job("--checkpoint-dir=s3://a/b"))
    assert not saves(job())
    env.append({"name": "ELASTIC_CHECKPOINT_DIR", "value": "s3://a/b"})
    assert saves(job())


@pytest.mark.parametrize(
    ("least", "slots", "pods"), [("1", "1", 1), ("3", "1", 3), ("9", "8", 2), ("16", "8", 2)]
)
def test_number_of_pods_suffices_for_the_minimum_of_workers(least, slots, pods):
    def owner(*words: str) -> Any:
        return {"spec": {"template": {"spec": {"containers": [{"args": [*words]}]}}}}

    job = owner("--job", "bert", "--min-np", least, "--", "train", "--min-np", "99")
    workers = owner("agent", "--job", "bert", "--slots", slots)
    assert least_pods(job, workers) == pods
    assert [least_instead(job, workers, n) for n in (0, pods, pods + 1)] == [pods, None, None]
    assert pods == 1 or least_instead(job, workers, pods - 1) == pods
    assert least_instead(owner("--checkpoint-dir", "s3://a/b"), workers, 0) is None
    assert least_pods(owner(), owner()) == 1


def test_pod_that_kueue_has_not_admitted_is_shown_as_queued():
    blocked = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    found = pod_state(
        {
            "metadata": {"name": "bert-worker-0"},
            "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
            "status": {"phase": "Pending", "conditions": [blocked]},
        }
    )
    assert found.trouble.partition(":")[0] == "Queued"


def test_pods_of_a_jobset_are_counted_from_its_jobs_and_not_scalable():
    jobs = [{"spec": {"parallelism": 4}}, {"spec": {"parallelism": 4}}]
    assert wanted(jobs) == 8 and not is_scalable(jobs)
    stateful = [{"spec": {"replicas": 0}}]
    assert wanted(stateful) == 0 and is_scalable(stateful)
    assert not is_scalable([])


def test_job_of_a_jobset_is_shown_by_the_name_of_its_release():
    job = {"metadata": {"name": "bert-driver-0"}, "status": {}}
    assert table(job, [], 2)[0].split()[:2] == ["job", "bert"]
    assert job_names("bert") == ("bert-driver", "bert-driver-0")
