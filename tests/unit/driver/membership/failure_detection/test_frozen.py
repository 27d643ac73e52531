"""Workers that are stopped or unreachable: killed at once, since the collectives of their world cannot complete.

The scenarios cover the common cases.
"""

from __future__ import annotations

import pytest

from elastic.driver.events import (
    BreakWorld,
    EndJob,
    HostReported,
    KillWorker,
    LetGo,
    PublishWorld,
    StartWorker,
)
from elastic.driver.membership.membership import Phase
from elastic.driver.reasons import ReasonKind, because
from harness.conversation import (
    MembershipConversation,
    checked,
    disconnected,
    exited,
    frozen,
    has,
    host_lost,
    hosts,
    leaving,
    names,
    order,
    ready,
    returned,
    running,
    said,
    started,
    static,
    thawed,
    the,
    worker,
)
from harness.golden import recorded

# ---- stopped ------------------------------------------------------------------------------------


def test_frozen_worker_is_killed_once_and_later_reports_are_ignored():
    talk = running(3)
    talk.tell(frozen("h:2"))
    assert talk.tell(frozen("h:2"), thawed("h:2")) == []
    assert talk.tell(exited("h:2")) != []
    assert talk.tell(frozen("h:2"), thawed("h:2")) == []


def test_ready_worker_counts_as_running_despite_an_older_agent_report():
    """The worker was continued between two samples of its agent, so its message arrives first."""
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    talk.connect("h:0", "h:1")
    talk.ready("h:0", running=False)
    talk.tell(frozen("h:1"))
    actions = talk.ready("h:1", running=False)
    assert not has(KillWorker, actions)
    assert order(the(PublishWorld, actions)) == ["h:0#1", "h:1#1"]


def test_only_holder_of_a_commit_is_not_killed_for_waiting_newcomers():
    talk = running(1, workers_min=1, workers_max=2)
    talk.tell(hosts(h=2))
    talk.join("h:1")
    assert not has(KillWorker, [*talk.tell(frozen("h:0")), *talk.wait(1000)])


def test_last_frozen_holder_stays_until_the_elastic_timeout():
    talk = running(2, workers_min=1)
    talk.tell(exited("h:0"))
    assert "h:1#1" not in names([*talk.tell(frozen("h:1")), *talk.wait(590)], KillWorker)
    assert "h:1#1" in names(talk.wait(20), KillWorker)


def test_second_of_two_frozen_workers_is_not_killed():
    talk = running(2, workers_min=1)
    assert names(talk.tell(frozen("h:0")), KillWorker) == ["h:0#1"]
    actions = talk.tell(frozen("h:1"))
    assert not has(KillWorker, actions)
    recorded("log", said(actions))
    assert talk.tell(thawed("h:1")) != []
    assert has(BreakWorld, talk.tell(exited("h:0")))


def test_worker_frozen_while_survivors_gather_is_killed():
    talk = running(4)
    talk.tell(exited("h:0"))
    talk.ready("h:1", commit=(2, 5))
    assert names(talk.tell(frozen("h:2"), frozen("h:1")), KillWorker) == ["h:2#1", "h:1#1"]
    talk.tell(exited("h:2"), exited("h:1"))
    talk.ready("h:3", commit=(2, 5))
    assert talk.m.phase is Phase.GATHERING  # one is ready, two are needed


@pytest.mark.parametrize("phase", ["preparing", "stopping"])
def test_worker_frozen_during_a_planned_change_is_killed(phase):
    talk = running(3)
    talk.tell(leaving("h:2"))
    if phase == "stopping":
        talk.tell(*(checked(f"h:{n}", 2, 3) for n in range(3)))
        talk.tell(ready("h:0", 2, (2, 4)))
    assert talk.m.phase.value == phase
    assert names(talk.tell(frozen("h:1")), KillWorker) == ["h:1#1"]
    broken = the(BreakWorld, talk.tell(exited("h:1")))
    assert worker("h:2") in broken.members


def test_worker_frozen_after_its_return_is_killed_while_members_train():
    talk = running(3)
    talk.tell(returned("h:2", 2))
    assert names(talk.tell(frozen("h:2")), KillWorker) == ["h:2#1"]


def test_worker_frozen_at_the_end_is_named_since_the_job_waits_for_its_exit():
    talk = running(2)
    talk.tell(returned("h:0", 2), returned("h:1", 2))
    actions = talk.tell(frozen("h:1"))
    assert not has(KillWorker, actions)
    recorded("log", said(actions))


def test_frozen_starting_worker_is_awaited_as_any_starting_worker():
    talk = MembershipConversation(np=3, start_timeout_s=120)
    talk.tell(hosts(h=3))
    assert not has(KillWorker, talk.tell(frozen("h:2")))
    talk.connect("h:0", "h:1")
    talk.ready("h:0", "h:1", running=False)
    assert not has(KillWorker, talk.wait(119))
    actions = talk.wait(2)
    assert names(actions, KillWorker) == ["h:2#1"] and has(PublishWorld, actions)


def test_frozen_ready_worker_is_killed_before_a_world_includes_the_worker():
    talk = MembershipConversation(np=3)
    talk.tell(hosts(h=3))
    talk.connect("h:0", "h:1", "h:2")
    talk.ready("h:0", "h:2", running=False)
    assert names(talk.tell(frozen("h:2")), KillWorker) == ["h:2#1"]
    world = the(PublishWorld, talk.ready("h:1", running=False))
    assert order(world) == ["h:0#1", "h:1#1"]
    newcomer = running(2, workers_max=3)
    newcomer.tell(hosts(h=3))
    newcomer.join("h:2")
    assert names(newcomer.tell(frozen("h:2")), KillWorker) == ["h:2#1"]


def test_delayed_message_does_not_mark_a_worker_as_running():
    """Its agent keeps reporting that it is frozen."""
    talk = running(2, workers_max=3)
    talk.tell(hosts(h=3))
    talk.connect("h:2")
    assert not has(KillWorker, talk.tell(frozen("h:2")))
    assert not has(KillWorker, talk.ready("h:2", generation=0))
    assert names(talk.tell(frozen("h:2")), KillWorker) == ["h:2#1"]


def test_worker_frozen_in_the_world_of_init_is_killed():
    talk = started(3)
    assert names(talk.tell(frozen("h:1")), KillWorker) == ["h:1#1"]


def test_frozen_worker_ends_a_static_job_and_is_named():
    talk = static(3)
    assert names(talk.tell(frozen("h:1")), KillWorker) == ["h:1#1"]
    end = the(EndJob, talk.tell(exited("h:1")))
    assert end.reason == because(
        ReasonKind.ENDED,
        who="rank 1 (h:1#1 on h)",
        exit="signal 9 SIGKILL",
        killed_for=because(ReasonKind.FROZEN, how="stopped by a signal"),
        early=False,
        outside=False,
        wrote="",
    )


# ---- workers that cannot be killed --------------------------------------------------------------


def test_worker_that_survives_sigkill_for_a_second_is_left_behind():
    talk = running(3, kill_s=1.0)
    talk.tell(frozen("h:1", "its container is paused"))
    assert not has(BreakWorld, talk.wait(0.9))
    actions = talk.wait(0.2)
    recorded("log", said(actions))
    broken = the(BreakWorld, actions)
    assert broken.members == [worker("h:0"), worker("h:2")]
    assert broken.reason == because(
        ReasonKind.LOST_ALIVE,
        worker="h:1#1",
        killed_for=because(ReasonKind.FROZEN, how="its container is paused"),
    )
    assert order(the(PublishWorld, talk.ready("h:0", "h:2", commit=(2, 5)))) == ["h:0#1", "h:2#1"]


def test_slot_of_an_unkillable_worker_is_taken_until_its_exit():
    talk = running(3, cooldown_min_s=1.0)
    talk.tell(frozen("h:1"))
    talk.wait(2)
    talk.ready("h:0", "h:2", commit=(2, 5))
    assert not has(StartWorker, talk.wait(1000))
    talk.tell(thawed("h:1"), ready("h:1", 2, (2, 5)))  # it continues, but is ignored
    assert talk.m.phase is Phase.TRAINING
    talk.tell(exited("h:1"))
    assert names(talk.wait(2)) == ["h:1#2"]


def test_static_job_does_not_wait_for_the_exit_of_a_frozen_worker():
    talk = static(2)
    talk.tell(frozen("h:1"))
    end = the(EndJob, talk.wait(2))
    assert end.reason == because(
        ReasonKind.LOST_FOR_GOOD,
        who="rank 1 (h:1#1 on h)",
        cause=because(
            ReasonKind.LOST_ALIVE,
            worker="h:1#1",
            killed_for=because(ReasonKind.FROZEN, how="stopped by a signal"),
        ),
    )


def test_workers_asked_to_leave_keep_their_time_limit():
    talk = running(3, leave_s=30)
    talk.tell(leaving("h:1"))
    talk.stop_all()
    assert not has(KillWorker, talk.wait(29))
    assert names(talk.wait(2), KillWorker) == ["h:1#1"]


# ---- unreachable --------------------------------------------------------------------------------


def test_worker_whose_host_acknowledges_no_message_is_killed_at_once():
    talk = running(3)
    actions = talk.tell(disconnected("h:2", silent=True))
    assert the(KillWorker, actions).reason == because(ReasonKind.CUT_OFF)
    assert has(BreakWorld, talk.wait(1.1))  # the kill did not reach it either


def test_closed_connection_leaves_a_moment_for_the_exit():
    talk = running(3, disconnect_s=2.0)
    assert not has(KillWorker, talk.tell(disconnected("h:2")))
    assert not has(KillWorker, talk.wait(1.9))
    assert names(talk.wait(0.2), KillWorker) == ["h:2#1"]


# ---- lost hosts ---------------------------------------------------------------------------------


def spread(**settings) -> MembershipConversation:
    """Train with two workers on each of two hosts."""
    talk = MembershipConversation(np=4, **settings)
    talk.tell(hosts(g=2, h=2))
    everybody = ["g:0", "g:1", "h:0", "h:1"]
    talk.connect(*everybody)
    talk.ready(*everybody, running=False)
    if talk.m.settings.elastic:
        talk.ready(*everybody)
    talk.resume()
    return talk


def test_lost_host_loses_its_workers_at_once():
    talk = spread()
    actions = talk.tell(host_lost("g"))
    broken = the(BreakWorld, actions)
    assert broken.reason == because(
        ReasonKind.LOST_WITH_HOST, host="g", text="its agent was not heard of for 2 s", workers=2
    )
    assert broken.members == [worker("h:0"), worker("h:1")]
    assert not has(KillWorker, actions)  # the host is unreachable
    world = the(PublishWorld, talk.ready("h:0", "h:1", commit=(2, 5)))
    assert order(world) == ["h:0#1", "h:1#1"]
    assert not has(StartWorker, talk.wait(1000))  # its slots are taken


def test_messages_of_workers_on_a_lost_host_are_ignored():
    talk = spread()
    talk.tell(host_lost("g"))
    woken = talk.tell(ready("g:0", 2, (2, 9)))
    assert has(LetGo, woken) and has(KillWorker, woken)  # in case it is reachable now
    late = [frozen("g:1"), disconnected("g:0"), disconnected("g:1")]
    assert talk.tell(*late, host_lost("g"))[:-1] == []
    assert not has(KillWorker, talk.wait(100))
    assert has(PublishWorld, talk.ready("h:0", "h:1", commit=(2, 5)))


def test_host_lost_while_survivors_gather():
    talk = spread(workers_min=1)
    talk.tell(exited("h:0"))
    talk.ready("h:1", commit=(2, 5))
    world = the(PublishWorld, talk.tell(host_lost("g")))
    assert order(world) == ["h:1#1"]


def test_last_host_is_awaited_since_no_other_worker_could_continue():
    talk = spread(elastic_timeout_s=600)
    talk.tell(host_lost("g"))
    talk.ready("h:0", "h:1", commit=(2, 5))
    talk.resume()
    recorded("log", said(talk.tell(host_lost("h"), host_lost("h"))))
    assert talk.m.phase is Phase.TRAINING  # as far as is known
    recorded("log", said(talk.tell(HostReported("h", [worker("h:0"), worker("h:1")]))))
    assert not has(EndJob, talk.wait(1000))


def test_last_host_is_awaited_for_a_limited_time():
    talk = spread(elastic_timeout_s=600)
    talk.tell(host_lost("g"), host_lost("h"))
    assert not has(EndJob, talk.wait(599))
    end = the(EndJob, talk.wait(2))
    assert end.reason == because(
        ReasonKind.ALL_LOST,
        members=4,
        generation=2,
        cause=because(
            ReasonKind.SEVERAL,
            causes=[
                because(
                    ReasonKind.LOST_WITH_HOST,
                    host="g",
                    text="its agent was not heard of for 2 s",
                    workers=2,
                ),
                because(ReasonKind.LOST_HOST, host="h", text="its agent was not heard of for 2 s"),
            ],
            more=0,
        ),
        wrote="",
    )


def test_lost_host_without_workers_is_only_named():
    talk = spread()
    recorded("log", said(talk.tell(host_lost("x"))))


def test_lost_host_ends_a_static_job():
    talk = spread(elastic=False, workers_min=4)
    end = the(EndJob, talk.tell(host_lost("h")))
    assert end.reason == because(
        ReasonKind.LOST_FOR_GOOD,
        who="rank 2 (h:0#1 on h)",
        cause=because(
            ReasonKind.LOST_WITH_HOST,
            host="h",
            text="its agent was not heard of for 2 s",
            workers=2,
        ),
    )


def test_one_of_several_frozen_members_is_kept_and_may_continue():
    talk = running(2)
    assert names(talk.tell(frozen("h:0")), KillWorker) == ["h:0#1"]
    actions = [*talk.tell(frozen("h:1"), exited("h:0")), *talk.wait(100)]
    assert not has(KillWorker, actions) and not has(EndJob, actions)
    recorded("log", said(actions))
    talk.tell(thawed("h:1"))
    talk.ready("h:1", commit=(2, 5))
    talk.join("h:0#2")
    assert talk.members == ["h:1#1", "h:0#2"]


def test_worker_frozen_after_the_outcome_is_logged_once():
    talk = running(2)
    talk.tell(returned("h:0", 2), returned("h:1", 2))
    assert talk.m.over
    text = said(talk.tell(frozen("h:1"), frozen("h:1"), frozen("h:1")))
    recorded("messages", text)
