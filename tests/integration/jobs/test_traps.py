"""Earlier errors of elastic training."""

import pytest

from harness import wording
from harness.history import RETURN, SCRIPTS, STAY_AWAY, History, sizes, started

pytestmark = pytest.mark.forked

LOADING = ["python", SCRIPTS / "loading.py"]


def test_forked_dataloader_workers_do_not_delay_detection_of_their_parents_death(job):
    """Defect X: they have inherited its sockets, which therefore are not reset when it is killed."""
    loading = job(f"-np 3 --min-np 1 {STAY_AWAY}", LOADING, env={"DIE": "1,5 0,10"})
    loading.succeed()
    assert sizes(loading)[-3:] == [3, 2, 1]
    recoveries = [r for r in loading.actions("ReportRecovery") if r["kind"] == "recovery"]
    assert len(recoveries) == 2
    assert all(r["total_ms"] < 20_000 for r in recoveries), recoveries
    loading.wait_for("done 20 1")


def test_the_default_process_group_belongs_to_the_user(job):
    loading = job(
        f"-np 2 --min-np 1 {STAY_AWAY}", LOADING, env={"DIE": "1,5", "OWN_GROUP": "1", "STEPS": "8"}
    )
    loading.succeed()
    loading.wait_for("done 8 1")


def test_joining_worker_is_a_world_of_one_until_elastic_run(job):
    """Its earlier collectives act on itself only, with one warning for all of them."""
    training = started(
        job, 2, RETURN, GREET="1", DIE="slot=1,step=3,place=forward", HOLD="6:size=2"
    )
    training.succeed()
    history = History(training)
    history.check()
    greeted = {(r["worker"], r["name"]): r["total"] for r in history.all("greeted")}
    for name in ("hello", "again"):
        assert greeted["localhost:0#1", name] == 2.0
        assert greeted["localhost:1#2", name] == 1.0
    assert len([line for line in training.lines if wording.AS_IN_WORLD_OF_ONE in line]) == 1
    newcomer = next(r for r in history.all("greeted") if r["worker"] == "localhost:1#2")
    assert newcomer["rank"] != 0


@pytest.mark.parametrize("how", ["zeros", "model"])
def test_gradients_may_be_zeroed_in_any_way_across_a_recovery(job, how):
    """Both ways drop or keep the buckets' views; after a recovery they must be found again."""
    training = started(job, 3, ZERO_GRAD=how, DIE="slot=1,step=4,place=backward")
    training.succeed()
    History(training).check()


def test_twenty_rebuilds_leave_no_descriptor_and_no_thread_behind(job):
    """Defect X: the sockets of every old ring are closed, in the survivors too."""
    raising = ";".join(
        f"slot={step % 2},step={step},place=stepped,generation={step + 1},error=horovod"
        for step in range(1, 21)
    )
    # A collective that Gloo forgot to wake keeps its group until its timeout, so that must end within the test.
    flags = f"{STAY_AWAY} --gloo-timeout-seconds 5"
    training = started(job, 2, flags, COUNT="1", RAISE=raising, STEPS="22")
    training.succeed()
    history = History(training)
    history.check(steps=22)
    assert len(history.enters()) == 21
    for records in history.by_worker.values():
        used = [(r["fds"], r["threads"]) for r in records if r["what"] == "enter"]
        # The end of old groups is not waited for, so a single record may count one that is just being closed.
        # Nor can a group in which a wake-up was lost: its few threads and sockets stay until its timeout. What every
        # rebuild left behind would be twenty times as much.
        early, late = used[:3], used[-5:]
        assert min(fds for fds, _ in late) <= max(fds for fds, _ in early) + 4, used
        assert min(threads for _, threads in late) <= max(threads for _, threads in early) + 4, used
