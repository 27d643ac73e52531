"""Time accounting of a job: from its events to seconds that add up."""

from __future__ import annotations

import msgspec
import pytest

from elastic.driver.events import (
    BreakWorld,
    CheckpointMade,
    DriverRestarted,
    EndJob,
    HostLost,
    KillWorker,
    ReportRecovery,
    TimePassed,
    WorkerExited,
    WorkerProgressed,
    WorkerReady,
    WorkerResumed,
    WorkerSpent,
)
from elastic.driver.monitoring import time_accounting
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import Seconds, TimeSpent, summary
from elastic.driver.reasons import ReasonKind, because
from elastic.protocol.messages import Commit, Part, Times, Worker
from harness.golden import recorded
from harness.published import STORE, WHY, published, starts

A, B, C = (Worker("h", slot) for slot in range(3))


def resumed(spent: TimeSpent, worker: Worker, generation: int, now: float) -> None:
    report = ReportRecovery(generation, "recovery", WHY, 1, 0.0, {}, 0, False)
    spent.view.note(WorkerResumed(worker, generation, {}, 0, False), [report], now)


def ready(worker: Worker, generation: int, *, running: bool = True) -> WorkerReady:
    return WorkerReady(worker, generation, None, STORE, running=running)


def trains() -> TimeSpent:
    """A and B start at 100, enter elastic.run at 110, and train until 140."""
    spent = TimeSpent(JobView())
    spent.view.note(TimePassed(), starts(A, B), 100.0)
    first = published(1, A, B, holders=0)
    spent.view.note(ready(A, 0, running=False), [first], 104.0)
    spent.view.note(ready(A, 1), [], 109.0)
    spent.view.note(ready(B, 1), [published(2, A, B, holders=0)], 110.0)
    for worker in (A, B):
        totals = Times(training=29.0, committing=1.0, joining=8.0)
        spent.view.note(WorkerSpent(worker, 2, totals, "training"), [], 140.0)
    return spent


def of(spent: TimeSpent, worker: Worker) -> Seconds:
    return next(times for each, times in spent.workers() if each.worker == worker)


def age(times: Times) -> float:
    return float(sum(msgspec.structs.astuple(times)))


def broken(spent: TimeSpent, worker: Worker, now: float, code: int = -9) -> None:
    spent.view.note(WorkerExited(worker, code), [BreakWorld(2, [A], WHY)], now)


def test_time_passes_without_events_until_the_job_has_ended():
    spent = trains()
    spent.go_on(150.0)
    assert sum(spent.stretches().values()) == 50.0 and age(of(spent, A)) == 50.0
    spent.view.note(TimePassed(), [EndJob(0, WHY)], 151.0)
    spent.view.note(WorkerExited(A, 0), [], 152.0)
    over = [spent.over]  # B may still write something
    spent.go_on(152.5)
    assert (sum(spent.stretches().values()), age(of(spent, B))) == (52.5, 52.5)
    spent.view.note(WorkerExited(B, 0), [], 153.0)
    spent.go_on(1000.0)
    assert [*over, spent.over] == [False, True]
    assert sum(spent.stretches().values()) == 53.0
    assert (age(of(spent, A)), age(of(spent, B))) == (52.0, 53.0)


# ---- workers -------------------------------------------------------------------------------------


def test_time_a_worker_cannot_report_is_added_to_its_report():
    spent = trains()
    spent.view.note(TimePassed(), [], 150.0)
    # 2 s before init(); and it has trained for another 10 s.
    assert of(spent, A) == Seconds(training=39.0, committing=1.0, joining=10.0)


def test_dead_worker_lost_as_much_as_the_first_of_its_world():
    spent = trains()
    broken(spent, B, 150.0)
    spent.view.note(ready(A, 2), [published(3, A)], 151.0)
    totals = Times(training=36.0, committing=1.0, joining=8.0, recovering=1.0, lost=3.0)
    spent.view.note(WorkerSpent(A, 3, totals, "training"), [], 151.0)
    assert of(spent, B) == Seconds(training=36.0, committing=1.0, joining=10.0, lost=3.0)
    assert of(spent, A) == Seconds(
        training=36.0, committing=1.0, joining=10.0, recovering=1.0, lost=3.0
    )


def test_newcomer_does_not_know_the_loss_of_dead_workers():
    spent = trains()
    broken(spent, B, 150.0)
    spent.view.note(TimePassed(), starts(C), 150.0)
    spent.view.note(ready(A, 2), [published(3, A, C)], 155.0)
    spent.view.note(WorkerSpent(C, 3, Times(joining=4.0), "training"), [], 156.0)
    assert of(spent, B).lost == 0.0
    totals = Times(training=36.0, committing=1.0, joining=8.0, recovering=5.0, lost=4.0)
    spent.view.note(WorkerSpent(A, 3, totals, "training"), [], 156.0)
    assert of(spent, B).lost == 4.0


def test_later_loss_is_not_attributed_to_workers_that_died_before():
    spent = trains()
    broken(spent, B, 150.0)
    spent.view.note(ready(A, 2), [published(3, A)], 151.0)
    totals = Times(training=39.0, committing=1.0, joining=8.0, recovering=1.0)
    spent.view.note(WorkerSpent(A, 3, totals, "training"), [], 151.0)
    spent.view.note(
        WorkerSpent(A, 4, msgspec.structs.replace(totals, lost=9.0), "training"), [], 170.0
    )
    assert of(spent, B).lost == 0.0


def test_work_since_the_newest_checkpoint_is_lost_when_all_workers_die():
    spent = trains()
    spent.view.note(CheckpointMade(Commit(2, 5)), [], 144.0)
    broken(spent, A, 150.0)
    broken(spent, B, 150.0)
    spent.view.note(TimePassed(), starts(C), 151.0)
    spent.view.note(ready(C, 0), [published(3, C, holders=0)], 155.0)
    assert of(spent, A).lost == of(spent, B).lost == 6.0


def test_all_training_is_lost_without_a_checkpoint_when_all_workers_die():
    spent = trains()
    broken(spent, A, 150.0)
    broken(spent, B, 150.0)
    spent.view.note(ready(C, 0), [published(3, C, holders=0)], 155.0)
    assert of(spent, A) == Seconds(committing=1.0, joining=10.0, lost=39.0)


def test_worker_that_dies_without_a_report_trained_since_its_first_world():
    spent = TimeSpent(JobView())
    spent.view.note(TimePassed(), starts(A), 100.0)
    spent.view.note(ready(A, 0), [published(1, A, holders=0)], 104.0)
    broken(spent, A, 106.5)
    assert of(spent, A) == Seconds(training=2.5, joining=4.0)


def test_workers_of_a_lost_host_end_with_the_host():
    spent = trains()
    spent.view.note(HostLost("h", "gone"), [], 150.0)
    spent.view.note(TimePassed(), [], 190.0)
    assert [age(times) for _, times in spent.workers()] == [50.0, 50.0]
    spent.view.note(WorkerSpent(A, 2, Times(), "idle"), [], 191.0)  # its last report arrives late
    assert len(spent.workers()) == 2


def test_late_report_of_a_lost_host_counts_for_no_worker():
    spent = TimeSpent(JobView())
    workers = [Worker("h", slot) for slot in range(2 * time_accounting.KEPT + 1)]
    spent.view.note(TimePassed(), starts(*workers), 100.0)
    spent.view.note(HostLost("h", "gone"), [EndJob(1, WHY)], 150.0)
    assert spent.older_count > 0
    spent.view.note(WorkerSpent(workers[0], 2, Times(), "training"), [], 151.0)
    assert (len(spent.running), spent.over) == (0, True)


def test_worker_of_the_previous_driver_has_its_reported_age():
    spent = TimeSpent(JobView())
    spent.view.note(WorkerSpent(A, 5, Times(training=70.0, joining=5.0), "training"), [], 20.0)
    spent.view.note(WorkerExited(A, 0), [], 30.0)
    assert of(spent, A) == Seconds(training=80.0, joining=5.0)


def test_thousands_of_exited_workers_are_aggregated(monkeypatch):
    monkeypatch.setattr(time_accounting, "KEPT", 5)
    spent = TimeSpent(JobView())
    for number in range(1, 21):
        worker = Worker("h", 0, number)
        spent.view.note(TimePassed(), starts(worker), 10.0 * number)
        spent.view.note(WorkerExited(worker, 1), [], 10.0 * number + 4.0)
    assert len(spent.workers()) <= 10
    assert age(spent.total()) == 20 * 4.0
    assert any(
        line.split()[:2] == ["all", "workers"] and "80.00" in line for line in summary(spent)
    )


# ---- the job -------------------------------------------------------------------------------------


def test_job_has_exactly_one_state_at_a_time():
    spent = trains()
    broken(spent, B, 150.0)
    spent.view.note(ready(A, 2), [published(3, A)], 151.0)
    resumed(spent, A, 3, 152.0)
    spent.view.note(ready(A, 3), [published(4, A, C)], 160.0)
    resumed(spent, C, 4, 160.5)
    spent.view.note(TimePassed(), [EndJob(0, WHY)], 170.0)
    spent.view.note(WorkerExited(A, 0), [], 172.0)
    assert spent.stretches() == {
        "starting": 10.0,
        "training": 57.5,
        "stalled": 0.0,
        "recovering": 2.0,
        "changing": 0.5,
        "ending": 2.0,
    }
    assert sum(spent.stretches().values()) == 72.0
    assert (spent.count["recovering"], spent.count["changing"]) == (1, 1)


def test_change_lasts_from_the_first_stop_until_all_members_train():
    spent = trains()
    spent.view.note(ready(A, 2), [], 150.0)
    spent.view.note(ready(B, 2), [published(3, A, B, C)], 150.5)
    resumed(spent, C, 3, 151.0)
    spent.go_on(160.0)
    assert spent.stretches()["changing"] == 1.0


def test_recovery_when_the_next_world_breaks_at_once_then_counts_once():
    spent = trains()
    broken(spent, B, 150.0)
    spent.view.note(ready(A, 2), [published(3, A, C)], 151.0)
    spent.view.note(WorkerExited(C, -9), [BreakWorld(3, [A], WHY)], 152.0)
    spent.view.note(ready(A, 3), [published(4, A)], 153.0)
    resumed(spent, A, 4, 154.0)
    assert (spent.stretches()["recovering"], spent.count["recovering"]) == (4.0, 1)


def test_newcomer_outside_elastic_run_does_not_mark_the_start_of_the_job():
    spent = trains()
    spent.view.note(TimePassed(), starts(C), 150.0)
    spent.view.note(ready(C, 0, running=False), [], 155.0)
    spent.view.note(ready(A, 2), [], 160.0)
    assert spent.stretches()["training"] == 50.0
    assert spent.stretches()["starting"] == 10.0


def test_successor_driver_continues_a_training_job():
    spent = TimeSpent(JobView())
    spent.view.adopt({A: (1, 0), B: (2, 1)}, 5, 500.0)
    spent.view.note(DriverRestarted(), [], 500.0)
    spent.view.note(WorkerSpent(A, 5, Times(training=70.0, lost=2.0), "training"), [], 510.0)
    spent.view.note(WorkerSpent(B, 5, Times(training=70.0, lost=2.0), "training"), [], 510.0)
    broken(spent, B, 520.0)
    spent.view.note(ready(A, 5), [published(6, A)], 520.5)
    resumed(spent, A, 6, 521.0)
    assert spent.stretches()["training"] == 20.0 and spent.stretches()["recovering"] == 1.0
    totals = Times(training=77.0, lost=5.0, recovering=1.0)
    spent.view.note(WorkerSpent(A, 6, totals, "training"), [], 521.0)
    assert of(spent, B).lost == 5.0  # two before, and three by its death


def test_static_job_has_one_world():
    spent = TimeSpent(JobView())
    spent.view.note(TimePassed(), starts(A), 100.0)
    spent.view.note(ready(A, 0, running=False), [published(1, A)], 104.0)
    spent.view.note(WorkerExited(A, 0), [EndJob(0, WHY)], 154.0)
    assert spent.stretches()["training"] == 50.0
    assert spent.goodput() is None
    recorded("messages", summary(spent)[-1])


# ---- stalls --------------------------------------------------------------------------------------


def stalls(spent: TimeSpent, worker: Worker, since: float) -> None:
    """Report a wait that begins at ``since``, one second after it began."""
    spent.view.note(WorkerProgressed(worker, 2, 7, "gradients", 1.0), [], since + 1.0)


def test_stalled_time_is_a_separate_part_for_job_and_members():
    spent = trains()
    stalls(spent, A, 145.0)
    spent.go_on(149.0)
    assert spent.stall is None and spent.total().stalled == 0.0
    spent.go_on(185.0)
    lasting = [each.seconds for each in [spent.stalls.current(185.0)] if each is not None]
    assert lasting == [40.0]
    assert spent.stretches()["stalled"] == 40.0 and spent.stretches()["training"] == 35.0
    # No worker has reported since, so all of it was training in their last reports.
    assert of(spent, A) == of(spent, B) == Seconds(34.0, 1.0, joining=10.0, stalled=40.0)
    assert spent.goodput() == 34.0 / 85.0
    spent.view.note(WorkerProgressed(A, 2, 7), [], 185.0)
    spent.go_on(195.0)
    assert spent.stall is None
    assert spent.stretches()["stalled"] == 40.0 and spent.stretches()["training"] == 45.0
    assert of(spent, A) == Seconds(44.0, 1.0, joining=10.0, stalled=40.0)
    assert sum(spent.stretches().values()) == 95.0 == age(of(spent, A))


def test_stall_is_subtracted_from_each_workers_reported_activity():
    """B waits for its data, and reports so during the stall and after it."""
    spent = trains()
    stalls(spent, A, 145.0)
    totals = Times(training=29.0, committing=1.0, joining=8.0, data=0.5)
    spent.view.note(WorkerSpent(B, 2, msgspec.structs.replace(totals, data=3.0), "data"), [], 148.0)
    spent.view.note(
        WorkerSpent(B, 2, msgspec.structs.replace(totals, data=25.0, training=34.0), "data"),
        [],
        170.0,
    )
    spent.view.note(WorkerProgressed(A, 2, 7), [], 185.0)
    spent.view.note(
        WorkerSpent(B, 2, msgspec.structs.replace(totals, data=41.0, training=38.0), "training"),
        [],
        190.0,
    )
    found = of(spent, B)
    assert found.stalled == 40.0 and found.data <= 5.0 and age(found) == 90.0


def test_report_in_the_first_seconds_of_a_stall_omits_no_time():
    spent = trains()
    stalls(spent, A, 145.0)
    # one report before the stall is known
    for at, training in ((149.0, 38.0), (151.0, 40.0), (190.0, 79.0)):
        totals = Times(training=training, committing=1.0, joining=8.0)
        spent.view.note(WorkerSpent(B, 2, totals, "training"), [], at)
        if at == 151.0:
            spent.view.note(WorkerProgressed(A, 2, 7), [], 185.0)
    assert of(spent, B) == Seconds(39.0, 1.0, joining=10.0, stalled=40.0)


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_wait_for_a_killed_culprit_is_stalled_and_not_lost(in_the_middle):
    spent = trains()
    stalls(spent, A, 145.0)
    totals = Times(training=59.0, committing=1.0, joining=8.0)
    if in_the_middle:
        spent.view.note(WorkerSpent(A, 2, totals, "training"), [], 170.0)
    kill = KillWorker(B, because(ReasonKind.BUSY, for_s=40.0, rates="", where=""))
    spent.view.note(TimePassed(), [kill, BreakWorld(2, [A], WHY)], 185.0)
    spent.view.note(WorkerExited(B, -9), [], 185.1)
    spent.view.note(ready(A, 2), [published(3, A)], 185.2)
    # It rolled back to a commit of 144: everything since is lost in its own account.
    totals = Times(training=33.0, committing=1.0, joining=8.0, recovering=0.2, lost=41.0)
    spent.view.note(WorkerSpent(A, 3, totals, "training"), [], 185.2)
    found = msgspec.structs.astuple(of(spent, A))
    assert found == pytest.approx((33.0, 1.0, 0.0, 0.0, 0.2, 10.0, 1.0, 0.0, 40.0))
    assert of(spent, B).stalled == 40.0 and of(spent, B).lost == pytest.approx(1.0)
    assert spent.stretches()["stalled"] == 40.0


# ---- texts ---------------------------------------------------------------------------------------


def test_summary_is_a_table_with_its_sum():
    spent = trains()
    spent.view.note(TimePassed(), [EndJob(0, WHY)], 140.0)
    first, head, a, b, everybody, last = summary(spent)
    recorded("messages", first)
    assert head.split()[:3] == ["seconds", "total", "training"]
    assert a.split() == [
        "h:0#1",
        "40.00",
        "29.00",
        "1.00",
        "0.00",
        "0.00",
        "0.00",
        "10.00",
        "0.00",
        "0.00",
        "0.00",
    ]
    assert b.split()[0] == "h:1#1"
    assert everybody.split()[2:4] == ["80.00", "58.00"]
    recorded("messages", last.strip())


def test_summary_of_many_workers_shows_some(monkeypatch):
    monkeypatch.setattr(time_accounting, "SHOWN", 1)
    assert "  ... and 1 more" in summary(trains())


def test_summary_of_a_job_without_workers_is_short():
    recorded("messages", summary(TimeSpent(JobView()))[0])


@pytest.mark.parametrize("doing", ["training", "idle", "data"])
def test_every_activity_is_accounted_until_the_exit(doing):
    spent = trains()
    spent.view.note(WorkerSpent(A, 2, Times(joining=38.0), doing), [], 140.0)
    spent.view.note(WorkerExited(A, 0), [], 145.0)
    assert age(of(spent, A)) == 45.0
    assert getattr(of(spent, A), doing) == 5.0


# ---- since the last report -----------------------------------------------------------------------


def reported(worker: Worker, *at: tuple[float, Part, dict[str, float]]) -> TimeSpent:
    """Two workers that have trained since 110, one of which makes these reports."""
    spent = trains()
    for when, doing, totals in at:
        spent.view.note(WorkerSpent(worker, 2, Times(joining=8.0, **totals), doing), [], when)
    return spent


@pytest.mark.parametrize("doing", ["committing", "data", "training"])
def test_time_since_the_last_report_follows_the_mean_activity(doing):
    totals = {"training": 38.5, "committing": 1.2, "data": 0.3}
    spent = reported(A, (150.0, doing, totals))
    spent.go_on(162.0)
    # as from 140 to 150: 95 % training, 2 % committing, 3 % waiting for data
    assert of(spent, A).committing == pytest.approx(1.2 + 0.02 * 12)
    assert of(spent, A).data == pytest.approx(0.3 + 0.03 * 12)
    assert of(spent, A).training == pytest.approx(38.5 + 0.95 * 12)
    assert age(of(spent, A)) == pytest.approx(62.0)


def test_worker_with_few_reports_is_assumed_to_behave_like_its_peers():
    totals = {"training": 38.0, "committing": 2.0}
    spent = reported(A, (150.0, "training", totals))
    first = Times(training=0.01, committing=0.09, joining=1.0)
    spent.view.note(TimePassed(), starts(C), 151.0)
    spent.view.note(ready(C, 2), [published(3, A, B, C)], 152.0)
    spent.view.note(WorkerSpent(C, 3, first, "committing"), [], 153.0)
    spent.go_on(163.0)
    assert of(spent, C).committing == pytest.approx(0.09 + 10 * 0.1)
    assert of(spent, C).training == pytest.approx(0.01 + 10 * 0.9)
    assert age(of(spent, C)) == pytest.approx(12.0)


def test_steps_count_as_training_before_any_report():
    spent = trains()
    first = Times(training=0.01, committing=0.09, joining=1.0)
    spent.view.note(TimePassed(), starts(C), 151.0)
    spent.view.note(ready(C, 2), [published(3, A, B, C)], 152.0)
    spent.view.note(WorkerSpent(C, 3, first, "committing"), [], 153.0)
    spent.go_on(165.0)
    assert of(spent, C).committing == 0.09
    assert of(spent, C).training == pytest.approx(12.01)


@pytest.mark.parametrize("doing", ["recovering", "storage", "joining", "idle"])
def test_activity_outside_steps_lasts_until_the_next_report(doing):
    spent = reported(A, (150.0, doing, {"training": 39.0, "committing": 1.0}))
    before = getattr(of(spent, A), doing)
    spent.go_on(162.0)
    assert getattr(of(spent, A), doing) == pytest.approx(before + 12.0)
