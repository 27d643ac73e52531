"""The state of a job, from its events and decisions: processes, stages, ranks, commits."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from elastic.chaos.simulator.simulator import Simulation
from elastic.driver import events
from elastic.driver.journal.entries import Entry, decoded_header
from elastic.driver.membership.membership import Membership
from elastic.driver.monitoring.job_view import STEPS, Failure, JobView, Stage, ViewReader
from elastic.driver.reasons import ReasonKind, because
from elastic.protocol.messages import Commit, Place, Times, Worker
from harness.kept_journals import KEPT, lines_of, unpacked
from harness.published import STORE, WHY, published, starts

A, B, C = (Worker("h", slot) for slot in range(3))
D = Worker("other", 0)
FROZEN = because(ReasonKind.FROZEN, how="stopped")


def ready(worker: Worker, commit: Commit | None = None, *, running: bool = True):
    return events.WorkerReady(worker, 0, commit, STORE, running=running)


def decide(view: JobView, *actions: events.Action) -> None:
    view.note(events.TimePassed(), actions, 9.0)


def happen(view: JobView, *found: events.Event) -> None:
    for event in found:
        view.note(event, [], 9.0)


def training(*workers: Worker) -> JobView:
    view = JobView()
    decide(view, *starts(*workers))
    happen(view, *(events.WorkerConnected(each, 7 + each.slot) for each in workers))
    happen(view, *(ready(each) for each in workers))
    decide(view, published(1, *workers))
    return view


def stages(view: JobView) -> dict[Worker, Stage]:
    return {worker: known.stage for worker, known in view.workers.items()}


class InvariantChecker(ViewReader):
    """Checks the invariants that the fields of a view state, after each event and action."""

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.checked = 0
        self.ending: set[Worker] = set()  # announced their exit, perhaps without a failure
        view.follow(self)

    def happened(self, event, actions, now) -> None:
        if isinstance(event, events.WorkerQuit):
            self.ending.add(event.worker)
        self.check()

    def decided(self, action, now) -> None:
        self.check()

    def check(self) -> None:
        view = self.view
        self.checked += 1
        for worker, known in view.workers.items():
            assert known.worker == worker
            assert known.member == (worker in view.ranks)
            assert not known.member or known.rank == view.ranks[worker]
            ending = known.failure or worker in self.ending
            assert known.member or ending or known.stage is not Stage.IN_WORLD
            assert known.member or not known.recovering
            assert (known.why is not None) == (known.stage in (Stage.LEAVING, Stage.KILLED))
            assert known.code is None
        assert not view.workers.keys() & view.exited.keys()
        assert list(view.ranks.values()) == list(range(len(view.ranks)))
        assert view.world is None or len(view.world.members) == len(view.ranks)
        assert view.world is None or not view.broken
        assert view.durable is None or (view.newest is not None and view.durable <= view.newest)


def check_all(entries: Iterable[Entry], membership: Membership | None = None) -> int:
    """Check the invariants, and that the running processes are those of the membership."""
    view = JobView()
    invariants = InvariantChecker(view)
    for entry in entries:
        view.note(entry.event, entry.actions, entry.at)
        if membership is not None:
            membership.handle(entry.event, entry.at)
            assert view.workers.keys() == {*membership.roster}
            assert view.generation == membership.generation
    return invariants.checked


@pytest.mark.parametrize("kept", sorted(KEPT.glob("*.xz")), ids=lambda kept: kept.name[5:45])
def test_view_of_a_kept_journal_agrees_with_the_membership(kept, tmp_path):
    header, lines = lines_of(unpacked(kept, tmp_path))
    entries = [line for line in lines if isinstance(line, Entry)]
    assert check_all(entries, Membership(decoded_header(header).checked())) >= len(entries)


@pytest.mark.parametrize("seed", [3, 11, 31, 42])
def test_invariants_hold_under_random_faults(seed):
    simulation = Simulation(seed, workers=4, faults=8)
    simulation.run()
    assert check_all(simulation.driver.entries) > 50


def test_worker_passes_through_its_stages():
    view = JobView()
    seen = []

    def note(event: events.Event, *actions: events.Action) -> None:
        view.note(event, actions, 9.0)
        seen.append((view.workers[A].stage, view.workers[A].member))

    note(events.TimePassed(), *starts(A))
    note(events.WorkerConnected(A, 7))
    note(ready(A))
    note(events.TimePassed(), events.TellStandby(A))
    note(events.TimePassed(), published(1, A))
    note(ready(A))
    note(events.TimePassed(), published(2, A))
    note(events.WorkerReturned(A, 2))
    note(events.TimePassed(), events.LetGo(A, WHY))
    note(events.TimePassed(), events.KillWorker(A, FROZEN))
    assert seen == [
        (Stage.STARTING, False),
        (Stage.CONNECTED, False),
        (Stage.READY, False),
        (Stage.STANDBY, False),
        (Stage.IN_WORLD, True),
        (Stage.READY, True),
        (Stage.IN_WORLD, True),
        (Stage.RETURNED, True),
        (Stage.LEAVING, True),
        (Stage.KILLED, True),
    ]
    assert (view.workers[A].pid, view.started) == (7, 1)


def test_worker_outside_the_next_world_keeps_its_last_rank():
    view = training(A, B)
    decide(view, published(2, A))
    known = view.workers[B]
    assert (known.member, known.rank, view.ranks, view.before) == (False, 1, {A: 0}, {A: 0, B: 1})
    decide(view, published(3, B, A))
    assert view.workers[B].rank == 0 and list(view.ranks) == [B, A]


@pytest.mark.parametrize(
    ("event", "gone", "code"),
    [
        (events.WorkerExited(A, -9), [A], -9),
        (events.HostLost("h", "no answer"), [A, B], None),
        (events.HostReported("h", [A], [A, B]), [B], None),
        (events.HostReported("h", []), [], None),  # every start order was received
    ],
)
def test_exit_has_several_reports(event, gone, code):
    view = training(A, B, D)
    view.note(event, [], 9.0)
    assert list(view.exited) == gone and not view.exited.keys() & view.workers.keys()
    assert {known.code for known in view.exited.values()} <= {code}
    assert view.ranks == {A: 0, B: 1, D: 2}  # until the next world
    happen(view, events.TimePassed())
    assert not view.exited


def test_late_reports_of_an_exited_process_are_ignored():
    view = training(A, B)
    happen(view, events.HostLost("h", "no answer"))
    happen(view, events.WorkerConnected(A, 9), ready(A), events.WorkerReturned(A, 1))
    happen(view, events.WorkerSpent(A, 1, Times(), "idle"), events.WorkerExited(A, -9))
    assert not view.workers and not view.exited
    decide(view, *starts(A.next()))
    assert stages(view) == {A.next(): Stage.STARTING}


@pytest.mark.parametrize(
    ("action", "stage"),
    [(events.KillWorker(A, FROZEN), Stage.KILLED), (events.LetGo(A, WHY), Stage.LEAVING)],
)
def test_late_reports_of_a_leaving_or_killed_process_do_not_change_its_stage(action, stage):
    view = training(A)
    decide(view, action)
    happen(view, events.WorkerConnected(A, 7), ready(A))
    assert stages(view) == {A: stage} and view.workers[A].why == action.reason


def test_kill_outweighs_a_release():
    view = training(A)
    decide(view, events.KillWorker(A, FROZEN), events.LetGo(A, WHY, fenced=True))
    known = view.workers[A]
    assert (known.stage, known.why, known.removed) == (Stage.KILLED, FROZEN, False)


def test_broken_world_is_recovering_until_the_next_world():
    view = training(A, B)
    assert view.world is not None and view.trains
    view.note(events.WorkerExited(B, -9), [events.BreakWorld(1, [A], WHY)], 9.0)
    assert not view.world and view.broken and view.workers[A].recovering
    decide(view, published(2, A))
    assert (view.generation, view.broken, view.workers[A].recovering) == (2, False, False)
    decide(view, events.FinishWorld(2, [A]))
    assert not view.world and not view.broken


def test_world_trains_if_a_member_is_in_elastic_run():
    view = training(A)
    happen(view, ready(A, running=False))
    decide(view, published(2, A))
    assert not view.trains
    happen(view, ready(A))
    assert not view.trains
    decide(view, published(3, A))
    assert view.trains


@pytest.mark.parametrize(
    ("elastic", "prepares", "stage"),
    [(True, True, Stage.CONNECTED), (False, False, Stage.IN_WORLD)],
)
def test_member_outside_elastic_run_when_the_job_is_elastic_then_does_not_train(
    elastic, prepares, stage
):
    view = JobView()
    decide(view, *starts(A), events.WelcomeWorker(A, Place(0, 1, 0, 1, 0, 1), False, elastic))
    happen(view, events.WorkerConnected(A, 7), ready(A, running=False))
    decide(view, published(1, A))
    assert (view.prepares, stages(view), view.workers[A].member) == (prepares, {A: stage}, True)
    happen(view, ready(A))
    decide(view, published(2, A))
    assert (view.prepares, stages(view)) == (False, {A: Stage.IN_WORLD})


def test_announced_failures_and_frozen_processes_are_known():
    view = training(A, B, C)
    happen(
        view,
        events.WorkerRaised(A, 1, None, "ValueError: bad", ""),
        events.WorkerQuit(B, 1, 3, "sys.exit(3)"),
        events.WorkerQuit(C, 1, 0, "sys.exit(0)"),
        events.WorkerFrozen(C, ""),
    )
    assert [view.workers[each].failure for each in (A, B, C)] == [
        Failure(True, "ValueError: bad"),
        Failure(False, "sys.exit(3)"),
        None,
    ]
    assert [view.workers[each].frozen for each in (A, C)] == [None, ""]
    happen(view, events.WorkerThawed(C))
    assert view.workers[C].frozen is None


def test_commits_are_counted_within_and_across_generations():
    view = training(A, B)
    for event, number, total in (
        (events.WorkerPaced(A, 1, 9, 1.0, 30.0, 60, Commit(1, 60)), 60, 60),
        (events.WorkerPaced(B, 1, 9, 1.0, 30.0, 59, Commit(1, 59)), 60, 60),
        (events.WorkerDigested(A, 1, Commit(1, 61), 0), 61, 61),
        (events.WorkerSpent(A, 1, Times(), "training", Commit(1, 62)), 62, 62),
        (ready(A, Commit(2, 0)), 0, 62),
        (events.CheckpointMade(Commit(2, 4)), 4, 66),
        (events.WorkerRaised(A, 2, Commit(2, 9), "ValueError: bad", ""), 9, 71),
    ):
        happen(view, event)
        assert view.newest is not None and (view.newest.number, view.commits) == (number, total)
    happen(view, events.CheckpointMade(Commit(2, 3)))
    assert (view.durable, view.checkpoints, view.checkpoint_at) == (Commit(2, 4), 2, 9.0)


def test_step_when_reported_with_a_commit_then_is_known_for_the_last_commits():
    view = training(A)
    happen(view, events.WorkerReady(A, 1, Commit(1, 3), STORE, step=30))
    happen(view, events.CheckpointMade(Commit(1, 5), 50))
    spent = events.WorkerSpent(A, 1, Times(), "training", Commit(1, 6), 60)
    happen(view, spent)
    happen(view, msgspec.structs.replace(spent, commit=None, step=99))
    commits = [Commit(1, number) for number in (3, 4, 5, 6)]
    assert [view.step_of(each) for each in [None, *commits]] == [None, 30, None, 50, 60]
    for number in range(7, 7 + STEPS):
        happen(view, msgspec.structs.replace(spent, commit=Commit(1, number), step=number))
    assert view.step_of(Commit(1, 6)) is None and view.step_of(Commit(1, 7)) == 7


def test_first_end_counts():
    view = training(A)
    done, stopped = events.EndJob(0, WHY), events.EndJob(143, WHY)
    decide(view, done)
    decide(view, stopped)
    assert view.end is done


def test_workers_of_the_previous_driver_are_adopted():
    view = JobView()
    view.adopt({A: (11, 1), B: (12, 0), C: (13, None)}, 7, 50.0)
    assert (view.generation, list(view.ranks), view.trains) == (7, [B, A], True)
    assert stages(view) == {A: Stage.IN_WORLD, B: Stage.IN_WORLD, C: Stage.CONNECTED}
    assert [known.pid for known in view.workers.values()] == [11, 12, 13]


def test_workers_when_adopted_outside_elastic_run_then_the_job_prepares():
    view = JobView()
    view.adopt({A: (11, 0), B: (12, 1)}, 1, 50.0, prepares=True)
    assert (view.prepares, view.trains) == (True, False)
    assert stages(view) == {A: Stage.CONNECTED, B: Stage.CONNECTED}
    decide(view, published(2, A, B))
    assert view.prepares
    view.note(events.WorkerReady(A, 2, None, STORE, running=True), [published(3, A, B)], 60.0)
    assert not view.prepares


def test_commit_reported_only_to_the_previous_driver_is_known_from_the_next_world():
    view = JobView()
    view.adopt({A: (11, 0), B: (12, 1)}, 7, 50.0)
    decide(view, published(8, A, B, commit=Commit(7, 14)))
    assert (view.newest, view.newest_at, view.commits) == (Commit(7, 14), 9.0, 14)
    decide(view, published(9, A, B, commit=Commit(7, 13)))
    assert (view.newest, view.commits) == (Commit(7, 14), 14)


def test_adopted_members_keep_their_ranks_when_some_have_exited():
    view = JobView()
    view.adopt({A: (11, 3), B: (12, 1)}, 7, 50.0)
    assert list(view.ranks.items()) == [(B, 1), (A, 3)]
    assert [view.workers[each].rank for each in (A, B)] == [3, 1]
    decide(view, published(8, A, B))
    assert (view.before, view.ranks) == ({B: 1, A: 3}, {A: 0, B: 1})


def test_reader_sees_the_event_first_and_then_each_action():
    seen: list[tuple[str, int, int]] = []

    class Reader(ViewReader):
        def happened(self, event, actions, now) -> None:
            seen.append((type(event).__name__, len(view.workers), view.generation))

        def decided(self, action, now) -> None:
            seen.append((type(action).__name__, len(view.workers), view.generation))

    view = training(A, B)
    view.follow(Reader())
    actions = [events.BreakWorld(1, [A], WHY), *starts(C), published(2, A)]
    view.note(events.WorkerExited(B, -9), actions, 9.0)
    assert seen == [
        ("WorkerExited", 1, 1),
        ("BreakWorld", 1, 1),
        ("StartWorker", 2, 1),
        ("PublishWorld", 2, 2),
    ]
