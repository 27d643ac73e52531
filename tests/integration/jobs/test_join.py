"""Workers join and leave as planned: a newcomer gets the whole state, and no other worker loses a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import wording
from harness.history import RETURN, TRAINING, History, kill_slot, sizes, started
from harness.job import Job

pytestmark = pytest.mark.forked

JOINERS = "slot=2,step=2,place=forward"  # its slot returns, and with it a newcomer


class Hosts:
    """A discovery script, and the list that it prints."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        self._list = folder / "hosts"
        self.set(*hosts)
        self.script = folder / "discover.sh"
        self.script.write_text(f"#!/bin/sh\ncat {self._list}\n")
        self.script.chmod(0o755)

    def set(self, *hosts: str) -> None:
        new = self._list.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.rename(self._list)

    def start(
        self, job: Callable[..., Job], np: int, flags: str = "--reset-limit 0", **env: str
    ) -> Job:
        """Here no failure is allowed: every change of the world is a planned one."""
        return job(
            f"-np {np} --min-np 1 --host-discovery-script {self.script} {flags}",
            TRAINING,
            env={"ELASTIC_DIGESTS": "1"} | env,
        )


def undisturbed_by(training: Job, worker: str) -> None:
    """A worker that was there from the first to the last step did none twice."""
    steps = [r["step"] for r in History(training).by_worker[worker] if r["what"] == "step"]
    assert steps == sorted(set(steps)), steps


# ---- one that joins ------------------------------------------------------------------------------


def test_existing_workers_train_while_a_joining_worker_starts(job, tmp_path):
    """Its start does not affect the others: the world changes when it is ready, and not before."""
    hosts = Hosts(tmp_path, "localhost:2")
    training = hosts.start(
        job, 2, WAIT="slot=2,place=before run,file=go", HOLD="3:file=listed;8:size=3"
    )
    training.wait_for_world(2)
    hosts.set("localhost:3")
    training.until((training.folder / "waits.before_run.2").exists, "a newcomer before its run")
    worlds = len(training.worlds())
    (training.folder / "listed").touch()
    training.until(
        lambda: History(training).has("localhost:0#1", "step", step=7), "steps beside the newcomer"
    )
    assert len(training.worlds()) == worlds
    (training.folder / "go").touch()
    training.succeed()
    assert sizes(training)[-1] == 3
    undisturbed_by(training, "localhost:0#1")
    history = History(training)
    history.check()
    joined = [enter for enter in history.all("enter") if enter["worker"] == "localhost:2#1"]
    assert [enter["step"] for enter in joined] == [8]


@pytest.mark.parametrize(
    "optimizer",
    ["SGD", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("plain SGD", "Adam"))],
)
def test_joining_worker_restores_the_received_state_after_a_rollback(job, optimizer):
    """Defects H, I and J: weights though it began with others, the optimizer's state, options that were changed once.

    Before its first own commit another worker dies: the newcomer goes back to what it was given.
    """
    training = started(
        job,
        3,
        RETURN,
        OPTIMIZER=optimizer,
        OWN_WEIGHTS="1",
        DIE=f"{JOINERS};slot=1,step=6,place=backward",
        HOLD="6:size=3",
        STEPS="9",
    )
    training.succeed()
    history = History(training)
    history.check(steps=9, optimizer=optimizer)
    entered = [each["step"] for each in history.all("enter") if each["worker"] == "localhost:2#2"]
    # It may be ready before the others are held at step 6, or enter only after the second loss.
    assert 2 < entered[0] <= 6
    assert entered[-1] == 6


def test_collectives_of_reset_callbacks_include_only_their_callers(job):
    """As in Horovod's example for Keras, which trains a step in one. A newcomer calls none, and awaits the state."""
    training = started(
        job,
        3,
        RETURN,
        DIE=JOINERS,
        WAIT="start=any,place=reset,file=history,then=collective",
        HOLD="5:size=3",
    )
    training.succeed()
    History(training).check()
    assert sizes(training)[-2:] == [2, 3]


def test_a_newcomer_is_ready_in_the_middle_of_a_recovery(job):
    """Defect K: survivors and a newcomer in one new world agree on the receiver of the state."""
    training = started(
        job,
        3,
        RETURN,
        DIE=f"{JOINERS};slot=1,step=5,place=forward",
        WAIT="slot=2,place=before run,start=2,file=join;slot=0,step=5,place=restore,file=restore",
        HOLD="5:file=joining",
    )
    training.until((training.folder / "waits.before_run.2").exists, "a newcomer before its run")
    (training.folder / "joining").touch()
    training.until((training.folder / "waits.restore.0").exists, "a recovery under way")
    (training.folder / "join").touch()
    training.until(
        lambda: any(
            e["worker"] == ["localhost", 2, 2] and e.get("running", True)
            for e in training.events("WorkerReady")
        ),
        "a newcomer that is ready",
    )
    (training.folder / "restore").touch()
    training.succeed()
    history = History(training)
    history.check()
    joined = next(e for e in history.all("enter") if e["worker"] == "localhost:2#2")
    assert joined["step"] == 5


def test_joining_worker_with_another_model_fails_alone_and_its_slot_is_given_up(job):
    """It gets the difference; the others never stop, and its slot is given up in the end."""
    training = started(
        job,
        3,
        "--blacklist-cooldown-range 0.1 0.1 --slot-attempts 2",
        DIE="slot=2,step=2,place=forward",
        WIDER="localhost:2#2 localhost:2#3",
        HOLD="6:file=go",
    )
    training.wait_for(wording.SLOT_LOCALHOST_GIVEN_UP_2, timeout=60)
    (training.folder / "go").touch()
    training.succeed()
    training.wait_for(wording.ELASTIC_MODEL_WEIGHT_FLOAT)
    assert sizes(training)[-1] == 2
    assert len(training.actions("BreakWorld")) == 1, "only for the worker that died"
    History(training).check()


# ---- hosts that come and go ----------------------------------------------------------------------


@pytest.mark.nightly
def test_hosts_can_be_added_removed_and_added_again(job, tmp_path):
    """Defects N and Z: each is used, a removal is no failure, and a removed host may return."""
    hosts = Hosts(tmp_path, "localhost:1")
    training = hosts.start(job, 1, HOLD="1:file=a;2:file=b;4:file=c;6:file=d")
    training.wait_for_world(1)
    hosts.set("localhost:1", "127.0.0.2:1")
    training.until(lambda: len(training.actions("StartWorker")) == 2, "a second worker")
    hosts.set("localhost:1", "127.0.0.2:1", "127.0.0.3:1")
    training.wait_for_world(3)
    (training.folder / "a").touch()
    hosts.set("localhost:1", "127.0.0.3:1")
    training.wait_for(wording.LEFT_EXIT_CODE_LEFT)
    assert sizes(training)[-1] == 2
    (training.folder / "b").touch()
    hosts.set("localhost:1", "127.0.0.3:1", "127.0.0.2:1")
    training.wait_for_world(3)
    (training.folder / "c").touch()
    hosts.set("127.0.0.3:1", "127.0.0.2:1")  # rank 0 leaves
    training.wait_for(wording.LOCALHOST_LEFT_EXIT_CODE)
    assert sizes(training)[-1] == 2
    (training.folder / "d").touch()
    training.succeed()
    assert not training.actions("BreakWorld")
    undisturbed_by(training, "127.0.0.3:0#1")
    History(training).check()


def test_one_host_is_replaced_by_another_in_the_same_second(job, tmp_path):
    """Defect C: the removal does not hide the addition."""
    hosts = Hosts(tmp_path, "localhost:1", "127.0.0.2:1")
    training = hosts.start(job, 2, HOLD="3:file=go")
    training.until(lambda: sizes(training)[-2:] == [2, 2], "training of two")
    hosts.set("localhost:1", "127.0.0.3:1")
    training.until(
        lambda: (
            {member["worker"][0] for member in training.worlds()[-1]["members"]}
            == {"localhost", "127.0.0.3"}
        ),
        "a world with the new host",
    )
    (training.folder / "go").touch()
    training.succeed()
    assert not training.actions("BreakWorld")
    History(training).check()


def test_a_host_is_added_while_a_recovery_is_under_way(job, tmp_path):
    """Defect D: news that comes between two worlds is not forgotten."""
    hosts = Hosts(tmp_path, "localhost:3")
    training = hosts.start(
        job,
        3,
        "--blacklist-cooldown-range 60 60",
        DIE="slot=2,step=3,place=forward",
        WAIT="host=localhost,slot=0,place=reset,file=go",
        HOLD="7:size=3",
    )
    training.until((training.folder / "waits.reset.0").exists, "a recovery under way")
    hosts.set("localhost:3", "127.0.0.2:1")
    training.until(
        lambda: any(a["worker"][0] == "127.0.0.2" for a in training.actions("StartWorker")),
        "a worker on the new host",
    )
    (training.folder / "go").touch()
    training.succeed()
    assert sizes(training)[-1] == 3
    History(training).check()


@pytest.mark.nightly
def test_joining_worker_dies_while_members_stop_for_its_admission(job):
    """Rank 0 is busy before its next commit, so the change has begun and can't be completed."""
    training = started(
        job,
        3,
        RETURN,
        DIE=JOINERS,
        HOLD="5:file=waiting;8:size=3",
        WAIT="slot=2,place=before run,start=2,file=join;slot=0,step=6,place=stepped,file=go",
    )
    training.until((training.folder / "waits.before_run.2").exists, "a newcomer before its run")
    (training.folder / "waiting").touch()
    training.until((training.folder / "waits.stepped.0").exists, "a busy rank 0")
    (training.folder / "join").touch()
    training.wait_for_action("PrepareChange")
    kill_slot(training, 2)
    training.wait_for(wording.LOCALHOST_ENDED_SIGNAL_SIGKILL)
    (training.folder / "go").touch()
    training.succeed()
    assert sizes(training)[-1] == 3, "the slot's third worker"
    History(training).check()
