"""Workers die in pairs, one after another, or when only some of them have advanced: the others continue from the
newest commit that one of them holds, and train as if nothing had happened. One death in each phase: see test_matrix.
"""

import pytest

from harness.history import History, kill_slot, sizes, started

pytestmark = pytest.mark.forked

# ---- before training -----------------------------------------------------------------------------


def test_first_world_contains_the_survivors_when_four_of_six_workers_die_during_startup(job):
    """Defect L: the first world is that of the others, even if dead workers had reported that they are ready."""
    dying = "slot=0,place=before init;slot=2,place=before init;slot=4,place=before run"
    training = started(job, 6, DIE=dying, WAIT="slot=5,place=before init,file=go")
    training.until(lambda: len(training.events("WorkerReady")) == 3, "three ready workers")
    kill_slot(training, 1)
    kill_slot(training, 3)
    training.until(lambda: len(training.events("WorkerExited")) == 4, "four lost workers")
    (training.folder / "go").touch()
    training.succeed()
    assert sizes(training) == [2, 1]
    History(training).check()


# ---- in a step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_newest_commit_is_kept_when_a_worker_dies_before_all_have_committed(job, behind):
    """The world continues from the newest commit, even if rank 0 does not hold it: a commit is not lost."""
    ahead, victim = 1 - behind, 2
    wait = f"slot={behind},step=5,place=stepped,file=go,then=collective"
    training = started(job, 3, WAIT=wait)
    training.until((training.folder / f"waits.stepped.{behind}").exists, "a waiting worker")
    training.until(
        lambda: History(training).has(f"localhost:{ahead}#1", "save", step=5), "a commit elsewhere"
    )
    kill_slot(training, victim)
    training.wait_for_action("BreakWorld")
    (training.folder / "go").touch()
    training.succeed()
    history = History(training)
    history.check()
    assert history.has(f"localhost:{behind}#1", "enter", step=5)
    last = training.worlds()[-1]
    assert last["holders"] == 1, last


# ---- in a recovery -------------------------------------------------------------------------------


def test_second_worker_dies_during_a_recovery(job):
    """Defect Y: a second loss during a recovery is one more loss, not the end of the job."""
    training = started(
        job, 4, DIE="slot=3,step=4,place=forward", WAIT="slot=1,place=restore,file=go"
    )
    training.until((training.folder / "waits.restore.1").exists, "a recovery under way")
    kill_slot(training, 0)
    training.until(lambda: len(training.events("WorkerExited")) == 2, "a second lost worker")
    (training.folder / "go").touch()
    training.succeed()
    assert sizes(training)[-2:] == [4, 2]
    History(training).check()


# ---- at the end ----------------------------------------------------------------------------------


def test_two_workers_die_between_their_last_commit_and_the_end(job):
    training = started(job, 3, DIE="slot=0,place=end;slot=2,place=end")
    training.succeed()
    History(training).check()


def test_worker_that_has_returned_dies_before_all_have_returned(job):
    """Defect O: the job is not over before all have returned; those that had go back to work if need be."""
    training = started(job, 3, WAIT="slot=1,place=end,file=go")
    training.until(lambda: len(training.events("WorkerReturned")) == 2, "two that have returned")
    kill_slot(training, 0)
    training.wait_for_action("BreakWorld")
    (training.folder / "go").touch()
    training.succeed()
    assert sizes(training)[-1] == 2
    History(training).check()


def test_last_worker_dies_after_all_other_workers_have_returned(job):
    training = started(job, 3, WAIT="slot=1,place=end,file=go")
    training.until(lambda: len(training.events("WorkerReturned")) == 2, "two that have returned")
    kill_slot(training, 1)
    training.succeed()
    History(training).check()
