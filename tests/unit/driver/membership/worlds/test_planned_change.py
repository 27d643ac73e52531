"""Joining and leaving a healthy world: all members stop at the same safepoint, and no progress is lost.

The scenarios cover the common cases.
"""

from __future__ import annotations

from elastic.driver.events import (
    BreakWorld,
    CallOffChange,
    EndJob,
    KillWorker,
    LetGo,
    PrepareChange,
    PublishWorld,
    StartWorker,
    StopMembersAt,
    WorkerReconnected,
)
from elastic.driver.membership.membership import Phase
from elastic.driver.reasons import ReasonKind, because
from harness.conversation import (
    MembershipConversation,
    checked,
    exited,
    failed,
    has,
    hosts,
    leaving,
    names,
    order,
    ready,
    resumed,
    returned,
    running,
    said,
    the,
    worker,
)
from harness.golden import recorded


def joining(workers: int = 2, **settings) -> MembershipConversation:
    """A newcomer waits, and all members have been asked to prepare."""
    talk = running(workers, workers_max=workers + 1, **settings)
    talk.tell(hosts(h=workers + 1))
    assert has(PrepareChange, talk.join(f"h:{workers}"))
    return talk


# ---- joining ------------------------------------------------------------------------------------


def test_newcomers_within_a_moment_share_one_interruption():
    talk = running(2, workers_max=4, settle_s=1)
    talk.tell(hosts(h=4))
    assert not has(PrepareChange, talk.join("h:2"))
    assert not has(PrepareChange, talk.wait(0.9))
    assert str(the(PrepareChange, talk.join("h:3")).reason) == "h:2#1, h:3#1 joined"


def test_each_group_stops_at_the_safepoint_that_none_of_its_members_has_passed():
    talk = joining(4)
    for name, check, group in (("h:0", 5, "eu"), ("h:1", 6, "eu"), ("h:2", 2, "us")):
        talk.tell(checked(name, 2, check, group=group))
    actions = talk.tell(checked("h:3", 2, 2, group="us"))
    stops = {
        each.check: [*map(str, each.members)] for each in actions if isinstance(each, StopMembersAt)
    }
    assert stops == {7: ["h:0#1", "h:1#1"], 3: ["h:2#1", "h:3#1"]}
    [again] = talk.tell(WorkerReconnected(worker("h:2"), 2, True))
    assert isinstance(again, StopMembersAt)
    assert (again.check, again.members) == (3, [worker("h:2")])


def test_waiting_for_more_newcomers_ends():
    talk = running(2, workers_max=4, settle_s=1)
    talk.tell(hosts(h=4))
    talk.join("h:2")
    assert str(the(PrepareChange, talk.wait(1.1)).reason) == "h:2#1 joined"


def test_hosts_added_one_after_another_are_all_used():
    talk = running(1, workers_min=1, workers_max=3)
    talk.tell(hosts(h=1, h1=1))
    talk.join("h1:0")
    assert names(talk.tell(hosts(h=1, h1=1, h2=1))) == ["h2:0#1"]  # during the change
    assert len(the(PublishWorld, talk.stop_all()).members) == 2
    assert has(PrepareChange, talk.join("h2:0"))
    assert len(the(PublishWorld, talk.stop_all()).members) == 3


def test_workers_beyond_the_maximum_wait_as_spares():
    talk = running(2)
    talk.tell(hosts(h=1, g=1))  # g gets a worker in place of h:1 ...
    talk.tell(hosts(h=2, g=1))  # ... which may stay after all
    assert not has(PrepareChange, talk.join("g:0"))
    talk.tell(exited("h:1"))
    assert order(the(PublishWorld, talk.ready("h:0", commit=(2, 2)))) == ["h:0#1", "g:0#1"]


def test_newcomer_that_dies_while_members_stop_costs_a_short_pause():
    talk = joining()
    talk.tell(checked("h:0", 2, 3), checked("h:1", 2, 3))
    talk.tell(exited("h:2"))
    world = the(PublishWorld, talk.ready("h:0", "h:1", commit=(2, 4)))
    assert order(world) == ["h:0#1", "h:1#1"]


def test_newcomer_that_dies_while_the_world_forms_is_a_loss():
    talk = joining()
    talk.stop_all()
    assert the(BreakWorld, talk.tell(exited("h:2"))).generation == 3


def test_missing_answer_cancels_the_change_for_a_while():
    talk = joining(prepare_s=5)
    talk.tell(checked("h:0", 2, 3))
    actions = talk.wait(5.1)
    assert the(CallOffChange, actions).reason == because(ReasonKind.NO_ANSWER, workers="h:1#1")
    assert not has(PrepareChange, talk.wait(9))
    assert the(PrepareChange, talk.wait(2)).change == 2


def test_member_that_dies_while_preparing_or_stopping_is_a_loss():
    talk = joining(3)
    talk.tell(checked("h:0", 2, 3))
    assert len(the(BreakWorld, talk.tell(exited("h:1"))).members) == 2
    world = the(PublishWorld, talk.ready("h:0", "h:2", commit=(2, 3)))
    assert order(world) == ["h:0#1", "h:2#1", "h:3#1"]

    talk = joining(3)
    talk.tell(*(checked(f"h:{n}", 2, 3) for n in range(3)))
    talk.tell(ready("h:0", 2, (2, 4)))
    assert the(BreakWorld, talk.tell(exited("h:1"))).members == [worker("h:2")]
    world = the(PublishWorld, talk.tell(ready("h:2", 2, (2, 3))))
    assert (order(world), world.holders) == (["h:0#1", "h:2#1", "h:3#1"], 1)


def test_collective_that_breaks_while_stopping():
    talk = joining()
    talk.tell(checked("h:0", 2, 3), checked("h:1", 2, 3))
    assert has(BreakWorld, talk.tell(failed("h:1", 2)))


def test_member_that_never_stops_breaks_the_world_and_is_killed():
    talk = joining(elastic_timeout_s=60)
    talk.tell(checked("h:0", 2, 3), checked("h:1", 2, 3))
    talk.tell(ready("h:0", 2, (2, 4)))
    actions = talk.wait(60.1)
    assert the(BreakWorld, actions).reason == because(
        ReasonKind.NOT_STOPPED, workers="h:1#1", check=4, within_s=60
    )
    assert names(talk.wait(60.1), KillWorker) == ["h:1#1"]


def test_returning_cancels_a_change():
    talk = joining()
    assert str(the(CallOffChange, talk.tell(returned("h:0", 2))).reason) == "h:0#1 returned"
    assert talk.m.phase is Phase.ENDING
    talk = joining(reset_limit=0)
    talk.tell(checked("h:0", 2, 3), checked("h:1", 2, 3), ready("h:0", 2, (2, 4)))
    broken = the(BreakWorld, talk.tell(returned("h:1", 2)))  # not a failure, so no limit is reached
    assert broken.members == [worker("h:1")]


# ---- leaving ------------------------------------------------------------------------------------


def test_worker_with_sigterm_leaves_at_its_next_commit_and_its_slot_stays_empty():
    talk = running(3)
    assert str(the(PrepareChange, talk.tell(leaving("h:1"))).reason) == "h:1#1 leaves (SIGTERM)"
    actions = talk.stop_all()
    assert names(actions, LetGo) == ["h:1#1"]
    assert order(the(PublishWorld, actions)) == ["h:0#1", "h:2#1"]
    recorded("log", said(talk.tell(exited("h:1", 0))))
    assert not has(StartWorker, talk.wait(1000))
    assert names(talk.tell(hosts(h=0), hosts(h=3)))[-1:] == ["h:1#2"]  # listed again


def test_worker_that_does_not_leave_is_killed():
    talk = running(3, leave_s=30)
    talk.tell(leaving("h:1"))
    talk.stop_all()
    assert names(talk.wait(31), KillWorker) == ["h:1#1"]


def test_worker_leaves_while_the_survivors_gather():
    talk = running(4)
    talk.tell(exited("h:0"))
    talk.tell(ready("h:1", 2, (2, 5)), leaving("h:1"), leaving("h:2"), ready("h:2", 2, (2, 6)))
    actions = talk.tell(ready("h:3", 2, (2, 6)))
    assert sorted(names(actions, LetGo)) == ["h:1#1", "h:2#1"]


def test_only_holder_of_the_newest_commit_stays_until_copied():
    talk = running(3)
    talk.tell(exited("h:0"))
    talk.tell(leaving("h:1"), ready("h:1", 2, (2, 6)))
    actions = talk.tell(ready("h:2", 2, (2, 5)))
    assert not has(LetGo, actions)
    world = the(PublishWorld, actions)
    assert (order(world), world.holders) == (["h:1#1", "h:2#1"], 1)
    assert has(PrepareChange, actions)  # it leaves directly afterwards
    actions = talk.stop_all(1)
    assert names(actions, LetGo) == ["h:1#1"]


def test_last_worker_hands_over_the_state_when_all_are_asked_to_leave():
    talk = running(3, workers_min=2)
    talk.tell(*(leaving(f"h:{n}") for n in range(3)))
    actions = talk.stop_all()
    assert sorted(names(actions, LetGo)) == ["h:1#1", "h:2#1"]
    assert not has(PublishWorld, actions)  # below the minimum: h:0 waits for others
    actions = talk.tell(exited("h:1", 0), exited("h:2", 0))
    assert names(actions) == ["h:1#2", "h:2#2"]  # too few, so left slots are used
    actions = talk.join("h:1#2", "h:2#2")
    assert order(the(PublishWorld, actions))[0] == "h:0#1"
    actions = [*talk.wait(1), *talk.stop_all(1)]
    assert names(actions, LetGo) == ["h:0#1"]
    assert len(the(PublishWorld, actions).members) == 2


def test_single_worker_hands_over_even_if_the_maximum_is_one():
    talk = running(1, workers_min=1, workers_max=1)
    assert talk.tell(leaving("h:0")) == []  # no other worker can take over
    talk.tell(hosts(h=1, g=1))
    assert has(PrepareChange, talk.join("g:0"))
    actions = talk.stop_all()
    assert order(the(PublishWorld, actions)) == ["h:0#1", "g:0#1"]
    actions = talk.stop_all(1)
    assert order(the(PublishWorld, actions)) == ["g:0#1"]


def test_leaving_newcomers_are_released_at_once():
    talk = running(2, workers_max=5)
    talk.tell(hosts(h=5))
    talk.connect("h:2", "h:3")
    talk.ready("h:3", generation=0)
    actions = talk.tell(hosts(h=2))
    assert sorted(names(actions, LetGo)) == ["h:2#1", "h:3#1"]
    assert names(actions, KillWorker) == ["h:4#1"]


# ---- listed and unlisted hosts ------------------------------------------------------------------


def test_host_unlisted_for_less_than_a_second_has_no_effect():
    talk = running(4)
    assert has(PrepareChange, talk.tell(hosts(h=3)))
    assert has(CallOffChange, talk.tell(hosts(h=4)))
    assert talk.wait(100) == []


def test_host_listed_again_after_its_worker_was_released_starts_a_new_worker():
    talk = running(4)
    talk.tell(hosts(h=3))
    assert names(talk.stop_all(), LetGo) == ["h:3#1"]
    assert talk.tell(hosts(h=4)) == []
    assert names(talk.tell(exited("h:3", 0))) == ["h:3#2"]


def test_host_is_replaced():
    talk = running(2)
    assert names(talk.tell(hosts(g=2))) == ["g:0#1", "g:1#1"]
    assert talk.m.phase is Phase.TRAINING  # on the old host, until the new one is ready
    talk.join("g:0", "g:1")
    actions = talk.stop_all()
    assert names(actions, LetGo) == ["h:1#1"]
    assert order(the(PublishWorld, actions)) == ["h:0#1", "g:0#1"]
    actions = talk.stop_all(1)
    assert names(actions, LetGo) == ["h:0#1"]
    assert order(the(PublishWorld, actions)) == ["g:0#1", "g:1#1"]


def test_empty_host_list_stops_no_worker():
    talk = running(4)
    assert talk.tell(hosts()) == []
    assert talk.wait(10_000) == []
    assert talk.tell(hosts(h=4)) == []
    assert has(PrepareChange, talk.tell(hosts(h=3)))


def test_list_without_hosts_starts_no_worker_and_waits_as_below_the_minimum():
    """All machines were removed; each attempt to start a worker before that list has failed."""
    talk = running(2, workers_min=1, restarts=3, slot_attempts=4)
    talk.tell(exited("h:0", -9, output="training begins"), exited("h:1", -9))
    for incarnation in (2, 3):
        assert has(StartWorker, talk.wait(20))
        gone = [exited(f"h:{slot}#{incarnation}", 255) for slot in (0, 1)]
        assert not has(EndJob, talk.tell(*gone))
        if incarnation == 2:
            assert talk.m.worlds.give_up.spent() == because(
                ReasonKind.SLOTS_SPENT, attempts=4, needed=1, wrote=""
            )
    actions = talk.tell(hosts())
    actions += talk.wait(talk.m.settings.elastic_timeout_s - 60)
    assert not has(StartWorker, actions) and not has(EndJob, actions)
    assert names(talk.tell(hosts(h=2))) == ["h:0#4", "h:1#4"], "at once, with a clean record"


def test_list_without_hosts_beyond_the_timeout_ends_the_job():
    talk = running(2, workers_min=1, restarts=3)
    talk.tell(hosts(), exited("h:0", -9), exited("h:1", -9))
    assert the(EndJob, talk.wait(talk.m.settings.elastic_timeout_s + 1)).code == 1


def test_unlisted_host_is_kept_if_the_world_would_fall_below_the_minimum():
    talk = running(4, workers_min=4)
    assert names(talk.tell(hosts(h=3, g=1))) == ["g:0#1"]
    assert talk.wait(100) == []
    assert has(PrepareChange, talk.join("g:0"))
    actions = talk.stop_all()
    assert names(actions, LetGo) == ["h:3#1"]
    assert order(the(PublishWorld, actions)) == ["h:0#1", "h:1#1", "h:2#1", "g:0#1"]


def test_death_of_an_unlisted_host_is_no_failure():
    talk = running(3)
    talk.tell(hosts(h=2))
    actions = talk.tell(exited("h:2", 255))
    recorded("log", said(actions))
    assert has(BreakWorld, actions)


def test_late_resumption_of_a_worker_is_reported():
    talk = joining()
    talk.stop_all()
    assert talk.tell(resumed("h:0", 3), resumed("h:2", 3)) == []
    [report] = talk.tell(resumed("h:1", 3))
    assert report.kind == "change" and report.size == 3  # type: ignore[attr-defined]
