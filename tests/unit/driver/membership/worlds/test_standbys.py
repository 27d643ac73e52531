"""Workers beyond the largest world: they wait, cost nobody anything, and take the next place that is free.

The usual courses are among the scenarios.
"""

from __future__ import annotations

import pytest

from elastic.driver import events
from elastic.driver.membership.snapshot import restored, taken
from elastic.driver.reasons import Why, because
from elastic.driver.settings import UNBOUNDED, Settings
from elastic.errors import Invalid
from harness.conversation import (
    Talk,
    disconnected,
    exited,
    frozen,
    has,
    hosts,
    leaving,
    names,
    order,
    ready,
    returned,
    running,
    started,
    the,
    worker,
)
from harness.golden import raises


def with_standby(workers: int = 2, **settings) -> Talk:
    """They train, and one more stands by in the next slot."""
    talk = running(workers, workers_min=1, standbys=1, **settings)
    assert names(talk.tell(hosts(h=workers + 1))) == [f"h:{workers}#1"]
    actions = talk.join(f"h:{workers}")
    assert the(events.TellStandby, actions).worker == worker(f"h:{workers}")
    assert not has(events.PrepareChange, actions)
    return talk


def test_none_is_started_before_there_is_a_world_to_stand_by():
    talk = Talk(np=2, workers_min=1, standbys=1)
    assert names(talk.tell(hosts(h=4))) == ["h:0#1", "h:1#1"]
    talk.connect("h:0", "h:1")
    assert names(talk.ready("h:0", "h:1", running=False)) == []
    talk.ready("h:0", "h:1")
    assert names(talk.resume()) == ["h:2#1"]


def test_its_start_says_what_for():
    talk = running(2, workers_min=1, standbys=1)
    start = the(events.StartWorker, talk.tell(hosts(h=3)))
    assert start.reason == because(Why.TO_STAND_BY)


def test_it_is_told_once():
    talk = with_standby()
    assert not has(events.TellStandby, [*talk.resume(), *talk.wait(3600)])


def test_two_lost_and_one_standby_make_a_smaller_world():
    talk = with_standby(3)
    talk.tell(exited("h:1"), exited("h:2"))
    world = the(events.PublishWorld, talk.ready("h:0", commit=(2, 5)))
    assert order(world) == ["h:0#1", "h:3#1"]


def test_its_own_death_breaks_nothing_and_another_follows():
    talk = with_standby()
    actions = talk.tell(exited("h:2"))
    assert not has(events.BreakWorld, actions) and not has(events.PrepareChange, actions)
    assert names(talk.wait(2)) == ["h:2#2"]


def test_a_frozen_one_is_fenced_and_the_others_train_on():
    talk = with_standby()
    actions = talk.tell(frozen("h:2")) + talk.wait(3)
    assert the(events.KillWorker, actions).worker == worker("h:2")
    assert not has(events.BreakWorld, actions)


def test_one_whose_state_does_not_fit_is_turned_away_when_it_comes():
    talk = running(2, workers_min=1, standbys=1)
    talk.tell(hosts(h=3))
    talk.connect("h:2")
    actions = talk.tell(ready("h:2", 0, layout="another"))
    assert has(events.RejectWorker, actions) and not has(events.TellStandby, actions)


def test_on_a_new_connection_it_is_told_again():
    talk = with_standby()
    talk.tell(disconnected("h:2"), events.WorkerReconnected(worker("h:2"), 0, True))
    assert has(events.TellStandby, talk.ready("h:2", generation=0))


def test_a_host_that_leaves_the_list_takes_its_standby_at_once():
    talk = with_standby()
    actions = talk.tell(hosts(h=2))
    assert the(events.LetGo, actions).worker == worker("h:2")
    assert not has(events.PrepareChange, actions)


def test_a_machine_that_comes_back_smaller_or_larger_keeps_one_standby():
    talk = with_standby()
    assert names(talk.tell(hosts(h=3, g=4))) == []


def test_when_all_have_returned_it_is_let_go():
    talk = with_standby()
    actions = talk.tell(returned("h:0", 2), returned("h:1", 2))
    assert the(events.EndJob, actions).code == 0
    assert [a.worker for a in actions if isinstance(a, events.LetGo)] == [worker("h:2")]


def test_a_standby_alone_holds_nothing_so_the_job_ends():
    talk = with_standby()
    actions = talk.tell(exited("h:0"), exited("h:1"))
    assert the(events.EndJob, actions).code == 1


def test_a_member_that_broke_the_world_without_dying_keeps_its_place():
    talk = with_standby()
    talk.tell(disconnected("h:1"))
    talk.tell(events.WorkerReconnected(worker("h:1"), 2, True))
    assert talk.members == ["h:0#1", "h:1#1"]


def test_without_standbys_who_comes_too_many_waits_as_well():
    """A slot is filled while its former worker's place has been taken."""
    talk = running(2, workers_min=1, workers_max=2)
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 5))
    assert names(talk.wait(2)) == ["h:1#2"]
    talk.join("h:1#2")
    assert the(events.PublishWorld, talk.stop_all())
    assert names(talk.tell(hosts(h=2, g=2))) == []
    assert talk.wait(100) == []


def test_a_static_world_has_none():
    talk = started(2, elastic=False, workers_min=2)
    assert names(talk.tell(hosts(h=4))) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"standbys": -1},
        {"standbys": 1, "elastic": False},
        {"standbys": 1, "workers_max": UNBOUNDED},
    ],
)
def test_settings_that_leave_nothing_to_stand_by_for(settings):
    with raises(Invalid):
        Settings(**{"np": 2, "workers_min": 2, "workers_max": 2, "elastic": True, **settings})


def test_stopped_one_that_nobody_has_seen_yet_is_not_counted():
    """Its agent looks four times a second."""
    talk = with_standby()
    talk.stopped.add("h:2#1")
    asked = the(events.ProbeWorkers, talk.tell(exited("h:1")))
    assert asked.workers == [worker("h:2")]
    assert not has(events.PublishWorld, talk.ready("h:0", commit=(2, 5)))
    assert not has(events.PublishWorld, talk.wait(0.045))
    world = the(events.PublishWorld, talk.wait(0.01))
    assert order(world) == ["h:0#1"]
    assert not has(events.PrepareChange, talk.resume() + talk.wait(1)), "nor taken in afterwards"


def test_answer_that_comes_late_lets_it_join_at_the_next_change():
    talk = with_standby()
    talk.stopped.add("h:2#1")
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 5))
    talk.wait(0.1)
    talk.resume()
    actions = talk.tell(events.WorkerLocated(worker("h:2"), 0, ""))
    assert has(events.PrepareChange, actions + talk.wait(1))
    talk.stopped.clear()
    assert order(the(events.PublishWorld, talk.stop_all())) == ["h:0#1", "h:2#1"]


def test_answer_while_others_are_not_ready_costs_no_time():
    talk = with_standby()
    talk.tell(exited("h:1"))
    world = the(events.PublishWorld, talk.ready("h:0", commit=(2, 5)))
    assert order(world) == ["h:0#1", "h:2#1"]


def test_standby_that_dies_before_it_answers_is_not_waited_for():
    talk = with_standby()
    talk.stopped.add("h:2#1")
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 5))
    world = the(events.PublishWorld, talk.tell(exited("h:2")))
    assert order(world) == ["h:0#1"]


def test_stopped_one_does_not_take_the_place_of_a_worker_that_leaves():
    talk = with_standby(workers=2)
    talk.stopped.add("h:2#1")
    talk.tell(leaving("h:1"))
    talk.stop_all()
    assert order(the(events.PublishWorld, talk.wait(0.06))) == ["h:0#1"]


def test_driver_that_follows_knows_who_was_silent():
    talk = with_standby()
    talk.stopped.add("h:2#1")
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 5))
    talk.wait(0.1)
    talk.m = restored(taken(talk.m), talk.m.settings)
    assert talk.m.worlds.signs.silent == {worker("h:2")}
