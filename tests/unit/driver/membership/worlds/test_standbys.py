"""Standbys: workers beyond the maximum, which wait at no cost and take the next free place.

The scenarios cover the common cases.
"""

from __future__ import annotations

import pytest

from elastic.driver import events
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.reasons import ReasonKind, because
from elastic.driver.settings import UNBOUNDED, Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Commit
from harness.conversation import (
    MembershipConversation,
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


def with_standby(workers: int = 2, **settings) -> MembershipConversation:
    """The world trains, and one more worker stands by in the next slot."""
    talk = running(workers, workers_min=1, standbys=1, **settings)
    assert names(talk.tell(hosts(h=workers + 1))) == [f"h:{workers}#1"]
    actions = talk.join(f"h:{workers}")
    assert the(events.TellStandby, actions).worker == worker(f"h:{workers}")
    assert not has(events.PrepareChange, actions)
    return talk


def test_standby_is_not_started_before_there_is_a_world():
    talk = MembershipConversation(np=2, workers_min=1, standbys=1)
    assert names(talk.tell(hosts(h=4))) == ["h:0#1", "h:1#1"]
    talk.connect("h:0", "h:1")
    assert names(talk.ready("h:0", "h:1", running=False)) == []
    talk.ready("h:0", "h:1")
    assert names(talk.resume()) == ["h:2#1"]


def test_start_of_a_standby_is_logged_with_its_reason():
    talk = running(2, workers_min=1, standbys=1)
    start = the(events.StartWorker, talk.tell(hosts(h=3)))
    assert start.reason == because(ReasonKind.TO_STAND_BY)


def test_standby_is_notified_once():
    talk = with_standby()
    assert not has(events.TellStandby, [*talk.resume(), *talk.wait(3600)])


def test_two_losses_with_one_standby_make_a_smaller_world():
    talk = with_standby(3)
    talk.tell(exited("h:1"), exited("h:2"))
    world = the(events.PublishWorld, talk.ready("h:0", commit=(2, 5)))
    assert order(world) == ["h:0#1", "h:3#1"]


def test_dead_standby_breaks_no_world_and_is_replaced():
    talk = with_standby()
    actions = talk.tell(exited("h:2"))
    assert not has(events.BreakWorld, actions) and not has(events.PrepareChange, actions)
    assert names(talk.wait(2)) == ["h:2#2"]


def test_frozen_standby_is_killed_without_breaking_the_world():
    talk = with_standby()
    actions = talk.tell(frozen("h:2")) + talk.wait(3)
    assert the(events.KillWorker, actions).worker == worker("h:2")
    assert not has(events.BreakWorld, actions)


def test_standby_with_a_mismatching_state_is_rejected_when_joining():
    talk = running(2, workers_min=1, standbys=1)
    talk.tell(hosts(h=3))
    talk.connect("h:2")
    actions = talk.tell(ready("h:2", 0, layout="another"))
    assert has(events.RejectWorker, actions) and not has(events.TellStandby, actions)


def test_standby_is_notified_again_on_a_new_connection():
    talk = with_standby()
    talk.tell(disconnected("h:2"), events.WorkerReconnected(worker("h:2"), 0, True))
    assert has(events.TellStandby, talk.ready("h:2", generation=0))


def test_unlisted_host_loses_its_standby_at_once():
    talk = with_standby()
    actions = talk.tell(hosts(h=2))
    assert the(events.LetGo, actions).worker == worker("h:2")
    assert not has(events.PrepareChange, actions)


def test_added_host_starts_no_second_standby():
    talk = with_standby()
    assert names(talk.tell(hosts(h=3, g=4))) == []


def test_standby_is_released_when_all_members_have_returned():
    talk = with_standby()
    actions = talk.tell(returned("h:0", 2), returned("h:1", 2))
    assert the(events.EndJob, actions).code == 0
    assert [a.worker for a in actions if isinstance(a, events.LetGo)] == [worker("h:2")]


def test_job_ends_when_only_a_standby_without_a_commit_remains():
    talk = with_standby()
    actions = talk.tell(exited("h:0"), exited("h:1"))
    assert the(events.EndJob, actions).code == 1


def test_member_that_broke_the_world_without_dying_keeps_its_place():
    talk = with_standby()
    talk.tell(disconnected("h:1"))
    talk.tell(events.WorkerReconnected(worker("h:1"), 2, True))
    assert talk.members == ["h:0#1", "h:1#1"]


def test_surplus_worker_waits_without_standbys_too():
    """A slot is filled again after its former worker's place was taken."""
    talk = running(2, workers_min=1, workers_max=2)
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 5))
    assert names(talk.wait(2)) == ["h:1#2"]
    talk.join("h:1#2")
    assert the(events.PublishWorld, talk.stop_all())
    assert names(talk.tell(hosts(h=2, g=2))) == []
    assert talk.wait(100) == []


def test_static_world_has_no_standbys():
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
def test_settings_that_leave_no_slot_for_standbys_are_rejected(settings):
    with raises(Invalid):
        Settings(**{"np": 2, "workers_min": 2, "workers_max": 2, "elastic": True, **settings})


def test_stopped_standby_not_yet_sampled_is_not_counted():
    """Its agent samples four times per second."""
    talk = with_standby()
    talk.stopped.add("h:2#1")
    asked = the(events.ProbeWorkers, talk.tell(exited("h:1")))
    assert asked.workers == [worker("h:2")]
    assert not has(events.PublishWorld, talk.ready("h:0", commit=(2, 5)))
    assert not has(events.PublishWorld, talk.wait(0.045))
    world = the(events.PublishWorld, talk.wait(0.01))
    assert order(world) == ["h:0#1"]
    assert not has(events.PrepareChange, talk.resume() + talk.wait(1)), "nor taken in afterwards"


def test_standby_that_answers_late_joins_at_the_next_change():
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


def test_standby_replaces_a_lost_member_without_a_smaller_world():
    talk = with_standby()
    talk.tell(exited("h:1"))
    world = the(events.PublishWorld, talk.ready("h:0", commit=(2, 5)))
    assert order(world) == ["h:0#1", "h:2#1"]


def test_standby_that_dies_before_answering_is_not_awaited():
    talk = with_standby()
    talk.stopped.add("h:2#1")
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 5))
    world = the(events.PublishWorld, talk.tell(exited("h:2")))
    assert order(world) == ["h:0#1"]


def test_stopped_standby_does_not_replace_a_leaving_worker():
    talk = with_standby(workers=2)
    talk.stopped.add("h:2#1")
    talk.tell(leaving("h:1"))
    talk.stop_all()
    assert order(the(events.PublishWorld, talk.wait(0.06))) == ["h:0#1"]


def test_successor_driver_knows_the_silent_standbys():
    talk = with_standby()
    talk.stopped.add("h:2#1")
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 5))
    talk.wait(0.1)
    talk.m = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    assert talk.m.worlds.signs.silent == {worker("h:2")}


def test_probe_of_a_standby_has_no_deadline_while_a_replacement_starts():
    """The standby is stopped. All members are killed, and a slot is free once the first of them has exited."""
    talk = with_standby(2, restarts=1)
    talk.stopped.add("h:2#1")
    talk.tell(events.ReplicasSpoilt(2, Commit(2, 5), [worker("h:1")]))
    assert names(talk.tell(exited("h:0"))) == ["h:0#2"]
    assert not has(events.PublishWorld, talk.wait(1.0))
