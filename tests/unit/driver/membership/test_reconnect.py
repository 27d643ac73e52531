"""Messages repeated to workers with a new connection, and by a restarted driver."""

from __future__ import annotations

from elastic.driver.events import (
    Action,
    BreakWorld,
    CallOffChange,
    DriverRestarted,
    EndJob,
    FinishWorld,
    HostReported,
    KillWorker,
    LetGo,
    Member,
    PrepareChange,
    StartWorker,
    StopMembersAt,
    TellWorld,
    WelcomeWorker,
    WorkerReady,
    WorkerReconnected,
)
from elastic.driver.journal.entries import Entry
from elastic.driver.journal.journal import rebuilt
from elastic.driver.membership.membership import Membership, Phase
from elastic.driver.reasons import ReasonKind, because
from harness.conversation import (
    Kind,
    MembershipConversation,
    checked,
    connected,
    disconnected,
    exited,
    failed,
    hosts,
    leaving,
    ready,
    returned,
    running,
    started,
    store,
    worker,
)
from harness.golden import recorded


def every(kind: type[Kind], actions: list[Action]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


def back(name: str, generation: int, *, welcomed: bool = True) -> WorkerReconnected:
    return WorkerReconnected(worker(name), generation, welcomed)


def test_worker_that_reconnects_in_time_is_not_killed():
    talk = running(2)
    talk.tell(disconnected("h:1"), back("h:1", 2))
    assert not every(KillWorker, talk.wait(10.0)) and talk.m.phase is Phase.TRAINING


def test_finished_worker_is_notified_again():
    """The worker is not released: the code after its training still runs, and may train again."""
    talk = running(2)
    assert every(EndJob, talk.tell(returned("h:0", 2), returned("h:1", 2)))
    assert talk.tell(back("h:1", 2)) == [FinishWorld(2, [worker("h:1")])]


def test_worker_that_missed_its_world_receives_the_world_again():
    talk = running(3)
    [repeated] = every(TellWorld, talk.tell(back("h:1", 1)))
    place = talk.m.place_of(worker("h:1"))
    assert place is not None
    assert (repeated.generation, repeated.member) == (2, Member(worker("h:1"), place))
    assert repeated.store == store("h:0")


def test_worker_that_missed_the_break_of_its_world_is_notified_again():
    talk = running(3)
    talk.tell(failed("h:0", 2))
    assert [b.members for b in every(BreakWorld, talk.tell(back("h:1", 2)))] == [[worker("h:1")]]
    talk.tell(ready("h:1", 2, (2, 0)))
    assert not every(BreakWorld, talk.tell(back("h:1", 2)))  # it has received it


def test_current_question_of_a_change_is_repeated():
    talk = running(2)
    talk.tell(leaving("h:1"))
    assert [p.members for p in every(PrepareChange, talk.tell(back("h:0", 2)))] == [[worker("h:0")]]
    talk.tell(checked("h:0", 2, 3), checked("h:1", 2, 4))
    [stop] = every(StopMembersAt, talk.tell(back("h:0", 2)))
    assert (stop.check, stop.members) == (5, [worker("h:0")])


def test_worker_that_may_be_held_by_a_cancelled_change_is_released():
    talk = running(2)
    assert every(CallOffChange, talk.tell(back("h:0", 2)))


def test_worker_that_may_not_return_is_killed():
    talk = running(2)
    talk.tell(exited("h:1"))
    assert every(LetGo, talk.tell(back("h:1", 2)))[0].fenced


def test_kill_and_release_are_repeated():
    talk = running(3)
    talk.tell(disconnected("h:1"))
    assert every(KillWorker, talk.wait(talk.m.settings.disconnect_s))
    answer = talk.tell(back("h:1", 2))
    assert [k.worker for k in every(KillWorker, answer)] == [worker("h:1")]
    assert every(LetGo, answer)[0].fenced


def test_worker_in_init_whose_answer_was_lost_is_welcomed_again():
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    assert every(WelcomeWorker, talk.tell(back("h:0", 0, welcomed=False)))  # equivalent to a Hello
    assert every(WelcomeWorker, talk.tell(back("h:0", 0, welcomed=False)))
    assert not every(WelcomeWorker, talk.tell(back("h:0", 0)))


def test_older_ready_that_arrives_late_is_ignored():
    talk = running(1, workers_min=1)
    talk.tell(hosts(h=1, k=1), connected("k:0"))

    def ready_again(number: int, inside: bool) -> WorkerReady:
        return WorkerReady(worker("k:0"), 0, None, store("k:0"), "x" * inside, inside, number)

    talk.tell(ready_again(2, True))
    assert not talk.tell(ready_again(1, False))  # it would return the worker to init()


# ---- hosts -----------------------------------------------------------------------------------------------------------


def test_worker_that_no_longer_runs_on_its_host_has_exited():
    talk = running(3)
    actions = talk.tell(HostReported("h", [worker("h:0"), worker("h:2")]))
    assert every(BreakWorld, actions)[0].reason.kind is ReasonKind.LOST_EXITED
    recorded("reasons", str(every(BreakWorld, actions)[0].reason))
    assert worker("h:1") not in talk.m.roster


def test_worker_ahead_of_the_journal_ends_the_job():
    talk = running(2)
    [end] = every(EndJob, talk.tell(back("h:1", talk.m.generation + 1)))
    assert end.code == 1
    assert end.reason == because(ReasonKind.JOURNAL_INCOMPLETE, worker="h:1#1", generation=3)


def test_unexpected_worker_is_killed():
    talk = running(1, workers_min=1)
    [kill] = every(KillWorker, talk.tell(HostReported("h", [worker("h:0"), worker("h:7")])))
    assert kill.worker == worker("h:7")


def test_lost_start_is_retried():
    talk = started(2)
    assert talk.tell(HostReported("h", [], ordered=[])) == [], "they may be on their way there"
    talk.tell(HostReported("h", []))
    again = every(StartWorker, talk.wait(talk.m.settings.cooldown_min_s))
    assert [s.worker for s in again] == [worker("h:0#2"), worker("h:1#2")]


# ---- the driver ------------------------------------------------------------------------------------------------------


def test_restarted_driver_gives_all_workers_time_to_reconnect():
    talk = running(3)
    talk.tell(DriverRestarted())
    talk.tell(back("h:0", 2), back("h:1", 2))
    assert not every(KillWorker, talk.wait(talk.m.settings.reconnect_s - 1.0))
    assert [k.worker for k in every(KillWorker, talk.wait(2.0))] == [worker("h:2")]


def test_end_that_may_not_have_been_sent_is_sent_again():
    talk = running(1, workers_min=1)
    [end] = every(EndJob, talk.tell(returned("h:0", 2)))
    assert every(EndJob, talk.tell(DriverRestarted())) == [end]


def test_journal_rebuilds_the_membership_that_wrote_the_journal():
    first = Membership(running(1, workers_min=1).m.settings)
    entries = []
    for at, event in enumerate((hosts(h=1), connected("h:0"), ready("h:0", 0, running=False)), 1):
        entries.append(Entry(float(at), event, first.handle(event, float(at))))
    again = rebuilt(entries, Membership(first.settings))
    assert (again.generation, again.members, again.phase) == (1, [worker("h:0")], Phase.TRAINING)
    following = ready("h:0", 1)
    assert again.handle(following, 9.0) == first.handle(following, 9.0)


def test_finished_worker_is_notified_of_its_own_generation():
    talk = running(2)
    talk.tell(returned("h:0", 2))
    talk.wait(talk.m.settings.elastic_timeout_s + 1)
    [finish] = every(FinishWorld, talk.tell(back("h:0", 2)))
    assert (finish.generation, finish.members) == (2, [worker("h:0")])
