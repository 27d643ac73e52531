"""Workers that can't run, or can't be reached: fenced at once, because their world stands still.

The usual courses are among the scenarios.
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
from elastic.driver.reasons import Why, because
from harness.conversation import (
    Talk,
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

# ---- frozen -------------------------------------------------------------------------------------


def test_it_is_fenced_once_and_what_is_said_of_it_later_changes_nothing():
    talk = running(3)
    talk.tell(frozen("h:2"))
    assert talk.tell(frozen("h:2"), thawed("h:2")) == []
    assert talk.tell(exited("h:2")) != []
    assert talk.tell(frozen("h:2"), thawed("h:2")) == []


def test_who_says_that_it_is_ready_runs_whatever_its_agent_saw_last():
    """Continued between two looks of its agent, it speaks before it is seen."""
    talk = Talk(np=2)
    talk.tell(hosts(h=2))
    talk.connect("h:0", "h:1")
    talk.ready("h:0", running=False)
    talk.tell(frozen("h:1"))
    actions = talk.ready("h:1", running=False)
    assert not has(KillWorker, actions)
    assert order(the(PublishWorld, actions)) == ["h:0#1", "h:1#1"]


def test_newcomers_that_wait_are_no_reason_to_kill_the_only_one_that_has_learned():
    talk = running(1, workers_min=1, workers_max=2)
    talk.tell(hosts(h=2))
    talk.join("h:1")
    assert not has(KillWorker, [*talk.tell(frozen("h:0")), *talk.wait(1000)])


def test_the_last_one_holds_what_was_learned_and_stays_until_the_elastic_timeout():
    talk = running(2, workers_min=1)
    talk.tell(exited("h:0"))
    assert "h:1#1" not in names([*talk.tell(frozen("h:1")), *talk.wait(590)], KillWorker)
    assert "h:1#1" in names(talk.wait(20), KillWorker)


def test_of_two_that_freeze_the_first_is_fenced_and_the_second_left_alone():
    talk = running(2, workers_min=1)
    assert names(talk.tell(frozen("h:0")), KillWorker) == ["h:0#1"]
    actions = talk.tell(frozen("h:1"))
    assert not has(KillWorker, actions)
    recorded("log", said(actions))
    assert talk.tell(thawed("h:1")) != []
    assert has(BreakWorld, talk.tell(exited("h:0")))


def test_frozen_while_the_survivors_gather():
    talk = running(4)
    talk.tell(exited("h:0"))
    talk.ready("h:1", commit=(2, 5))
    assert names(talk.tell(frozen("h:2"), frozen("h:1")), KillWorker) == ["h:2#1", "h:1#1"]
    talk.tell(exited("h:2"), exited("h:1"))
    talk.ready("h:3", commit=(2, 5))
    assert talk.m.phase is Phase.GATHERING  # one is ready, two are needed


@pytest.mark.parametrize("phase", ["preparing", "stopping"])
def test_frozen_during_a_planned_change(phase):
    talk = running(3)
    talk.tell(leaving("h:2"))
    if phase == "stopping":
        talk.tell(*(checked(f"h:{n}", 2, 3) for n in range(3)))
        talk.tell(ready("h:0", 2, (2, 4)))
    assert talk.m.phase.value == phase
    assert names(talk.tell(frozen("h:1")), KillWorker) == ["h:1#1"]
    broken = the(BreakWorld, talk.tell(exited("h:1")))
    assert worker("h:2") in broken.members


def test_frozen_after_it_has_returned_while_others_train():
    talk = running(3)
    talk.tell(returned("h:2", 2))
    assert names(talk.tell(frozen("h:2")), KillWorker) == ["h:2#1"]


def test_frozen_at_the_end_is_named_because_the_job_waits_for_its_exit():
    talk = running(2)
    talk.tell(returned("h:0", 2), returned("h:1", 2))
    actions = talk.tell(frozen("h:1"))
    assert not has(KillWorker, actions)
    recorded("log", said(actions))


def test_one_that_starts_is_only_awaited_where_it_is_awaited_today():
    talk = Talk(np=3, start_timeout_s=120)
    talk.tell(hosts(h=3))
    assert not has(KillWorker, talk.tell(frozen("h:2")))
    talk.connect("h:0", "h:1")
    talk.ready("h:0", "h:1", running=False)
    assert not has(KillWorker, talk.wait(119))
    actions = talk.wait(2)
    assert names(actions, KillWorker) == ["h:2#1"] and has(PublishWorld, actions)


def test_one_that_is_ready_is_fenced_because_the_others_are_about_to_train_with_it():
    talk = Talk(np=3)
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


def test_a_word_that_was_long_under_way_wakes_nobody():
    """Its agent says again and again that it is frozen."""
    talk = running(2, workers_max=3)
    talk.tell(hosts(h=3))
    talk.connect("h:2")
    assert not has(KillWorker, talk.tell(frozen("h:2")))
    assert not has(KillWorker, talk.ready("h:2", generation=0))
    assert names(talk.tell(frozen("h:2")), KillWorker) == ["h:2#1"]


def test_in_the_world_of_init_it_is_fenced_too():
    talk = started(3)
    assert names(talk.tell(frozen("h:1")), KillWorker) == ["h:1#1"]


def test_a_job_that_is_not_elastic_ends_and_names_it():
    talk = static(3)
    assert names(talk.tell(frozen("h:1")), KillWorker) == ["h:1#1"]
    end = the(EndJob, talk.tell(exited("h:1")))
    assert end.reason == because(
        Why.ENDED,
        who="rank 1 (h:1#1 on h)",
        exit="signal 9 SIGKILL",
        killed_for=because(Why.FROZEN, how="stopped by a signal"),
        early=False,
        outside=False,
        wrote="",
    )


# ---- who can't be killed ------------------------------------------------------------------------


def test_who_does_not_die_within_a_second_is_gone_on_without():
    talk = running(3, kill_s=1.0)
    talk.tell(frozen("h:1", "its container is paused"))
    assert not has(BreakWorld, talk.wait(0.9))
    actions = talk.wait(0.2)
    recorded("log", said(actions))
    broken = the(BreakWorld, actions)
    assert broken.members == [worker("h:0"), worker("h:2")]
    assert broken.reason == because(
        Why.LOST_ALIVE,
        worker="h:1#1",
        killed_for=because(Why.FROZEN, how="its container is paused"),
    )
    assert order(the(PublishWorld, talk.ready("h:0", "h:2", commit=(2, 5)))) == ["h:0#1", "h:2#1"]


def test_its_slot_stays_taken_until_its_exit():
    talk = running(3, cooldown_min_s=1.0)
    talk.tell(frozen("h:1"))
    talk.wait(2)
    talk.ready("h:0", "h:2", commit=(2, 5))
    assert not has(StartWorker, talk.wait(1000))
    talk.tell(thawed("h:1"), ready("h:1", 2, (2, 5)))  # it wakes: nobody listens
    assert talk.m.phase is Phase.TRAINING
    talk.tell(exited("h:1"))
    assert names(talk.wait(2)) == ["h:1#2"]


def test_a_job_that_is_not_elastic_does_not_wait_for_an_exit_either():
    talk = static(2)
    talk.tell(frozen("h:1"))
    end = the(EndJob, talk.wait(2))
    assert end.reason == because(
        Why.LOST_FOR_GOOD,
        who="rank 1 (h:1#1 on h)",
        cause=because(
            Why.LOST_ALIVE,
            worker="h:1#1",
            killed_for=because(Why.FROZEN, how="stopped by a signal"),
        ),
    )


def test_those_told_to_leave_keep_their_time():
    talk = running(3, leave_s=30)
    talk.tell(leaving("h:1"))
    talk.stop_all()
    assert not has(KillWorker, talk.wait(29))
    assert names(talk.wait(2), KillWorker) == ["h:1#1"]


# ---- cut off ------------------------------------------------------------------------------------


def test_a_worker_whose_host_acknowledges_nothing_is_fenced_at_once():
    talk = running(3)
    actions = talk.tell(disconnected("h:2", silent=True))
    assert the(KillWorker, actions).reason == because(Why.CUT_OFF)
    assert has(BreakWorld, talk.wait(1.1))  # the kill did not reach it either


def test_a_connection_that_was_closed_gives_the_exit_a_moment():
    talk = running(3, disconnect_s=2.0)
    assert not has(KillWorker, talk.tell(disconnected("h:2")))
    assert not has(KillWorker, talk.wait(1.9))
    assert names(talk.wait(0.2), KillWorker) == ["h:2#1"]


# ---- a lost host --------------------------------------------------------------------------------


def spread(**settings) -> Talk:
    """Two members on each of two hosts."""
    talk = Talk(np=4, **settings)
    talk.tell(hosts(g=2, h=2))
    everybody = ["g:0", "g:1", "h:0", "h:1"]
    talk.connect(*everybody)
    talk.ready(*everybody, running=False)
    if talk.m.settings.elastic:
        talk.ready(*everybody)
    talk.resume()
    return talk


def test_a_lost_host_takes_its_workers_with_it_at_once():
    talk = spread()
    actions = talk.tell(host_lost("g"))
    broken = the(BreakWorld, actions)
    assert broken.reason == because(
        Why.LOST_WITH_HOST, host="g", text="its agent was not heard of for 2 s", workers=2
    )
    assert broken.members == [worker("h:0"), worker("h:1")]
    assert not has(KillWorker, actions)  # nobody would hear it
    world = the(PublishWorld, talk.ready("h:0", "h:1", commit=(2, 5)))
    assert order(world) == ["h:0#1", "h:1#1"]
    assert not has(StartWorker, talk.wait(1000))  # its slots are taken


def test_what_its_workers_still_say_is_no_news():
    talk = spread()
    talk.tell(host_lost("g"))
    woken = talk.tell(ready("g:0", 2, (2, 9)))
    assert has(LetGo, woken) and has(KillWorker, woken)  # should it be reached now
    late = [frozen("g:1"), disconnected("g:0"), disconnected("g:1")]
    assert talk.tell(*late, host_lost("g"))[:-1] == []
    assert not has(KillWorker, talk.wait(100))
    assert has(PublishWorld, talk.ready("h:0", "h:1", commit=(2, 5)))


def test_a_host_that_is_lost_while_the_survivors_gather():
    talk = spread(workers_min=1)
    talk.tell(exited("h:0"))
    talk.ready("h:1", commit=(2, 5))
    world = the(PublishWorld, talk.tell(host_lost("g")))
    assert order(world) == ["h:1#1"]


def test_the_last_host_is_awaited_because_nobody_could_go_on_without_it():
    talk = spread(elastic_timeout_s=600)
    talk.tell(host_lost("g"))
    talk.ready("h:0", "h:1", commit=(2, 5))
    talk.resume()
    recorded("log", said(talk.tell(host_lost("h"), host_lost("h"))))
    assert talk.m.phase is Phase.TRAINING  # for all that is known
    recorded("log", said(talk.tell(HostReported("h", [worker("h:0"), worker("h:1")]))))
    assert not has(EndJob, talk.wait(1000))


def test_but_not_for_ever():
    talk = spread(elastic_timeout_s=600)
    talk.tell(host_lost("g"), host_lost("h"))
    assert not has(EndJob, talk.wait(599))
    end = the(EndJob, talk.wait(2))
    assert end.reason == because(
        Why.ALL_LOST,
        members=4,
        generation=2,
        cause=because(
            Why.SEVERAL,
            causes=[
                because(
                    Why.LOST_WITH_HOST,
                    host="g",
                    text="its agent was not heard of for 2 s",
                    workers=2,
                ),
                because(Why.LOST_HOST, host="h", text="its agent was not heard of for 2 s"),
            ],
            more=0,
        ),
        wrote="",
    )


def test_a_host_that_runs_nobody_is_only_named():
    talk = spread()
    recorded("log", said(talk.tell(host_lost("x"))))


def test_a_lost_host_ends_a_job_that_is_not_elastic():
    talk = spread(elastic=False, workers_min=4)
    end = the(EndJob, talk.tell(host_lost("h")))
    assert end.reason == because(
        Why.LOST_FOR_GOOD,
        who="rank 2 (h:0#1 on h)",
        cause=because(
            Why.LOST_WITH_HOST, host="h", text="its agent was not heard of for 2 s", workers=2
        ),
    )


def test_of_members_that_are_all_frozen_one_stays_and_can_be_continued():
    talk = running(2)
    assert names(talk.tell(frozen("h:0")), KillWorker) == ["h:0#1"]
    actions = [*talk.tell(frozen("h:1"), exited("h:0")), *talk.wait(100)]
    assert not has(KillWorker, actions) and not has(EndJob, actions)
    recorded("log", said(actions))
    talk.tell(thawed("h:1"))
    talk.ready("h:1", commit=(2, 5))
    talk.join("h:0#2")
    assert talk.members == ["h:1#1", "h:0#2"]


def test_frozen_after_the_outcome_is_known_is_said_once():
    talk = running(2)
    talk.tell(returned("h:0", 2), returned("h:1", 2))
    assert talk.m.over
    text = said(talk.tell(frozen("h:1"), frozen("h:1"), frozen("h:1")))
    recorded("messages", text)
