"""Operator requests to a running job: scaling, draining hosts, removing workers."""

from __future__ import annotations

import pytest

from elastic.driver.events import (
    Action,
    AnswerRequest,
    BreakWorld,
    DrainRequested,
    EndJob,
    HostLeaving,
    HostsChanged,
    HostStaying,
    KillWorker,
    LetGo,
    Notice,
    PrepareChange,
    PublishWorld,
    RemoveRequested,
    ScaleRequested,
    StopRequested,
)
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.reasons import ReasonKind, because
from harness.conversation import (
    MembershipConversation,
    exited,
    has,
    hosts,
    names,
    order,
    running,
    static,
    stranded,
    the,
    worker,
)
from harness.golden import recorded


def answer(actions: list[Action]) -> tuple[bool, ReasonKind]:
    found = the(AnswerRequest, actions)
    assert found.request in (7, 8) and str(found.reason)
    return found.done, found.reason.kind


def scale(talk: MembershipConversation, workers: int) -> list[Action]:
    return talk.tell(ScaleRequested(7, workers))


def two_hosts(**settings) -> MembershipConversation:
    """Train in generation 2 with two workers on each of a and b."""
    talk = MembershipConversation(np=4, **settings)
    talk.tell(hosts(a=2, b=2))
    everybody = ["a:0", "a:1", "b:0", "b:1"]
    talk.join(*everybody)
    talk.resume()
    return talk


def test_scaling_up_starts_workers_without_interrupting_members():
    talk = running(4)
    talk.tell(hosts(h=8))
    actions = scale(talk, 8)
    assert answer(actions) == (True, ReasonKind.SCALED)
    assert names(actions) == [f"h:{slot}#1" for slot in range(4, 8)]
    assert not has(PrepareChange, actions)
    talk.join("h:4", "h:5", "h:6", "h:7")
    world = the(PublishWorld, talk.stop_all())
    assert len(world.members) == 8


def test_few_workers_start_at_once_and_a_hanging_one_does_not_block_the_rest():
    talk = running(4, starting_max=2, start_timeout_s=50.0)
    talk.tell(hosts(h=8))
    assert names(scale(talk, 8)) == ["h:4#1", "h:5#1"]
    assert names(talk.connect("h:4")) == ["h:6#1"]
    assert names(talk.tell(exited("h:6", 1))) == ["h:7#1"]
    assert names(talk.wait(50.0), KillWorker) == ["h:5#1", "h:7#1"]
    assert names(talk.tell(exited("h:5"))) == ["h:6#2"]


def test_all_needed_workers_start_at_once_below_the_minimum():
    talk = running(4, workers_min=4, starting_max=1)
    talk.tell(exited("h:1"), exited("h:2"), exited("h:3"))
    assert names(talk.wait(2.0)) == ["h:1#2", "h:2#2", "h:3#2"]


def test_scaling_down_releases_the_last_ranks_at_an_agreed_safepoint():
    talk = running(4)
    actions = scale(talk, 2)
    assert answer(actions) == (True, ReasonKind.SCALED) and has(PrepareChange, actions)
    after = talk.stop_all()
    assert order(the(PublishWorld, after)) == ["h:0#1", "h:1#1"]
    assert names(after, LetGo) == ["h:2#1", "h:3#1"]
    assert not has(BreakWorld, after)
    after = talk.tell(exited("h:2", 0), exited("h:3", 0))
    assert not names(after) and not names(talk.wait(600.0))


def test_answer_names_drained_hosts_that_leave_too_few_slots():
    talk = two_hosts()
    talk.tell(DrainRequested(7, "b", off=False))
    facts = the(AnswerRequest, scale(talk, 4)).reason.facts
    assert (facts["drained"], facts["more"], facts["slots"]) == ("b", 0, 2)
    assert "drained" not in the(AnswerRequest, scale(talk, 2)).reason.facts
    talk.tell(DrainRequested(7, "b", off=True))
    assert "drained" not in the(AnswerRequest, scale(talk, 9)).reason.facts


def test_undrained_host_gets_no_more_workers_than_the_current_size():
    talk = two_hosts()
    talk.tell(DrainRequested(7, "b", off=False))
    scale(talk, 2)
    talk.tell(DrainRequested(7, "b", off=True))
    assert [str(each) for each in talk.m.roster.leavers] == ["b:0#1", "b:1#1"]


def test_released_slots_are_used_again_when_the_job_grows():
    talk = running(4)
    scale(talk, 2)
    talk.stop_all()
    talk.tell(exited("h:2", 0), exited("h:3", 0))
    assert names(scale(talk, 3)) == ["h:2#2"]


def test_leaving_worker_stays_when_the_job_grows_again():
    talk = running(4)
    scale(talk, 2)
    assert answer(scale(talk, 3)) == (True, ReasonKind.SCALED)
    assert [str(each) for each in talk.m.roster.leavers] == ["h:3#1"]
    scale(talk, 4)
    assert not talk.m.roster.leavers
    assert talk.m.phase.value == "training"  # the change is cancelled


@pytest.mark.parametrize("code", [0, 1, -9])
def test_exit_of_a_removed_worker_is_not_the_root_cause_of_a_failure(code):
    talk = MembershipConversation(np=2, workers_min=1, workers_max=3)
    talk.tell(hosts(h=2))
    talk.connect("h:0", "h:1")
    talk.ready("h:0", "h:1", running=False)
    talk.tell(hosts(h=3))
    talk.connect("h:2")
    assert names(scale(talk, 2), LetGo) == ["h:2#1"]
    talk.tell(stranded("h:0", talk.m.generation))
    assert not has(EndJob, talk.tell(exited("h:2", code)))
    assert has(EndJob, talk.tell(exited("h:1", -9)))


def test_starting_workers_are_removed_before_members():
    talk = running(4)
    talk.tell(hosts(h=8))
    scale(talk, 6)
    actions = scale(talk, 4)
    assert names(actions, KillWorker) == ["h:4#1", "h:5#1"]
    assert not has(PrepareChange, actions)


def test_size_below_the_minimum_is_rejected_without_an_effect():
    talk = running(4)
    assert answer(scale(talk, 1)) == (False, ReasonKind.BELOW_LEAST)
    assert talk.m.workers_max == 4 and not talk.m.roster.leavers


def test_size_beyond_the_slots_waits_for_more():
    talk = running(4)
    actions = scale(talk, 6)
    assert the(AnswerRequest, actions).reason == because(
        ReasonKind.SCALED, workers=6, before=4, slots=4, leave=0
    )
    assert names(talk.tell(hosts(h=5))) == ["h:4#1"]


def test_standbys_remain_beside_a_smaller_world():
    talk = running(4, standbys=1)
    talk.tell(hosts(h=5))
    talk.join("h:4")
    scale(talk, 3)
    assert [str(each) for each in talk.m.roster.leavers] == ["h:3#1"]
    world = the(PublishWorld, talk.stop_all())
    assert order(world) == ["h:0#1", "h:1#1", "h:2#1"]


def test_drained_host_is_unused_until_undrained():
    talk = two_hosts()
    actions = talk.tell(DrainRequested(7, "b"))
    assert answer(actions) == (True, ReasonKind.DRAINS) and has(PrepareChange, actions)
    after = talk.stop_all()
    assert order(the(PublishWorld, after)) == ["a:0#1", "a:1#1"]
    talk.tell(exited("b:0", 0), exited("b:1", 0))
    assert not names(talk.wait(3600.0))
    actions = talk.tell(DrainRequested(7, "b", off=True))
    assert answer(actions) == (True, ReasonKind.DRAINS_NO_MORE)
    assert names(actions) == ["b:0#2", "b:1#2"]


def test_workers_needed_for_the_minimum_stay_on_a_drained_host():
    talk = two_hosts(workers_min=3)
    actions = talk.tell(DrainRequested(7, "b"))
    assert answer(actions) == (True, ReasonKind.DRAINS) and not has(PrepareChange, actions)
    assert the(AnswerRequest, actions).reason == because(
        ReasonKind.DRAINS, host="b", workers=2, least=3
    )
    talk.tell(hosts(a=2, b=2, c=2))
    talk.join("c:0", "c:1")
    assert order(the(PublishWorld, talk.stop_all())) == ["a:0#1", "a:1#1", "c:0#1", "c:1#1"]


def test_cancelled_drain_keeps_the_remaining_workers():
    talk = two_hosts()
    talk.tell(DrainRequested(7, "b"))
    talk.tell(DrainRequested(7, "b", off=True))
    assert not talk.m.roster.leavers and talk.m.phase.value == "training"


@pytest.mark.parametrize(
    ("listed", "least", "others"),
    [({"h": 4}, 1, 0), ({"h": 4, "g": 1}, 2, 1)],
    ids=["only host", "too few slots elsewhere"],
)
def test_drain_when_too_few_slots_would_remain_then_is_refused(listed, least, others):
    talk = running(4, workers_min=least)
    talk.tell(HostsChanged(listed, fixed=True))
    actions = talk.tell(DrainRequested(7, "h"))
    assert answer(actions) == (False, ReasonKind.NOWHERE_ELSE)
    refusal = the(AnswerRequest, actions).reason
    assert refusal.facts == {"host": "h", "slots": others, "least": least}
    recorded("messages", str(refusal))
    assert not talk.m.drained and not talk.m.roster.leavers


def test_drain_of_the_only_host_when_more_may_be_discovered_then_waits_for_a_new_host():
    talk = running(4, workers_min=1)
    assert answer(talk.tell(DrainRequested(7, "h"))) == (True, ReasonKind.DRAINS)
    assert not has(LetGo, talk.wait(60.0))
    talk.tell(hosts(h=4, g=1))
    talk.join("g:0")
    talk.stop_all()  # one worker stays to pass on the commit
    talk.resume()
    assert order(the(PublishWorld, talk.stop_all())) == ["g:0#1"]


def test_drain_when_other_hosts_have_enough_slots_then_is_accepted():
    talk = two_hosts(workers_min=2)
    talk.tell(HostsChanged({"a": 2, "b": 2}, fixed=True))
    assert answer(talk.tell(DrainRequested(7, "b"))) == (True, ReasonKind.DRAINS)
    assert answer(talk.tell(DrainRequested(8, "a"))) == (False, ReasonKind.NOWHERE_ELSE)


def test_drained_host_stays_drained_after_a_withdrawn_notice():
    talk = two_hosts()
    talk.tell(HostLeaving("b", Notice("spot", 600.0)), DrainRequested(7, "a"))
    talk.tell(DrainRequested(7, "a", off=True), DrainRequested(7, "b"), HostStaying("b"))
    assert not names(talk.wait(3600.0))
    talk.tell(exited("b:1"))
    assert not names(talk.wait(3600.0))


def test_host_listed_again_after_removal_is_no_longer_drained():
    talk = two_hosts()
    talk.tell(DrainRequested(7, "b"))
    talk.stop_all()
    talk.tell(exited("b:0", 0), exited("b:1", 0), hosts(a=2))
    assert names(talk.tell(hosts(a=2, b=2))) == ["b:0#2", "b:1#2"]


def test_unknown_host_is_rejected_with_the_known_ones():
    actions = two_hosts().tell(DrainRequested(7, "c"))
    assert answer(actions) == (False, ReasonKind.NO_SUCH_HOST)
    assert the(AnswerRequest, actions).reason == because(
        ReasonKind.NO_SUCH_HOST, host="c", hosts="a, b"
    )


def test_removed_worker_leaves_and_its_slot_stays_empty():
    talk = running(4)
    actions = talk.tell(RemoveRequested(7, worker("h:1")))
    assert answer(actions) == (True, ReasonKind.REMOVES)
    assert order(the(PublishWorld, talk.stop_all())) == ["h:0#1", "h:2#1", "h:3#1"]
    talk.tell(exited("h:1", 0))
    assert not names(talk.wait(600.0))


def test_leaving_or_exited_worker_is_not_removed_again():
    talk = running(4)
    assert answer(talk.tell(RemoveRequested(7, worker("h:9")))) == (
        False,
        ReasonKind.NO_SUCH_WORKER,
    )
    talk.tell(RemoveRequested(7, worker("h:1")))
    assert answer(talk.tell(RemoveRequested(7, worker("h:1")))) == (
        False,
        ReasonKind.LEAVES_ALREADY,
    )


@pytest.mark.parametrize(
    "request_", [ScaleRequested(7, 3), DrainRequested(7, "h"), RemoveRequested(7, worker("h:1"))]
)
def test_static_and_finished_jobs_reject_requests(request_):
    assert answer(static(2).tell(request_)) == (False, ReasonKind.FIXED_SIZE)
    talk = running(4)
    talk.tell(StopRequested("Ctrl-C"))
    assert answer(talk.tell(request_)) == (False, ReasonKind.JOB_OVER)


def test_successor_driver_knows_the_requests():
    talk = two_hosts()
    talk.tell(ScaleRequested(7, 3), DrainRequested(7, "b"))
    copy = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    assert copy.workers_max == 3
    assert copy.worlds.staff.slots.drained("b")
