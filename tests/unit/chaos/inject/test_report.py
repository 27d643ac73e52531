"""The report of a fictitious job: a journal of a few lines, and its faults."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from elastic.chaos.inject.plan import Injected
from elastic.chaos.inject.report import percentiles, report
from elastic.chaos.inject.terminal_report import show
from elastic.driver.events import (
    Action,
    BreakWorld,
    EndJob,
    Event,
    KillWorker,
    ReportRecovery,
    StopMembersAt,
    TimePassed,
    WorkerDigested,
    WorkerExited,
    WorkerFailed,
    WorkerFrozen,
    WorkerLeaving,
    WorkerReady,
    WorkerResumed,
    WorkerReturned,
)
from elastic.driver.journal.entries import Entry
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Worker
from harness.golden import recorded
from harness.published import STORE, published

A, B, C = (Worker("localhost", slot) for slot in range(3))


class Told:
    """A journal under construction. Training begins at second 100, in generation 2, with A, B and C."""

    def __init__(self, np: int = 3) -> None:
        self.settings = Settings(np=np, workers_min=1, workers_max=np, elastic=True)
        self.entries: list[Entry] = []
        self.injected: list[Injected] = []
        self.world(99.0, 2, A, B, C)
        self.at_work(100.0, 2, 3, kind="start")

    def event(self, at: float, event: Event, *actions: Action) -> None:
        self.entries.append(Entry(at, event, list(actions)))

    def world(self, at: float, generation: int, *workers: Worker, commit=None) -> None:
        self.event(at, TimePassed(), published(generation, *workers, holders=0, commit=commit))

    def at_work(self, at: float, generation: int, size: int, *, kind: str, ms: float = 50) -> None:
        phases = {"gathered": ms / 2, "raised": ms / 10}
        done = ReportRecovery(generation, kind, as_sentence("because"), size, ms, phases, 0)
        self.event(at, WorkerResumed(A, generation, phases), done)

    def commit(self, at: float, generation: int, number: int, *workers: Worker, digest=7) -> None:
        for worker in workers:
            commit = Commit(generation, number)
            self.event(at, WorkerDigested(worker, generation, commit, digest))

    def lost(self, at: float, worker: Worker, generation: int, *left: Worker, code=-9) -> None:
        self.event(
            at, WorkerExited(worker, code), BreakWorld(generation, list(left), as_sentence("lost"))
        )

    def ends(self, at: float, *, code: int = 0) -> None:
        self.event(
            at,
            WorkerReturned(A, 9) if not code else TimePassed(),
            EndJob(code, as_sentence("the end")),
        )

    def fault(self, at: float, kind: str, worker: Worker, *, until=None) -> None:
        number = len(self.injected) + 1
        self.injected.append(Injected(number, kind, worker, 1, 3, at, kind, until))

    def report(self, *, code: int = 0, broken=()):
        return report(self.settings, self.entries, self.injected, code=code, broken=broken)


def a_kill(told: Told) -> None:
    """B is killed at 110; A and C train on at 110.06, from the commit of 109.5."""
    told.commit(109.5, 2, 1, A, B, C)
    told.fault(110.0, "kill", B)
    told.lost(110.01, B, 2, A, C)
    told.world(110.04, 3, A, C, commit=Commit(2, 1))
    told.at_work(110.06, 3, 2, kind="recovery", ms=50)


def test_report_of_a_kill_and_its_recovery_has_times_steps_and_digests():
    told = Told()
    a_kill(told)
    told.commit(119.0, 3, 1, A, C)
    told.ends(120.0)
    found = told.report()
    (fate,) = found.faults
    recorded("messages", fate.outcome)
    assert fate.noticed_ms == pytest.approx(10.0)
    assert fate.back_ms == pytest.approx(60.0)
    assert (fate.at_s, fate.generation) == (pytest.approx(10.0), 3)
    (recovery,) = found.recoveries
    assert (recovery.kind, recovery.total_ms, recovery.size) == ("recovery", 50, 2)
    assert recovery.phases_ms == {"gathered": 25, "raised": 5}
    assert (found.steps.kept, found.steps.lost, found.steps.gone) == (2, 0, 0)
    assert found.steps.again_s == pytest.approx(0.51)
    assert found.digests.compared == 2
    assert found.digests.differing == 0
    assert found.exit_code == 0


def test_goodput_counts_only_time_whose_work_was_kept():
    told = Told()
    a_kill(told)
    told.commit(119.0, 3, 1, A, C)
    told.ends(120.0)
    goodput = told.report().goodput
    assert goodput.total_s == pytest.approx(20.0)
    assert goodput.training_s == pytest.approx(9.5 + 9.94)  # 0.5 s of work was repeated
    assert goodput.full_s == pytest.approx(9.5)
    assert goodput.worker_s == pytest.approx(3 * 9.5 + 2 * 9.94)
    assert goodput.worker_share == pytest.approx((3 * 9.5 + 2 * 9.94) / 60)


def test_without_digests_the_time_until_the_break_counts_as_kept():
    told = Told()
    told.commit(100.0, 2, 0, A, B, C)  # the state that was copied at the start
    told.lost(110.0, B, 2, A, C)
    told.world(110.1, 3, A, C)
    told.ends(110.1)
    found = told.report()
    assert found.goodput.training_s == pytest.approx(10.0)
    assert not found.digests.of_commits


def test_a_commit_that_a_member_held_and_that_is_undone_is_lost():
    told = Told()
    told.commit(105.0, 2, 1, A, B, C)
    told.commit(109.5, 2, 2, A, B)
    told.lost(110.0, C, 2, A, B)
    told.world(110.1, 3, A, B, commit=Commit(2, 1))
    told.ends(111.0)
    found = told.report()
    assert found.steps.lost == 1
    assert found.steps.kept == 1
    recorded("messages", found.steps.lost_at)
    assert found.exit_code == 1


def test_commit_of_a_ready_worker_is_counted_as_lost_when_undone():
    told = Told()
    told.commit(109.5, 2, 1, A, B)
    told.lost(110.0, C, 2, A, B)
    told.event(110.05, WorkerReady(A, 2, Commit(2, 1), STORE))
    told.world(110.1, 3, A, B)  # from the beginning
    told.ends(111.0)
    assert told.report().steps.lost == 1


def test_commit_held_only_by_the_dead_counts_as_gone_and_not_as_lost():
    told = Told()
    told.commit(105.0, 2, 1, A, B, C)
    told.commit(109.5, 2, 2, B)
    told.lost(110.0, B, 2, A, C)
    told.world(110.1, 3, A, C, commit=Commit(2, 1))
    told.ends(111.0)
    found = told.report()
    assert (found.steps.kept, found.steps.lost, found.steps.gone) == (1, 0, 1)
    assert found.exit_code == 0


def test_replicas_that_differ_are_named():
    told = Told()
    told.commit(105.0, 2, 1, A, B)
    told.commit(105.0, 2, 1, C, digest=8)
    told.commit(106.0, 2, 2, A)
    told.ends(107.0)
    found = told.report()
    assert (found.digests.compared, found.digests.differing, found.digests.single) == (1, 1, 1)
    assert "localhost:2#1 0000000000000008" in found.digests.examples[0]
    assert found.exit_code == 1


def test_the_exit_code_is_that_of_the_job_or_reports_a_broken_invariant():
    told = Told()
    told.ends(101.0, code=3)
    assert told.report(code=3, broken=["ONE PER SLOT"]).exit_code == 3
    assert told.report(code=0, broken=["ONE PER SLOT"]).exit_code == 1
    recorded("messages", told.report(code=3).ended)


def test_a_planned_change_costs_the_time_from_the_stop_to_the_next_first_collective():
    told = Told()
    told.fault(109.0, "leave", C)
    told.event(109.01, WorkerLeaving(C, "SIGTERM"))
    told.event(110.0, TimePassed(), StopMembersAt(2, 1, 9, [A, B, C]))
    told.world(110.5, 3, A, B)
    told.at_work(111.0, 3, 2, kind="change")
    told.event(111.5, WorkerExited(C, 0))
    told.ends(120.0)
    found = told.report()
    (fate,) = found.faults
    recorded("messages", fate.outcome)
    assert fate.noticed_ms == pytest.approx(10.0)
    assert found.goodput.training_s == pytest.approx(10.0 + 9.0)
    assert found.steps.again_s == 0.0


def test_a_frozen_worker_is_fenced():
    told = Told()
    told.fault(110.0, "freeze", B, until=118.0)
    told.event(
        112.0, WorkerFrozen(B, "stopped by SIGSTOP"), KillWorker(B, as_sentence("it is frozen"))
    )
    told.lost(112.02, B, 2, A, C)
    told.world(112.04, 3, A, C)
    told.at_work(112.06, 3, 2, kind="recovery")
    told.ends(120.0)
    (fate,) = told.report().faults
    recorded("messages", fate.outcome)
    assert fate.noticed_ms == pytest.approx(2000.0)
    assert fate.back_ms == pytest.approx(2060.0)


def test_a_freeze_without_fencing_is_a_stall_and_no_training():
    told = Told()
    for number in range(1, 60):
        told.commit(100.0 + 0.1 * number, 2, number, A, B, C)
    told.fault(105.95, "freeze", B, until=107.0)
    for number in range(60, 90):
        told.commit(107.0 + 0.1 * (number - 60), 2, number, A, B, C)
    told.ends(110.0)
    found = told.report()
    (fate,) = found.faults
    recorded("messages", fate.outcome)
    assert found.goodput.stalled_s == pytest.approx(1.0)
    assert found.goodput.training_s == pytest.approx(9.0)


def test_a_long_gap_without_a_fault_is_attributed_to_the_script():
    """For example, a validation."""
    told = Told()
    for number in range(1, 40):
        told.commit(100.0 + 0.1 * number, 2, number, A, B, C)
    told.commit(108.0, 2, 40, A, B, C)
    told.ends(110.0)
    assert told.report().goodput.stalled_s == 0.0


def test_cut_connection_recovers_with_the_same_workers():
    told = Told()
    told.fault(110.0, "cut", B)
    told.event(110.01, WorkerFailed(C, 2, "reset"), BreakWorld(2, [A, B, C], as_sentence("reset")))
    told.world(110.02, 3, A, B, C)
    told.at_work(110.03, 3, 3, kind="recovery")
    told.ends(111.0)
    (fate,) = told.report().faults
    recorded("messages", fate.outcome)
    assert fate.back_ms == pytest.approx(30.0)


def test_second_fault_during_a_recovery_is_reported():
    told = Told()
    told.fault(110.0, "kill", B)
    told.lost(110.01, B, 2, A, C)
    told.world(110.02, 3, A, C)
    told.fault(110.03, "kill", C)
    told.lost(110.04, C, 3, A)
    told.world(110.05, 4, A)
    told.at_work(110.08, 4, 1, kind="recovery")
    told.ends(111.0)
    outcomes = [fate.outcome for fate in told.report().faults]
    recorded("messages", outcomes)


def test_kill_that_ends_the_job_is_reported():
    told = Told()
    told.fault(110.0, "kill", B)
    told.event(110.01, WorkerExited(B, -9), EndJob(1, as_sentence("too few workers")))
    (fate,) = told.report(code=1).faults
    recorded("messages", fate.outcome)
    assert fate.back_ms is None


def test_a_worker_that_exits_after_the_end_has_ended_normally():
    told = Told()
    told.fault(110.0, "slow", B, until=112.0)
    told.ends(115.0)
    told.event(115.5, WorkerExited(B, 0))
    (fate,) = told.report().faults
    recorded("messages", fate.outcome)


def test_job_that_never_trained_has_a_report():
    settings = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
    found = report(
        settings, [Entry(1.0, TimePassed(), [EndJob(1, as_sentence("no slots"))])], [], code=1
    )
    assert found.goodput.share == 0.0
    assert found.steps.kept == 0
    recorded("messages", found.ended)


def shown(found) -> str:
    text = StringIO()
    show(found, Console(file=text, width=200))
    return text.getvalue()


def test_report_without_observed_training_fails():
    settings = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
    found = report(
        settings, [Entry(1.0, TimePassed(), [EndJob(0, as_sentence("the end"))])], [], code=0
    )
    assert found.exit_code == 1
    recorded("messages", shown(found))
    told = Told()
    told.ends(101.0)
    assert told.report().exit_code == 0
    recorded("messages", shown(told.report()))


def test_a_stopped_job_has_the_exit_code_of_its_process():
    told = Told()
    told.ends(101.0, code=1)
    recorded("messages", told.report(code=143).ended)


def test_faults_of_the_plan_that_did_not_occur_are_reported():
    told = Told()
    told.ends(101.0)
    ended = (told.settings, told.entries, told.injected)
    some = shown(report(*ended, code=0, planned=2, missed=["did not come: kill rank 0"]))
    recorded("messages", some)
    recorded(
        "messages", shown(report(*ended, code=0, planned=1, missed=["did not come: kill rank 0"]))
    )


def test_percentiles_are_values_that_were_measured():
    assert percentiles([5.0, 1.0, 3.0]) == [3.0, 5.0, 5.0]
    assert percentiles(range(1, 101)) == [50, 90, 100]
    assert percentiles([4.0]) == [4.0, 4.0, 4.0]
    assert percentiles([]) == []
