"""Scripts that fail, in real jobs: the same failure of all ranks ends the job, and an end on fewer workers has a
reason.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic.driver.reasons import ReasonKind
from harness.history import RETURN, SCRIPTS, STAY_AWAY
from harness.job import Job

pytestmark = pytest.mark.forked

FAILING = ["python", SCRIPTS / "failing.py"]


def begun(job: Callable[..., Job], case: str, flags: str = "") -> Job:
    return job(f"-np 2 --min-np 1 {flags}", FAILING, env={"CASE": case})


def verdict(running: Job) -> tuple[int, str]:
    [ended] = running.actions("EndJob")
    return ended["code"], ended["reason"]["kind"]


@pytest.mark.parametrize(
    ("case", "names", "tensors"),
    [
        ("names", ["allreduce.x0", "allreduce.x1"], ["float32 [3]"] * 2),
        ("kinds", ["allreduce.x", "broadcast.x"], ["float32 [3]"] * 2),
        ("shapes", ["allreduce.x"] * 2, ["float32 [3]", "float32 [4]"]),
        ("dtypes", ["allreduce.x"] * 2, ["float32 [3]", "float64 [3]"]),
    ],
)
def test_different_collectives_end_the_job_and_the_calls_of_all_ranks_are_reported(
    job, case, names, tensors
):
    running = begun(job, case)
    assert running.wait(60) == 1
    assert verdict(running) == (1, ReasonKind.TENSORS_DIFFER.value)
    calls = running.events("WorkerRaised")[0]["calls"]
    assert [(name, what) for _, name, _, what in calls] == [*zip(names, tensors, strict=True)]
    assert [rank for rank, *_ in calls] == [0, 1]
    known = case in ("names", "kinds")
    assert all(line.startswith("failing.py:") is known for _, _, line, _ in calls)
    assert not running.actions("BreakWorld"), "nobody is lost"


def test_models_that_differ_between_ranks_end_the_job(job):
    running = begun(job, "models", RETURN)
    assert running.wait(60) == 1
    assert verdict(running) == (1, ReasonKind.LAYOUTS_DIFFER.value)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("exit with a message", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("optimizers", "StateMismatch"),
    ],
)
def test_exception_raised_by_all_ranks_ends_the_job_with_its_name(job, case, name):
    running = begun(job, case)
    assert running.wait(60) == 1
    assert verdict(running) == (1, ReasonKind.SAME_EXCEPTION.value)
    assert {event["summary"].partition(":")[0] for event in running.events("WorkerRaised")} == {
        name
    }


@pytest.mark.parametrize(
    ("case", "flags", "code", "kind"),
    [("mute", "", 0, "lost, raised"), ("exit code", "--strict", 1, ReasonKind.LOST_QUIT.value)],
)
def test_end_on_fewer_workers_lists_failed_scripts_and_fails_with_strict(
    job, case, flags, code, kind
):
    running = begun(job, case, f"{STAY_AWAY} {flags}")
    assert running.wait(60) == code
    [ended] = running.actions("EndJob")
    facts = ended["reason"]["facts"]
    assert (ended["code"], ended["reason"]["kind"]) == (0, ReasonKind.ALL_RETURNED.value)
    assert (facts["members"], facts["began"], facts["strict"]) == (1, 2, bool(code))
    assert [each["kind"] for each in facts["failed"]] == [kind]


@pytest.mark.parametrize(
    ("case", "code", "cause"), [("unexplained", 7, "unknown"), ("lost driver", 1, "lost driver")]
)
def test_strict_job_succeeds_when_no_script_is_known_to_have_failed(job, case, code, cause):
    running = begun(job, case, f"{STAY_AWAY} --strict")
    assert running.wait(60) == 0
    [exited] = [each for each in running.events("WorkerExited") if each["code"]]
    assert (exited["code"], exited["cause"]) == (code, cause)
    facts = running.actions("EndJob")[0]["reason"]["facts"]
    assert facts["members"] == 1 and "failed" not in facts


def test_job_on_fixed_hosts_ends_when_a_needed_slot_is_given_up(job):
    flags = "-np 2 --min-np 2 --slot-attempts 1 --elastic-timeout 600"
    running = job(flags, FAILING, env={"CASE": "one slot"})
    assert running.wait(60) == 1
    assert verdict(running) == (1, ReasonKind.TOO_FEW_SLOTS.value)
    assert running.events("HostsChanged")[0]["fixed"]
    assert "copies=0" in running.actions("EndJob")[0]["reason"]["facts"]["wrote"]
