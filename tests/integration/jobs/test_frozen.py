"""Workers that live but can't run: they are fenced, the others continue from the last commit, and one that wakes
later changes nothing. With the default settings, on real processes. Stopped or cut off in any phase: see test_matrix.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request

import pytest

from elastic.driver.reasons import ReasonKind, because
from harness import wording
from harness.history import RETURN, History, pid_of, sizes, started
from harness.job import Job
from harness.ports import free_port
from harness.stalls import freezer

pytestmark = pytest.mark.forked

AT_WORK = "5:file=go"  # at step 5 the workers go on with collectives and commits until they may end


def at_work(job, np: int, flags: str | None = None, **env: str) -> Job:
    training = started(job, np, *([flags] if flags else []), HOLD=AT_WORK, **env)
    training.until(
        lambda: all(History(training).has(f"localhost:{s}#1", "save", step=5) for s in range(np)),
        "all workers at step 5",
    )
    return training


def let_end(training: Job) -> None:
    (training.folder / "go").touch()
    training.succeed()
    History(training).check()


def recoveries(training: Job) -> int:
    return len([r for r in training.actions("ReportRecovery") if r["kind"] == "recovery"])


def test_a_frozen_container_is_as_bad_as_a_stopped_process(job):
    with freezer("unified") as cgroup:
        training = at_work(job, 3)
        cgroup.freeze(pid_of(training, 1))
        training.wait_for_world(2)
        let_end(training)
        assert training.fences() == {1: because(ReasonKind.FROZEN, how="its cgroup is frozen")}


def test_a_stopped_worker_is_replaced_and_counted_in_the_metrics(job):
    port = free_port()
    training = at_work(job, 3, f"{RETURN} --metrics-port {port}")
    assert 'elastic_workers{stage="training"} 3.0' in metrics(port)
    os.kill(pid_of(training, 2), signal.SIGSTOP)
    training.until(lambda: sizes(training)[-2:] == [2, 3], "a world with a new third worker")
    told = metrics(port)
    assert 'elastic_fenced_workers_total{reason="frozen"} 1.0' in told
    assert "elastic_lost_workers_total 1.0" in told and "elastic_world_size 3.0" in told
    assert 'elastic_recovery_seconds_count{kind="recovery"} 1.0' in told
    let_end(training)


def metrics(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text.splitlines()


@pytest.mark.nightly
def test_short_stops_and_stops_of_the_whole_job_fence_no_worker(job):
    """One that is shorter than the lease; and one of the driver too, as when a laptop sleeps: all processes stand
    still, and all go on.
    """
    training = at_work(job, 3)
    pids = [pid_of(training, slot) for slot in range(3)]
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(1.0)  # this is what it is about: half of the lease
    os.kill(pids[1], signal.SIGCONT)
    everybody = [training.driver.pid, *pids]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    assert not training.events("WorkerFrozen")
    time.sleep(3.0)  # longer than the lease
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    let_end(training)
    assert training.fences() == {} and recoveries(training) == 0


@pytest.mark.nightly
def test_only_worker_of_a_job_may_be_stopped_without_limit(job):
    training = at_work(job, 1)
    pid = pid_of(training, 0)
    os.kill(pid, signal.SIGSTOP)
    training.wait_for(wording.FROZEN_NOBODY_ELSE_TRAINS)
    os.kill(pid, signal.SIGCONT)
    training.wait_for(wording.RUNS_AGAIN)
    let_end(training)
    assert training.fences() == {}


# ---- can't be killed ------------------------------------------------------------------------------------------


def test_frozen_worker_that_survives_sigkill_delays_no_other_worker(job):
    """A cgroup of the old kind holds a killed process until it is thawed."""
    with freezer("freezer") as cgroup:
        training = at_work(job, 3)
        pid = pid_of(training, 1)
        cgroup.freeze(pid)
        training.wait_for(wording.COULD_NOT_BE_KILLED % 1)
        training.wait_for_world(2)
        training.until(lambda: recoveries(training) > 0, "a recovery while the process still lives")
        assert training.events("WorkerExited") == []
        cgroup.thaw()
        training.until(lambda: len(training.events("WorkerExited")) == 1, "its exit")
        assert sizes(training)[-1] == 2
        let_end(training)
    assert sizes(training)[-1] == 2


WITHHOLDING = """\
#!{python}
# elasticrun, but kills do not reach their process as long as a file exists: a host that nobody reaches.
import os, sys
from elastic.driver.commandline import cli
from elastic.driver.processes import orphan_reaper_program as reaper

kill_group = reaper.kill_group
reaper.kill_group = lambda pgid: None if os.path.exists("withheld") else kill_group(pgid)
sys.exit(cli.main())
"""


def test_abandoned_worker_that_resumes_changes_no_state_and_exits(job, tmp_path, monkeypatch):
    program = tmp_path / "withholding"
    program.write_text(WITHHOLDING.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr("harness.job.elasticrun", lambda: str(program))
    training = at_work(job, 3)
    pid = pid_of(training, 0)  # rank 0, the source of all state
    (training.folder / "withheld").touch()
    os.kill(pid, signal.SIGSTOP)
    training.wait_for(wording.COULD_NOT_BE_KILLED % 0)
    training.wait_for_world(2)
    training.until(lambda: recoveries(training) > 0, "a recovery without it")
    written = len(History(training).by_worker["localhost:0#1"])
    os.kill(pid, signal.SIGCONT)
    training.until(lambda: len(training.events("WorkerExited")) == 1, "its end by itself")
    assert [r["what"] for r in History(training).by_worker["localhost:0#1"][written:]] in (
        [],
        ["save"],  # it was stopped in the middle of that
    )
    assert sizes(training)[-1] == 2 and recoveries(training) == 1
    (training.folder / "withheld").unlink()
    let_end(training)
