"""Every wait must end: conversations in which it does, and in which it does not."""

from __future__ import annotations

from elastic.chaos.invariants.invariants import BrokenInvariant
from elastic.driver.events import (
    CallOffChange,
    DriverRestarted,
    FinishWorld,
    HostLost,
    KillWorker,
    LetGo,
    PrepareChange,
    Report,
    StopMembersAt,
    TimePassed,
    WorkerReconnected,
)
from elastic.driver.reasons import ReasonKind, as_sentence, because
from harness.conversation import (
    checked,
    connected,
    disconnected,
    exited,
    has_quit,
    hosts,
    leaving,
    raised,
    ready,
    returned,
    worker,
)
from harness.golden import raises, recorded
from harness.scripted_journal import ScriptedJournal, broken, gathering, started, training, world


def test_job_must_end():
    told = training()
    with raises(BrokenInvariant):
        told.invariants.finish()
    training().invariants.finish(ended=False)


def test_a_killed_worker_exits_or_is_reported_as_immortal():
    def killed() -> ScriptedJournal:
        return training().line(TimePassed(), KillWorker(worker("h:0"), as_sentence("it is stuck")))

    said = killed().breaks("EVERY WAIT ENDS", TimePassed(), after=31.0)
    recorded("log", said)
    killed().line(exited("h:0"), after=29.0).line(TimePassed(), after=31.0)
    undead = because(ReasonKind.CANT_BE_KILLED, worker="h:0#1", within_s=1.0)
    immortal = Report("error", str(undead), undead)
    killed().line(TimePassed(), immortal, after=29.0).line(TimePassed(), after=31.0)


def test_lost_host_is_left_out_unless_all_members_are_ready():
    def ready_without_g(names: list[str]) -> ScriptedJournal:
        told = training(names=names).line(
            TimePassed(), KillWorker(worker("g:0"), as_sentence("it is stuck"))
        )
        told.line(HostLost("g", "no word from it"), broken(2, *names[:2]))
        told.line(TimePassed(), Report("warning", "waiting"), after=31.0)
        return told.line(ready(names[0], 2, (2, 5)))

    both = world(3, "h:0", "h:1", holders=2, commit=(2, 5))
    ready_without_g(["h:0", "h:1", "g:0"]).line(ready("h:1", 2, (2, 5)), both)
    told = ready_without_g(["h:0", "g:1", "g:0"])
    mixed = world(3, "h:0", "g:1", holders=2, commit=(2, 5))
    recorded("messages", told.breaks("FENCED STAYS OUT", ready("g:1", 2, (2, 5)), mixed))

    told = (
        training()
        .line(HostLost("h", "no word from it"))
        .line(exited("h:2"), broken(2, "h:0", "h:1"))
    )
    told.line(ready("h:1", 2, (2, 5))).line(ready("h:0", 2, (2, 5)), both)


def test_host_is_awaited_also_for_a_member_that_is_being_killed():
    """Its exit was not noticed yet, and no other worker is left: a newcomer there is not more lost than it is."""
    told = ScriptedJournal(np=2, workers_min=1).line(hosts(h=2), started("h:0"), started("h:1"))
    told.lines_of(connected("h:0"), connected("h:1"), ready("h:0", 0, running=False))
    told.line(ready("h:1", 0, running=False), world(1, "h:0", "h:1"))
    told.line(exited("h:0"), broken(1, "h:1")).line(TimePassed(), started("h:0#2"))
    told.lines_of(connected("h:0#2"), ready("h:0#2", 0))
    told.line(TimePassed(), KillWorker(worker("h:1"), as_sentence("it is stuck")))
    told.line(HostLost("h", "no word from it"))
    told.line(exited("h:1"), world(2, "h:0#2"))


def test_worker_that_must_leave_or_loses_its_connection_must_exit_in_time():
    told = training().line(leaving("h:0"), LetGo(worker("h:0"), as_sentence("SIGTERM")))
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=31.0)
    told = training().line(raised("h:0", 2, (2, 4)), broken(2, "h:1", "h:2"))
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=31.0)
    told = training().line(disconnected("h:0"))
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=2.5)
    told = training().line(disconnected("h:0"))
    told.line(WorkerReconnected(worker("h:0"), 2, True)).line(TimePassed(), after=2.5)


def test_worker_that_quit_must_exit_in_time_when_its_peers_continue():
    training().line(has_quit("h:0", 2), broken(2, "h:1", "h:2")).line(exited("h:0", 0))
    told = training().line(has_quit("h:0", 2), broken(2, "h:1", "h:2"))
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=31.0)
    told = training(1, workers_min=1).line(has_quit("h:0", 2))
    told.line(TimePassed(), after=600.0)


def test_started_worker_must_call_init_in_time_once_another_waits():
    told = ScriptedJournal().line(hosts(h=3), started("h:0"), started("h:1"))
    told.line(connected("h:0"), after=500.0).line(ready("h:0", 0, running=False))
    recorded("messages", told.breaks("EVERY WAIT ENDS", TimePassed(), after=121.0))


def test_planned_change_must_end_in_time():
    everybody = [worker("h:0"), worker("h:1"), worker("h:2")]
    told = training().line(
        leaving("h:2"), PrepareChange(2, 1, everybody, as_sentence("h:2 leaves"))
    )
    told.line(TimePassed(), CallOffChange(2, 1, everybody, as_sentence("no answer")), after=4.9)
    told.line(TimePassed(), after=10.0)
    told = training().line(
        leaving("h:2"), PrepareChange(2, 1, everybody, as_sentence("h:2 leaves"))
    )
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=5.1)
    told = training().line(
        leaving("h:2"), PrepareChange(2, 1, everybody, as_sentence("h:2 leaves"))
    )
    told.line(checked("h:2", 2, 4), StopMembersAt(2, 1, 5, everybody))
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=601.0)


def test_gathering_and_end_of_a_job_must_end_in_time():
    told = gathering().line(TimePassed(), Report("warning", "waiting for h:0#1"), after=5.0)
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=1300.0)
    told = training().line(returned("h:0", 2))
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=601.0)
    told = training().line(returned("h:0", 2))
    told.line(TimePassed(), FinishWorld(2, [worker("h:0")]), after=600.0)
    told.line(TimePassed(), after=601.0)


def test_deadlines_restart_with_a_restarted_driver():
    told = gathering().line(TimePassed(), Report("warning", "waiting for h:0#1"), after=5.0)
    told.line(DriverRestarted(), after=1200.0)
    told.breaks("EVERY WAIT ENDS", TimePassed(), after=16.0)
