"""Membership: start, loss of members, and the next world.

The scenarios cover the common cases.
"""

from typing import Any

import pytest

from elastic.driver.events import (
    BreakWorld,
    DrainRequested,
    DriverRestarted,
    EndJob,
    FinishWorld,
    HostsQueued,
    KillWorker,
    LetGo,
    PrepareChange,
    PublishWorld,
    Report,
    ReportRecovery,
    StartWorker,
    WelcomeWorker,
    WorkerDiffers,
)
from elastic.driver.membership.membership import IllegalEvent, Phase
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.protocol.messages import Commit, Place
from harness.conversation import (
    MembershipConversation,
    all_lost,
    connected,
    disconnected,
    exited,
    failed,
    fixed_hosts,
    has,
    hosts,
    names,
    order,
    ready,
    resumed,
    returned,
    running,
    said,
    started,
    store,
    stranded,
    the,
    worker,
)
from harness.golden import raises, recorded

# ---- the start ----------------------------------------------------------------------------------


def test_queued_reports_form_the_world_when_the_last_is_handled():
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    for name in ("h:0", "h:1"):
        welcome = the(WelcomeWorker, talk.m.handle(connected(name), 1.0, more=True))
        assert welcome.worker == worker(name), "answers to one worker are not postponed"
    assert talk.m.handle(ready("h:0", 0), 1.1, more=True) == []
    assert talk.m.handle(ready("h:1", 0), 1.2, more=True) == []
    world = the(PublishWorld, talk.m.handle(ready("h:1", 0), 1.2))
    assert order(world) == ["h:0#1", "h:1#1"]


def test_first_world_is_formed_when_all_started_workers_are_ready():
    talk = MembershipConversation(np=3)
    assert talk.tell(hosts(h1=2, h2=2)) == [
        StartWorker(worker("h1:0"), Place(0, 3, 0, 2, 0, 2), because(ReasonKind.FIRST_START)),
        StartWorker(worker("h1:1"), Place(1, 3, 1, 2, 0, 1), because(ReasonKind.FIRST_START)),
        StartWorker(worker("h2:0"), Place(2, 3, 0, 1, 1, 2), because(ReasonKind.FIRST_START)),
    ]
    welcome = the(WelcomeWorker, talk.connect("h1:0"))
    assert (welcome.place.rank, welcome.newcomer) == (0, False)
    talk.connect("h1:1", "h2:0")
    assert talk.ready("h2:0", "h1:1", running=False) == []
    world = the(PublishWorld, talk.ready("h1:0", running=False))
    assert order(world) == ["h1:0#1", "h1:1#1", "h2:0#1"]
    assert (world.generation, world.holders, world.commit) == (1, 0, None)
    assert world.store == store("h1:0")
    assert world.reason == because(ReasonKind.FIRST_WORLD, members=3)


def test_entering_elastic_run_forms_a_world_without_interruption():
    talk = started(3)
    assert talk.ready("h:1") == []
    assert talk.m.phase is Phase.GATHERING
    actions = talk.ready("h:0", "h:2")
    assert order(the(PublishWorld, actions)) == ["h:0#1", "h:1#1", "h:2#1"]
    assert not has(BreakWorld, actions)
    report = the(ReportRecovery, talk.resume())
    assert (report.kind, report.size) == ("start", 3)


def test_worker_that_dies_before_init_is_not_awaited():
    talk = MembershipConversation(np=3)
    talk.tell(hosts(h=3))
    talk.connect("h:0", "h:1")
    talk.ready("h:0", "h:1", running=False)
    world = the(PublishWorld, talk.tell(exited("h:2", 1)))
    assert order(world) == ["h:0#1", "h:1#1"]


def test_first_world_with_too_few_workers_waits_and_logs_why():
    talk = MembershipConversation(np=3, workers_min=3, elastic_timeout_s=60)
    talk.tell(hosts(h=3))
    talk.connect("h:0", "h:1")
    talk.ready("h:0", "h:1", running=False)
    actions = talk.tell(exited("h:2", 1))
    recorded("log", said(actions))
    assert names(talk.wait(1.0)) == ["h:2#2"]
    talk.connect("h:2#2")
    world = the(PublishWorld, talk.ready("h:2#2", running=False))
    assert len(world.members) == 3


def test_every_wait_for_workers_has_a_limit():
    talk = MembershipConversation(np=2, workers_min=2, elastic_timeout_s=60)
    talk.tell(hosts(h=1))
    talk.connect("h:0")
    talk.ready("h:0", running=False)
    end = the(EndJob, talk.wait(61))
    assert end.code == 1
    assert end.reason == because(ReasonKind.TOO_FEW, ready=1, needed=2, within_s=60)


def test_worker_that_hangs_before_init_is_killed_once_another_waits():
    talk = MembershipConversation(np=3, start_timeout_s=120)
    talk.tell(hosts(h=3))
    talk.wait(500)
    talk.connect("h:0", "h:1")
    talk.ready("h:0", "h:1", running=False)
    assert talk.wait(119) == []
    actions = talk.wait(2)
    assert names(actions, KillWorker) == ["h:2#1"]
    assert len(the(PublishWorld, actions).members) == 2
    recorded("log", said(actions))
    recorded("log", said(talk.tell(exited("h:2"))))


def test_worker_ready_only_after_the_first_world_is_a_newcomer():
    talk = MembershipConversation(np=3, start_timeout_s=120)
    talk.tell(hosts(h=3))
    talk.connect("h:0", "h:1", "h:2")
    talk.ready("h:0", "h:1", running=False)
    assert has(PublishWorld, talk.wait(121))
    welcome = the(WelcomeWorker, talk.ready("h:2", generation=0, running=False))
    assert welcome.newcomer and welcome.place.rank != 0


def test_programs_without_init_succeed_when_all_exit_with_0():
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    told = talk.wait(100_000)  # no worker waits for another, so none is killed
    assert told and all(isinstance(each, Report) for each in told)
    assert talk.tell(exited("h:0", 0)) == []
    actions = talk.tell(exited("h:1", 0))
    assert the(EndJob, actions).code == 0
    recorded("messages", the(Report, actions).text)


def test_failed_program_fails_the_job_after_another_succeeded():
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    talk.tell(exited("h:0", 0))
    end = the(EndJob, talk.tell(exited("h:1", 3)))
    assert end.code == 3
    assert end.reason == because(
        ReasonKind.ENDED, who="rank 1 (h:1#1 on h)", exit="exit code 3", killed_for=None
    )


@pytest.mark.parametrize(("code", "wrote"), [(-11, True), (-9, False)])
def test_last_output_does_not_explain_a_kill(code, wrote):
    talk = MembershipConversation(np=2, elastic=False)
    talk.tell(hosts(h=2))
    end = the(EndJob, talk.tell(exited("h:1", code, "a library\nwarns\n")))
    assert ("it wrote:" in str(end.reason)) == wrote


def test_failed_program_is_retried_before_the_job_is_done():
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    talk.tell(exited("h:1", 3))
    assert not has(EndJob, talk.tell(exited("h:0", 0)))
    assert names(talk.wait(1)) == ["h:1#2"]
    assert the(EndJob, talk.tell(exited("h:1#2", 0))).code == 0


def test_script_that_fails_on_every_slot_ends_the_job_with_its_output():
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    talk.tell(exited("h:0", 1))
    end = the(EndJob, talk.tell(exited("h:1", 1, "Traceback\nImportError: no module x\n")))
    assert end.reason == because(
        ReasonKind.SCRIPT_FAILS,
        worker="h:1#1",
        exit="exit code 1",
        killed_for=None,
        wrote="Traceback\nImportError: no module x",
    )


def test_script_that_fails_after_init_on_every_slot_is_not_tried_five_times():
    talk = started(2)
    talk.tell(exited("h:0", 1))  # a file that it opens between init() and elastic.run is missing
    assert names(talk.wait(1)) == ["h:0#2"]
    end = the(EndJob, talk.tell(exited("h:1", 1, "FileNotFoundError: data")))
    assert "FileNotFoundError: data" in str(end.reason)
    assert end.reason == because(
        ReasonKind.SCRIPT_FAILS,
        worker="h:1#1",
        exit="exit code 1",
        killed_for=None,
        wrote="FileNotFoundError: data",
    )


def test_slot_that_gets_further_at_its_second_attempt_continues_the_job():
    talk = started(2)
    talk.tell(exited("h:0", 1))
    talk.wait(1)
    talk.tell(connected("h:0#2"))
    assert not has(EndJob, talk.tell(exited("h:1", 1)))
    assert names(talk.wait(1)) == ["h:1#2"]
    end = the(EndJob, talk.tell(exited("h:0#2", 1)))  # no better than the first attempt after all
    assert end.reason == because(
        ReasonKind.SCRIPT_FAILS, worker="h:0#2", exit="exit code 1", killed_for=None, wrote=""
    )


@pytest.mark.parametrize("connects", [False, True])
def test_worker_when_its_script_raises_before_training_then_the_line_has_the_exception(connects):
    talk = MembershipConversation(np=2, workers_min=2)
    talk.tell(hosts(h=2))
    if connects:
        talk.connect("h:0", "h:1")
        talk.ready("h:0", "h:1", running=False)
    trace = (
        'Traceback (most recent call last):\n  File "t.py", line 4, in <module>\nValueError: bad\n'
    )
    [line] = [each for each in talk.tell(exited("h:1", 1, trace)) if isinstance(each, Report)]
    assert line.about == because(
        ReasonKind.SLOT_COOLS,
        worker="h:1#1",
        exit="exit code 1",
        wait_s=1.0,
        what="ValueError: bad",
    )
    recorded("log", line.text)


def test_single_worker_gets_a_second_attempt_after_a_script_failure():
    talk = MembershipConversation(np=1, workers_min=1)
    talk.tell(hosts(h=1))
    assert not has(EndJob, talk.tell(exited("h:0", 1)))
    assert names(talk.wait(1)) == ["h:0#2"]
    assert the(EndJob, talk.tell(exited("h:0#2", 1))).reason == because(
        ReasonKind.SCRIPT_FAILS, worker="h:0#2", exit="exit code 1", killed_for=None, wrote=""
    )


def test_signals_and_failures_after_training_do_not_blame_the_script():
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    talk.tell(exited("h:0", 1))
    assert not has(EndJob, talk.tell(exited("h:1", -9)))
    talk = running(2)
    end = the(EndJob, talk.tell(exited("h:0", 1), exited("h:1", 1)))
    assert end.reason == all_lost({"h:0#1": "exit code 1", "h:1#1": "exit code 1"})


def test_ready_before_connected_is_a_bug_and_reports_the_history():
    talk = MembershipConversation()
    talk.tell(hosts(h=4))
    with raises(IllegalEvent):
        talk.tell(ready("h:0", 0))


# ---- between init() and elastic.run -------------------------------------------------------------


def test_loss_before_elastic_run_breaks_the_world_of_init():
    talk = started(3)
    broken = the(BreakWorld, talk.tell(exited("h:1")))
    assert broken.members == [worker("h:0"), worker("h:2")]
    assert has(PublishWorld, talk.ready("h:0", "h:2"))


def test_loss_when_some_have_entered_elastic_run_notifies_only_the_remaining_members():
    talk = started(3)
    talk.ready("h:0")
    assert the(BreakWorld, talk.tell(exited("h:1"))).members == [worker("h:2")]
    assert order(the(PublishWorld, talk.ready("h:2"))) == ["h:0#1", "h:2#1"]


def test_world_after_the_loss_of_all_before_elastic_run_is_a_first_world():
    talk = started(2)
    talk.tell(exited("h:0"), exited("h:1"))
    assert names(talk.wait(1)) == ["h:0#2", "h:1#2"]
    greeted = talk.tell(connected("h:0#2"), connected("h:1#2"))
    assert [each.newcomer for each in greeted if isinstance(each, WelcomeWorker)] == [False] * 2
    world = the(PublishWorld, talk.ready("h:0#2", "h:1#2", generation=0, running=False))
    assert (world.generation, order(world)) == (2, ["h:0#2", "h:1#2"])
    assert world.reason == because(ReasonKind.FIRST_WORLD, members=2)


def test_collective_that_breaks_outside_elastic_run_ends_the_job_and_names_the_cause():
    talk = started(3)
    assert talk.tell(stranded("h:0", 1)) == []  # just before the exit is known
    end = the(EndJob, talk.tell(exited("h:1", -11)))
    assert end.reason == because(
        ReasonKind.ENDED,
        who="rank 1 (h:1#1 on h)",
        exit="signal 11 SIGSEGV",
        killed_for=None,
        early=False,
        outside=True,
        wrote="",
        began=False,
    )
    assert "@elastic.run" in str(end.reason)
    assert end.code == 139


def test_collective_that_breaks_after_a_known_exit_ends_the_job():
    talk = started(3)
    talk.tell(exited("h:1"))
    end = the(EndJob, talk.tell(stranded("h:0", 1)))
    assert end.reason == because(
        ReasonKind.SEVERAL,
        causes=[
            because(ReasonKind.LOST_EXITED, worker="h:1#1", exit="signal 9 SIGKILL"),
            because(
                ReasonKind.LOST_PEER_OUTSIDE,
                who="rank 0 (h:0#1 on h)",
                text="connection closed by peer",
                began=False,
            ),
        ],
    )
    recorded("messages", end.reason)


@pytest.mark.parametrize("noticed_first", [False, True])
def test_kill_before_elastic_run_restarts_all_workers_up_to_the_limit(noticed_first):
    talk = started(3, reset_limit=1)
    both = [exited("h:1"), stranded("h:0", 1)]
    actions = talk.tell(*(reversed(both) if noticed_first else both))
    assert names(actions, KillWorker) == ["h:0#1", "h:2#1"]
    assert talk.tell(stranded("h:2", 1)) == []
    restarted = names(talk.tell(exited("h:0", 1), exited("h:2"))) + names(talk.wait(1.5))
    everybody = ["h:0#2", "h:1#2", "h:2#2"]
    assert sorted(restarted) == everybody
    greeted = talk.tell(*(connected(name) for name in everybody))
    assert not any(each.newcomer for each in greeted if isinstance(each, WelcomeWorker))
    world = the(PublishWorld, talk.ready(*everybody, generation=0, running=False))
    assert (world.generation, order(world)) == (2, everybody)
    end = the(EndJob, talk.tell(exited("h:1#2"), stranded("h:0#2", 2)))
    assert end.reason == because(
        ReasonKind.RESET_LIMIT,
        cause=because(ReasonKind.LOST_EXITED, worker="h:1#2", exit="signal 9 SIGKILL"),
        limit=1,
    )


def test_restarted_worker_outside_elastic_run_waits_for_the_remaining_workers():
    """Without elastic.run no worker can join later, so the first ready workers must not train without the others."""
    talk = started(3, reset_limit=1)
    talk.tell(stranded("h:0", 1), exited("h:1"))
    assert names(talk.tell(exited("h:0", 1))) == ["h:0#2"]
    talk.tell(connected("h:0#2"))
    assert not has(PublishWorld, talk.ready("h:0#2", generation=0, running=False))
    assert names(talk.tell(exited("h:2"))) == ["h:2#2"]
    talk.tell(connected("h:2#2"))
    assert not has(PublishWorld, talk.ready("h:2#2", generation=0, running=False))
    assert names(talk.wait(1.5)) == ["h:1#2"]
    talk.tell(connected("h:1#2"))
    world = the(PublishWorld, talk.ready("h:1#2", generation=0, running=False))
    assert order(world) == ["h:0#2", "h:1#2", "h:2#2"]


def test_failure_before_elastic_run_is_not_retried():
    for events in ([exited("h:1", 3), stranded("h:0", 1)], [stranded("h:0", 1), exited("h:1", 3)]):
        talk = started(3, reset_limit=5)
        recorded("messages", str(the(EndJob, talk.tell(*events)).reason))


def test_worker_stranded_while_a_peer_is_in_elastic_run_restarts():
    talk = started(3)
    talk.ready("h:0")
    talk.tell(exited("h:1"))
    actions = talk.tell(stranded("h:2", 1), exited("h:2", 1))
    assert not has(EndJob, actions)
    assert names(talk.wait(1.5)) == ["h:1#2", "h:2#2"]
    assert order(the(PublishWorld, talk.join("h:1#2", "h:2#2")))[0] == "h:0#1"


def test_repeated_init_on_all_workers_forms_a_new_world_without_a_failure():
    talk = started(3, reset_limit=0)
    for generation in (2, 3, 4):
        talk.wait(1000)  # regardless of the age of the process
        assert talk.ready("h:2", "h:0", running=False) == []
        world = the(PublishWorld, talk.ready("h:1", running=False))
        assert (world.generation, len(world.members)) == (generation, 3)
    ended = talk.tell(*(exited(f"h:{slot}", 0) for slot in range(3)))
    assert the(EndJob, ended).code == 0


def test_newcomer_does_not_join_in_init():
    talk = started(2, workers_max=3)
    talk.tell(hosts(h=3))
    talk.join("h:2")
    talk.ready("h:0", running=False)
    assert len(the(PublishWorld, talk.ready("h:1", running=False)).members) == 2
    talk.ready("h:0")
    assert len(the(PublishWorld, talk.ready("h:1")).members) == 3


def test_worker_that_never_reaches_elastic_run_is_left_out():
    talk = started(3, elastic_timeout_s=60)
    talk.ready("h:0", "h:1")
    world = the(PublishWorld, talk.wait(61))
    assert order(world) == ["h:0#1", "h:1#1"]
    prepare = the(PrepareChange, talk.ready("h:2", generation=1))
    assert str(prepare.reason) == "h:2#1 joined"


# ---- losing members -----------------------------------------------------------------------------


def test_lost_worker_breaks_the_world_and_survivors_continue():
    talk = running(4)
    assert the(BreakWorld, talk.tell(exited("h:1"))) == BreakWorld(
        2,
        [worker("h:0"), worker("h:2"), worker("h:3")],
        because(ReasonKind.LOST_EXITED, worker="h:1#1", exit="signal 9 SIGKILL"),
    )
    assert talk.tell(failed("h:0", 2), failed("h:2", 2)) == []  # the same failure
    assert talk.tell(ready("h:0", 2, (2, 8)), ready("h:3", 2, (2, 9))) == []
    world = the(PublishWorld, talk.tell(ready("h:2", 2, (2, 9))))
    assert order(world) == ["h:2#1", "h:3#1", "h:0#1"]  # the holders of the newest commit first
    assert (world.holders, world.commit) == (2, Commit(2, 9))
    assert world.reason == because(
        ReasonKind.NEXT_WORLD,
        cause=because(ReasonKind.LOST_EXITED, worker="h:1#1", exit="signal 9 SIGKILL"),
        ready=3,
        members=4,
        new=0,
    )
    report = the(ReportRecovery, talk.resume())
    assert (report.kind, report.size) == ("recovery", 3)
    assert talk.tell(failed("h:0", 2)) == []  # stale


def test_survivor_may_report_the_failure_before_the_exit_is_known():
    talk = running(4)
    broken = the(BreakWorld, talk.tell(failed("h:0", 2)))
    assert broken.reason == because(
        ReasonKind.COLLECTIVE_BROKE, worker="h:0#1", text="connection closed by peer"
    )
    talk.tell(exited("h:1"))
    world = the(PublishWorld, talk.ready("h:0", "h:2", "h:3", commit=(2, 1)))
    assert world.reason == because(
        ReasonKind.NEXT_WORLD,
        cause=because(ReasonKind.LOST_EXITED, worker="h:1#1", exit="signal 9 SIGKILL"),
        ready=3,
        members=4,
        new=0,
    )


def test_notifications_do_not_grow_with_the_number_of_lost_workers():
    talk = running(20)
    talk.tell(*(exited(f"h:{slot}") for slot in range(15)))
    left = [f"h:{slot}" for slot in range(15, 20)]
    reason = str(the(PublishWorld, talk.ready(*left, commit=(2, 5))).reason)
    recorded("messages", reason)


def test_many_unkillable_workers_are_left_behind_at_once():
    talk = running(6)
    for slot in (1, 3, 2):
        assert names(talk.tell(disconnected(f"h:{slot}", silent=True)), KillWorker)
        talk.wait(0.1)
    assert not has(BreakWorld, talk.wait(0.65))
    assert the(BreakWorld, talk.wait(0.1)).reason == because(
        ReasonKind.LOST_ALIVE, worker="h:1#1", killed_for=because(ReasonKind.CUT_OFF)
    )
    talk.wait(0.3)
    world = the(PublishWorld, talk.ready("h:0", "h:4", "h:5", commit=(2, 5)))
    assert order(world) == ["h:0#1", "h:4#1", "h:5#1"]


def test_second_failure_while_the_next_world_forms():
    talk = running(4)
    talk.tell(exited("h:0"))
    talk.ready("h:1", "h:2", "h:3", commit=(2, 5))
    broken = the(BreakWorld, talk.tell(exited("h:1")))
    assert broken.generation == 3
    talk.tell(ready("h:2", 3, (3, 0)))
    world = the(PublishWorld, talk.tell(ready("h:3", 3, (2, 5))))  # during the copy of the state
    assert (order(world), world.holders) == (["h:2#1", "h:3#1"], 1)


def test_job_ends_when_all_holders_of_a_commit_are_lost():
    talk = running(3)
    talk.tell(exited("h:0"), exited("h:1"))
    end = the(EndJob, talk.tell(exited("h:2", -11, "core\ndumped")))
    assert end.code == 1
    assert end.reason == all_lost(
        {"h:0#1": "signal 9 SIGKILL", "h:1#1": "signal 9 SIGKILL", "h:2#1": "signal 11 SIGSEGV"},
        wrote="core\ndumped",
    )


def test_survivors_without_a_commit_are_no_source():
    talk = running(3)
    talk.tell(exited("h:0"))
    talk.ready("h:1", "h:2", commit=(2, 5))
    talk.wait(1)
    talk.join("h:0#2")
    talk.stop_all()
    talk.tell(exited("h:1"), exited("h:2"))
    end = the(EndJob, talk.tell(ready("h:0#2", 4, None)))
    assert end.reason == because(
        ReasonKind.NO_COMMIT,
        cause=because(
            ReasonKind.SEVERAL,
            causes=[
                because(ReasonKind.LOST_EXITED, worker="h:1#1", exit="signal 9 SIGKILL"),
                because(ReasonKind.LOST_EXITED, worker="h:2#1", exit="signal 9 SIGKILL"),
            ],
            more=0,
        ),
    )


def test_worker_that_delays_a_recovery_is_named_within_seconds():
    talk = running(3)
    talk.tell(exited("h:0"))
    talk.tell(ready("h:1", 2, (2, 5)))
    lines = [a.text for a in talk.wait(6.0) if isinstance(a, Report)]
    recorded("log", lines)
    assert not [a for a in talk.wait(3.0) if isinstance(a, Report)]  # not repeated soon


def test_survivor_that_does_not_return_is_killed_and_remaining_workers_continue():
    talk = running(4, elastic_timeout_s=60)
    talk.tell(exited("h:0"))
    talk.ready("h:1", "h:2", commit=(2, 5))
    actions = talk.wait(60)
    assert names(actions, KillWorker) == ["h:3#1"]
    assert not has(PublishWorld, actions)  # the kill comes before the smaller world
    assert order(the(PublishWorld, talk.tell(exited("h:3")))) == ["h:1#1", "h:2#1"]


def test_unkillable_worker_is_left_behind():
    talk = running(4, elastic_timeout_s=60, leave_s=30)
    talk.tell(exited("h:0"))
    talk.ready("h:1", "h:2", commit=(2, 5))
    actions = talk.wait(91)
    recorded("log", said(actions))
    assert len(the(PublishWorld, actions).members) == 2


def test_lost_connection_without_an_exit_leads_to_a_kill():
    talk = running(4)
    assert talk.tell(disconnected("h:3")) == []
    assert names(talk.wait(2), KillWorker) == ["h:3#1"]
    broken = the(BreakWorld, talk.tell(exited("h:3")))
    assert broken.reason == because(
        ReasonKind.LOST_KILLED, worker="h:3#1", killed_for=because(ReasonKind.CONNECTION_LOST)
    )


def test_exit_code_0_inside_elastic_run_is_a_loss():
    talk = running(3)
    assert has(BreakWorld, talk.tell(exited("h:0", 0)))


def test_worker_that_rejoined_without_a_failure_breaks_the_world():
    talk = running(3)
    assert the(BreakWorld, talk.tell(ready("h:1", 2, (2, 4)))).members == [
        worker("h:0"),
        worker("h:2"),
    ]


def test_reset_limit_counts_failures_only():
    talk = running(3, reset_limit=1)
    for _ in range(2):
        talk.tell(hosts(h=2))
        talk.stop_all()
        talk.tell(exited("h:2", 0), exited("h:2#2", 0), hosts(h=3))
        talk.join(f"h:2#{2 + _}")
        talk.stop_all()
        talk.resume()
    assert len(talk.members) == 3
    talk.tell(exited("h:0"))
    names_left = [n for n in talk.members if n != "h:0#1"]
    assert has(PublishWorld, talk.ready(*names_left, commit=(talk.m.generation, 9)))
    end = the(EndJob, talk.tell(failed(names_left[0], talk.m.generation)))
    assert end.reason == because(
        ReasonKind.RESET_LIMIT,
        cause=because(
            ReasonKind.COLLECTIVE_BROKE, worker="h:1#1", text="connection closed by peer"
        ),
        limit=1,
    )


def test_repeated_breaks_without_progress_end_the_job():
    talk = running(2, stranded_failures=3)
    for generation in (2, 3):
        talk.tell(failed("h:0", generation))
        assert has(PublishWorld, talk.ready("h:0", "h:1", commit=(generation, 0)))
    talk.tell(failed("h:0", 4))
    end = the(EndJob, talk.ready("h:0", "h:1", commit=(4, 0)))
    assert end.reason == because(
        ReasonKind.IN_CIRCLES,
        worlds=3,
        cause=because(
            ReasonKind.COLLECTIVE_BROKE, worker="h:0#1", text="connection closed by peer"
        ),
    )


def test_worlds_that_never_reach_the_copy_make_no_progress():
    talk = running(2, stranded_failures=3)
    talk.tell(failed("h:0", 2))
    talk.ready("h:0", "h:1", commit=(2, 7))
    for generation in (3, 4):
        talk.tell(failed("h:0", generation))
        assert has(PublishWorld, talk.ready("h:0", "h:1", commit=(2, 7)))
    talk.tell(failed("h:0", 5))
    assert has(EndJob, talk.ready("h:0", "h:1", commit=(2, 7)))


def test_differing_replicas_of_a_commit_are_killed():
    from elastic.driver.events import WorkerDigested

    talk = running(3)
    commit = Commit(2, 4)
    talk.tell(WorkerDigested(worker("h:2"), 2, commit, 77))
    actions = talk.tell(WorkerDigested(worker("h:0"), 2, commit, 78))
    kill = the(KillWorker, actions)
    assert kill.worker == worker("h:2")  # the higher rank counts as corrupted
    assert kill.reason == because(ReasonKind.OTHER_DIGEST, right="h:0#1", commit="2.4")
    assert not has(KillWorker, talk.tell(WorkerDigested(worker("h:1"), 2, commit, 78)))


# ---- cooldown -----------------------------------------------------------------------------------


def test_failed_slot_cools_down_and_other_slots_of_its_host_do_not():
    talk = running(4, cooldown_min_s=5)
    actions = talk.tell(exited("h:1"), hosts(h=5))
    assert names(actions) == ["h:4#1"]
    assert names(talk.wait(4)) == []


def test_slot_whose_workers_die_repeatedly_is_given_up_with_their_last_output():
    talk = running(3, cooldown_min_s=1, slot_attempts=4)
    talk.tell(exited("h:2"))
    talk.ready("h:0", "h:1", commit=(2, 5))
    waits = []
    for incarnation in (2, 3, 4, 5):
        before = talk.now
        while not names(talk.wait(0.5)):
            pass
        waits.append(round(talk.now - before))
        actions = talk.tell(exited(f"h:2#{incarnation}", 1, "no such\ndevice\n"))
    assert waits == [1, 1, 2, 4]  # the first loss was followed by progress
    recorded("log", said(actions))
    recorded("log", said(actions))
    assert names(talk.wait(1000)) == []
    assert talk.m.phase is Phase.TRAINING  # the others continue


def test_progress_clears_the_failures_of_a_slot():
    talk = running(3, slot_attempts=2)
    for incarnation in (1, 2, 3):
        talk.tell(exited(f"h:2#{incarnation}"))
        talk.ready("h:0", "h:1", commit=(talk.m.generation, 4))
        talk.resume()
        assert names(talk.wait(1)) == [f"h:2#{incarnation + 1}"]
        talk.join(f"h:2#{incarnation + 1}")
        talk.stop_all()
        talk.resume()


def test_job_does_not_wait_when_every_slot_is_given_up():
    talk = running(2, slot_attempts=2, workers_min=2, elastic_timeout_s=600)
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 0))
    talk.wait(1)
    talk.tell(exited("h:1#2", 1))
    assert the(EndJob, talk.wait(601)).reason == because(
        ReasonKind.TOO_FEW, ready=1, needed=2, within_s=600
    )
    talk = MembershipConversation(np=1, workers_min=1, slot_attempts=2)
    talk.tell(hosts(h=1), exited("h:0", -11))
    talk.wait(1)
    end = the(EndJob, talk.tell(exited("h:0#2", 2, "bad\nflag")))
    assert end.reason == because(ReasonKind.SLOTS_SPENT, attempts=2, needed=1, wrote="bad\nflag")


def test_restarted_driver_waits_for_the_next_report_of_queued_hosts():
    talk = MembershipConversation(np=2, workers_min=2, elastic_timeout_s=60)
    talk.tell(HostsQueued(2), hosts())
    assert not any(isinstance(each, EndJob) for each in talk.wait(3600))
    talk.tell(DriverRestarted())
    assert the(EndJob, talk.wait(61)).reason == because(
        ReasonKind.TOO_FEW, ready=0, needed=2, within_s=60
    )


def short_by_a_slot(
    listed=fixed_hosts, **settings: Any
) -> tuple[MembershipConversation, list[Any]]:
    """Two workers needed; the one on h:1 fails until its slot is given up. Returns the actions of that moment."""
    talk = MembershipConversation(
        np=2, workers_min=2, slot_attempts=2, elastic_timeout_s=600, **settings
    )
    talk.tell(listed(h=2))
    talk.connect("h:0")
    talk.ready("h:0", running=False)
    talk.tell(exited("h:1", 1, "ValueError: copies=0"))
    talk.wait(1)
    return talk, talk.tell(exited("h:1#2", 1, "ValueError: copies=0"))


def test_job_on_fixed_hosts_ends_when_the_slots_left_are_too_few():
    _, actions = short_by_a_slot()
    end = the(EndJob, actions)
    assert end.code == 1
    facts = end.reason.facts
    assert end.reason.kind is ReasonKind.TOO_FEW_SLOTS
    assert (facts["usable"], facts["needed"], facts["given_up"]) == (1, 2, "h:1")
    assert (facts["attempts"], facts["wrote"]) == (2, "ValueError: copies=0")
    recorded("reasons", end.reason)


def test_job_with_a_growable_host_list_waits_when_slots_are_given_up():
    talk, actions = short_by_a_slot(listed=hosts)
    assert not any(isinstance(each, EndJob) for each in actions)
    assert names(talk.tell(hosts(h=3))) == ["h:2#1"]


def test_job_on_fixed_hosts_waits_for_a_slot_that_is_drained_or_cools_down():
    talk = MembershipConversation(np=3, workers_min=3, slot_attempts=2, elastic_timeout_s=600)
    talk.tell(fixed_hosts(h=3, g=1))
    talk.tell(DrainRequested(1, "g"))
    talk.connect("h:0", "h:2")
    talk.ready("h:0", "h:2", running=False)
    talk.tell(exited("h:1", 1))
    assert names(talk.wait(1)) == ["h:1#2"]  # after its cooldown
    actions = talk.tell(exited("h:1#2", 1))
    assert not any(isinstance(each, EndJob) for each in actions)  # an operator may refill g
    assert the(EndJob, talk.wait(601)).reason.kind is ReasonKind.TOO_FEW


def test_job_on_fixed_hosts_ends_in_a_recovery_that_lacks_slots():
    talk = running(2, slot_attempts=2, workers_min=2, elastic_timeout_s=600)
    talk.tell(fixed_hosts(h=2), exited("h:1", 3))
    talk.ready("h:0", commit=(2, 0))
    talk.wait(1)
    assert the(EndJob, talk.tell(exited("h:1#2", 3))).reason.kind is ReasonKind.TOO_FEW_SLOTS


# ---- the end ------------------------------------------------------------------------------------


def test_first_worker_to_return_does_not_end_the_job():
    talk = running(2)
    assert talk.tell(returned("h:1", 2)) == []
    assert talk.m.phase is Phase.ENDING
    actions = talk.tell(returned("h:0", 2))
    assert the(FinishWorld, actions).members == [worker("h:0"), worker("h:1")]
    assert the(EndJob, actions) == EndJob(
        0, because(ReasonKind.ALL_RETURNED, members=2, generation=2)
    )
    assert talk.m.over and talk.m.next_deadline() is None


def test_newcomers_at_the_end_are_released():
    talk = running(2, workers_max=5)
    talk.tell(hosts(h=5))
    talk.connect("h:2")
    talk.connect("h:3")
    talk.tell(returned("h:0", 2), ready("h:2", 0))
    actions = talk.tell(returned("h:1", 2))
    assert sorted(names(actions, LetGo)) == ["h:2#1", "h:3#1"]
    assert names(actions, KillWorker) == ["h:4#1"]
    assert names(talk.tell(ready("h:0", 2, running=False)), LetGo) == ["h:0#1"]
    assert names(talk.tell(connected("h:4")), LetGo) == ["h:4#1"]


def test_loss_after_some_have_returned_recalls_all_survivors():
    talk = running(3)
    talk.tell(returned("h:1", 2))
    assert the(BreakWorld, talk.tell(exited("h:0"))).members == [worker("h:1"), worker("h:2")]
    world = the(PublishWorld, talk.ready("h:1", "h:2", commit=(2, 30)))
    assert order(world) == ["h:1#1", "h:2#1"]


def test_loss_after_all_peers_returned_ends_the_job_with_success():
    talk = running(3)
    talk.tell(returned("h:0", 2), returned("h:1", 2))
    assert the(EndJob, talk.tell(exited("h:2"))).code == 0


def test_returned_worker_waits_for_a_limited_time():
    talk = running(3, elastic_timeout_s=60)
    talk.tell(returned("h:1", 2))
    actions = talk.wait(61)
    assert the(FinishWorld, actions).members == [worker("h:1")]
    assert the(BreakWorld, talk.tell(exited("h:2"))).members == [worker("h:0")]
    assert order(the(PublishWorld, talk.ready("h:0", commit=(2, 3)))) == ["h:0#1"]
    assert the(EndJob, talk.tell(returned("h:0", 3))).code == 0


def test_worker_returning_after_the_first_release_waits_for_a_limited_time():
    talk = running(3)
    talk.tell(returned("h:0", 2))
    assert has(FinishWorld, talk.wait(601))
    talk.tell(returned("h:1", 2))
    assert the(FinishWorld, talk.wait(601)).members == [worker("h:1")]


def test_stop_ends_the_job_in_any_phase():
    from elastic.driver.events import StopRequested

    for talk in (MembershipConversation(), started(), running()):
        assert talk.tell(StopRequested("Ctrl-C")) == [EndJob(1, as_sentence("Ctrl-C"))]


def test_messages_of_dead_workers_are_ignored():
    talk = running(3)
    talk.tell(exited("h:2"))
    late = [resumed("h:2", 2), failed("h:2", 2), returned("h:2", 2), ready("h:2", 2), exited("h:2")]
    assert talk.tell(*late, disconnected("h:2"), connected("h:2"), stranded("h:2", 2)) == []


def test_corrupted_worker_is_killed_and_survivors_continue_from_their_commit():
    talk = running(3)
    now = talk.m.generation
    differs = WorkerDiffers(worker("h:2"), now, Commit(now, 8), ["model"], 2)
    actions = talk.tell(differs)
    [killed] = [action for action in actions if isinstance(action, KillWorker)]
    assert killed.worker == worker("h:2") and killed.reason.kind is ReasonKind.DAMAGED
    assert killed.reason == because(ReasonKind.DAMAGED, parts="model", commit="2.8", equal=2)
    assert not has(KillWorker, talk.tell(differs)), "once is enough"
    talk.tell(exited("h:2"))
    assert order(the(PublishWorld, talk.ready("h:0", "h:1", commit=(now, 8)))) == ["h:0#1", "h:1#1"]
    late = WorkerDiffers(worker("h:1"), now, Commit(now, 8), ["model"], 2)
    assert not has(KillWorker, talk.tell(late)), "that world is over"
