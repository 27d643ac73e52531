"""Reactions of a worker to changes of its world: each case a conversation with one Recovery."""

from __future__ import annotations

import msgspec
import pytest

from elastic.protocol.calls import Called
from elastic.protocol.messages import (
    Address,
    Broken,
    Checked,
    Commit,
    End,
    Failed,
    Finish,
    Leave,
    Leaving,
    Message,
    Place,
    Prepare,
    Proceed,
    Quit,
    Raised,
    Ready,
    Reconnected,
    Rejected,
    Returned,
    StandBy,
    StopAt,
    Stranded,
    Welcome,
    World,
)
from elastic.runtime.recovery import AbortGroups, Phase, Recovery, Send, Verdict
from harness.golden import recorded

STORE = Address("127.0.0.1", 7000)
PLACE = Place(1, 4, 1, 4, 0, 1)


def world(generation: int, holders: int = 0, commit: Commit | None = None) -> World:
    return World(generation, PLACE, STORE, holders, commit, "because")


def outside() -> Recovery:
    """In the world of init(), generation 1."""
    r = Recovery()
    r.receive(Welcome(PLACE, newcomer=False, elastic=True))
    r.wait_for_world(STORE, "")
    r.receive(world(1))
    return r


def training(generation: int = 2, commit: Commit | None = None) -> Recovery:
    """Inside elastic.run, with the state that all hold."""
    r = outside()
    r.enter()
    r.wait_for_world(STORE, "x")
    r.receive(world(generation, commit=commit))
    r.adopt()
    return r


def phase(r: Recovery) -> Phase:
    """Read again each time, which a type checker does not assume."""
    return r.phase


def test_recovery_passes_from_init_to_training():
    r = Recovery()
    assert r.provisional
    assert r.receive(Welcome(PLACE, newcomer=False, elastic=True)) == []
    assert r.wait_for_world(STORE, "") == [Send(Ready(0, None, STORE, "", running=False, number=1))]
    assert r.receive(world(1)) == []
    assert (r.phase, r.generation, r.provisional) == (Phase.TRAINING, 1, False)
    r.enter()
    assert r.wait_for_world(STORE, "x") == [Send(Ready(1, None, STORE, "x", number=2))]
    r.receive(world(2))
    assert r.adopt() == Commit(2, 0)


def test_ready_message_contains_the_step_only_with_a_commit():
    r = training(2, commit=Commit(1, 7))
    [sent] = r.wait_for_world(STORE, "x", step=30)
    assert isinstance(sent, Send) and isinstance(sent.message, Ready)
    assert (sent.message.commit, sent.message.step) == (Commit(2, 0), 30)
    r = outside()
    [sent] = r.wait_for_world(STORE, "", step=30)
    assert isinstance(sent, Send) and isinstance(sent.message, Ready)
    assert (sent.message.commit, sent.message.step) == (None, None)


def test_a_newcomer_does_not_wait_in_init():
    r = Recovery()
    r.receive(Welcome(Place(4, 5, 0, 1, 0, 1), newcomer=True, elastic=True))
    assert r.newcomer and r.place.rank == 4
    r.enter()
    r.wait_for_world(STORE, "x")
    r.receive(world(7))
    assert not r.newcomer  # from now on its init() waits like that of the others


def test_worker_left_out_of_the_first_world_is_outside_and_provisional():
    r = Recovery()
    r.receive(Welcome(PLACE, newcomer=False, elastic=True))
    r.wait_for_world(STORE, "")
    r.receive(Welcome(Place(4, 5, 0, 1, 0, 1), newcomer=True, elastic=True))
    assert r.phase is Phase.OUTSIDE
    r.receive(world(1))  # not meant for it
    assert r.phase is Phase.OUTSIDE and r.provisional


def test_a_broken_collective_is_aborted_and_reported_once():
    r = training()
    cut = AbortGroups(2, "closed")
    assert r.fail(2, "closed") == [cut, Send(Failed(2, "closed"))]
    assert r.fail(2, "closed too") == []
    assert r.receive(Broken(2, "lost h:1")) == []
    assert r.arrive() is Verdict.BROKEN


def test_the_drivers_message_has_priority():
    r = training()
    assert r.receive(Broken(2, "lost h:1")) == [AbortGroups(2, "lost h:1")]
    assert r.fail(2, "closed") == []
    assert r.verdict() is Verdict.BROKEN
    recorded("messages", r.reason)
    assert r.wait_for_world(STORE, "x") == [Send(Ready(2, Commit(2, 0), STORE, "x", number=3))]


def test_messages_of_another_generation_are_ignored():
    r = training()
    assert r.fail(1, "old") == []
    assert r.receive(Broken(1, "old")) == []
    assert r.receive(Prepare(1, 1)) == []
    assert r.receive(world(2)) == [] and phase(r) is Phase.TRAINING
    r.receive(Broken(2, "lost"))
    r.wait_for_world(STORE, "x")
    r.receive(world(2))  # sent again
    assert phase(r) is Phase.WAITING


def test_broken_collective_outside_of_elastic_run_strands_the_worker():
    r = outside()
    assert r.fail(1, "closed") == [AbortGroups(1, "closed"), Send(Stranded(1, "closed"))]
    assert r.strand() == []


def test_broken_world_strands_only_workers_that_have_not_entered_elastic_run():
    r = outside()
    assert r.receive(Broken(1, "lost")) == [AbortGroups(1, "lost")]
    assert r.strand() == [Send(Stranded(1, "lost"))]  # a collective was called
    assert r.strand() == []
    r = outside()
    r.receive(Broken(1, "lost"))
    r.enter()
    assert r.strand() == []
    assert r.wait_for_world(STORE, "x") == [Send(Ready(1, None, STORE, "x", number=2))]


# ---- planned changes ----------------------------------------------------------------------------


def test_all_workers_stop_one_check_after_the_most_advanced_one():
    behind, ahead = training(), training()
    assert behind.arrive() is Verdict.PASS
    for _ in range(3):
        assert ahead.arrive() is Verdict.PASS
    assert behind.receive(Prepare(2, 1)) == [Send(Checked(2, 1, 1))]
    assert ahead.receive(Prepare(2, 1)) == [Send(Checked(2, 1, 3))]
    assert behind.arrive() is Verdict.HOLD
    assert ahead.arrive() is Verdict.HOLD
    for r in (behind, ahead):
        r.receive(StopAt(2, 1, 4))
    assert ahead.verdict() is Verdict.STOP
    assert behind.verdict() is Verdict.PASS
    assert behind.arrive() is Verdict.PASS
    assert behind.arrive() is Verdict.STOP


def test_worker_names_the_group_with_which_it_stops_for_a_planned_change():
    r = training()
    r.stop_group = "eu"
    assert r.receive(Prepare(2, 1)) == [Send(Checked(2, 1, 0, "eu"))]
    r.receive(StopAt(2, 1, 2))  # the safepoint of a faster worker of its group
    assert r.arrive() is Verdict.PASS
    assert r.arrive() is Verdict.STOP


def test_cancelled_change_releases_a_held_worker():
    r = training()
    r.receive(Prepare(2, 1))
    assert r.arrive() is Verdict.HOLD
    r.receive(Proceed(2, 1))
    assert r.verdict() is Verdict.PASS
    r.receive(StopAt(2, 2, 5))  # of an unknown change
    assert r.arrive() is Verdict.PASS


def test_a_failure_releases_a_held_worker():
    r = training()
    r.receive(Prepare(2, 1))
    assert r.arrive() is Verdict.HOLD
    r.receive(Broken(2, "lost"))
    assert r.verdict() is Verdict.BROKEN


def test_a_late_stop_message_breaks_the_world():
    r = training()
    r.receive(Prepare(2, 1))
    r.arrive()
    r.release()
    assert r.verdict() is Verdict.PASS
    late = "the message with the safepoint arrived too late"
    assert r.receive(StopAt(2, 1, 1)) == [AbortGroups(2, late), Send(Failed(2, late))]


def test_the_end_of_a_job_releases_a_held_worker():
    r = training()
    r.receive(Prepare(2, 1))
    r.arrive()
    assert r.receive(End("enough")) == [AbortGroups(2, "enough")]
    assert r.verdict() is Verdict.OVER


# ---- commits ------------------------------------------------------------------------------------


def test_commit_has_the_number_of_the_check_that_follows():
    r = training()
    r.arrive()
    r.arrive()
    assert r.committed() == Commit(2, 3)
    r.arrive()
    assert r.newest == Commit(2, 3)


def test_stopping_at_a_commit_saves_under_the_same_number():
    r = training()
    r.receive(Prepare(2, 1))
    r.receive(StopAt(2, 1, 1))
    committed = r.committed()
    assert r.arrive() is Verdict.STOP
    assert r.committed() == committed == Commit(2, 1)


def test_workers_that_passed_and_stopped_ones_never_share_a_commit_number():
    passed, stopped = training(), training()
    for r in (passed, stopped):
        r.receive(Prepare(2, 1))
        r.arrive()
    passed.release()
    stopped.receive(StopAt(2, 1, 1))
    assert stopped.verdict() is Verdict.STOP
    assert stopped.committed() == Commit(2, 1)
    assert passed.committed() == Commit(2, 2)


def test_commits_outside_of_elastic_run_are_not_reported():
    r = outside()
    assert r.committed() is None
    r.enter()
    [ready] = r.wait_for_world(STORE, "x")
    assert ready == Send(Ready(1, None, STORE, "x", number=2))


def test_discarded_commit_is_not_reported():
    r = training()
    r.committed()
    r.discard_commit()
    r.receive(Broken(2, "lost"))
    assert r.wait_for_world(STORE, "x") == [Send(Ready(2, None, STORE, "x", number=3))]


def test_second_training_does_not_begin_with_the_commit_of_the_first():
    r = training()
    r.committed()
    r.returned()
    r.receive(Finish(2))
    r.enter()
    assert r.newest is None


# ---- the end ------------------------------------------------------------------------------------


def test_returned_worker_finishes_when_all_have_returned():
    r = training()
    assert r.returned() == [Send(Returned(2))]
    r.receive(Finish(1))
    assert phase(r) is Phase.RETURNED
    r.receive(Finish(2))
    assert phase(r) is Phase.FINISHED
    assert r.driver_lost("gone") == []  # nothing is expected from it any more


def finished() -> Recovery:
    r = training()
    r.returned()
    r.receive(Finish(2))
    r.leave()
    return r


def test_failure_in_a_second_training_breaks_the_worker_without_a_report():
    r = finished()
    r.train_again()
    assert r.fail(2, "reset by peer") == [AbortGroups(2, "reset by peer")]
    assert (phase(r), r.finished, r.reason) == (Phase.BROKEN, True, "reset by peer")
    assert r.strand() == []
    r.trained_again()
    assert r.finished  # a third one does not wait for a world
    assert r.reconnected() == [Send(Reconnected(2, True))]


def test_second_training_uses_no_values_that_members_have_sent_before_the_first():
    r = outside()
    r.enter()
    r.wait_for_world(STORE, "x")
    known = msgspec.structs.replace(
        world(2), metadata=[{"merges": "3"}], source={"state": "of step 13"}
    )
    r.receive(known)
    assert r.world == known
    r.adopt()
    r.returned()
    r.receive(Finish(2))
    r.train_again()
    assert r.world == world(2)


def test_failure_after_a_second_training_is_ignored():
    r = finished()
    r.train_again()
    r.trained_again()
    assert r.fail(2, "reset by peer") == []
    assert (phase(r), r.finished) == (Phase.FINISHED, True)


def test_loss_before_all_have_returned_recalls_a_returned_worker():
    r = training()
    r.returned()
    r.receive(Broken(2, "lost"))
    assert r.phase is Phase.BROKEN
    assert r.returned() == []


def test_repeated_init_waits_for_a_new_world():
    r = outside()
    r.pause()
    r.receive(Broken(1, "lost"))  # no longer relevant for it
    assert r.phase is Phase.OUTSIDE
    assert r.wait_for_world(STORE, "") == [Send(Ready(1, None, STORE, "", False, number=2))]
    r.receive(world(2))
    assert r.generation == 2


@pytest.mark.parametrize("message", [Leave("SIGTERM"), Rejected("layout"), End("failed")])
def test_messages_and_calls_after_the_end_have_no_effect(message):
    r = training()
    assert r.receive(message) == [AbortGroups(2, message.reason)]
    assert (r.phase, r.over, r.reason) == (Phase.OVER, message, message.reason)
    assert r.receive(world(3)) == [] and r.generation == 2
    assert r.wait_for_world(STORE, "x") == [] and r.returned() == [] and r.fail(2, "x") == []
    r.pause()
    assert r.arrive() is Verdict.OVER


def test_lost_driver_ends_the_worker():
    r = training()
    assert r.driver_lost("closed") == [AbortGroups(2, "closed")]
    assert r.over == End("closed")


def test_user_exception_is_reported_with_the_preceding_commit():
    r = training()
    r.committed()
    assert r.raised("ValueError: x", "Traceback") == [
        Send(Raised(2, Commit(2, 1), "ValueError: x", "Traceback")),
        AbortGroups(2, "ValueError: x"),
    ]
    assert r.phase is Phase.OVER


def test_sys_exit_in_user_code_is_reported_before_the_interpreter_ends():
    r = training()
    reason = "sys.exit was called under elastic.run: exit code 3"
    assert r.quit(3) == [Send(Quit(2, 3, "sys.exit(3)")), AbortGroups(2, reason)]
    assert r.phase is Phase.OVER
    assert r.quit(3) == [] and r.wait_for_world(STORE, "d") == []


def test_quit_is_reported_before_the_process_ends():
    r = training()
    assert [each.message for each in r.quit(1, "") if isinstance(each, Send)] == [Quit(2, 1)]
    assert r.phase is Phase.OVER


# ---- a connection that is lost and replaced -----------------------------------------------------


def said(r: Recovery) -> list[Message]:
    return [action.message for action in r.reconnected() if isinstance(action, Send)]


def test_phase_is_reported_on_a_new_connection():
    r = Recovery()
    assert said(r) == [Reconnected(0, welcomed=False)]
    r.receive(Welcome(PLACE, newcomer=False, elastic=True))
    assert said(r) == [Reconnected(0, welcomed=True)]
    r = training(2)
    assert said(r) == [Reconnected(2, welcomed=True)]
    assert r.phase is Phase.TRAINING


def test_differing_calls_are_reported_with_the_failure_and_again_to_the_next_driver():
    calls = (Called(0, "allreduce.x", "a.py:3"), Called(1, "broadcast.x"))
    for r, failure in (
        (training(2), Failed(2, "calls", True, calls)),
        (outside(), Stranded(1, "calls", True, calls)),
    ):
        assert r.fail(failure.generation, "calls", calls)[-1] == Send(failure)
        assert said(r)[1:] == [failure]
    r.wait_for_world(STORE, "")
    r.receive(world(3))
    assert r.fail(3, "closed")[-1] != Send(Stranded(3, "closed", True))


def test_unanswered_messages_are_repeated_unchanged():
    r = training(2)
    r.fail(2, "closed")
    assert said(r)[1:] == [Failed(2, "closed")]
    ready = r.wait_for_world(STORE, "x")
    assert [Send(m) for m in said(r)[1:]] == ready
    r.receive(world(3))
    assert said(r)[1:] == []
    [resumed] = r.resumed({"formed": 2.0})
    assert [Send(m) for m in said(r)[1:]] == [resumed]
    r.returned()
    assert said(r)[-1] == Returned(3)


def test_a_world_that_the_driver_broke_needs_no_report():
    r = training(2)
    r.receive(Broken(2, "lost h:1"))
    assert said(r)[1:] == []


def test_exception_before_any_commit_is_reported_at_the_beginning():
    r = training()
    r.raised("ValueError: x", "Traceback")
    assert said(r)[-1] == Raised(2, Commit(2, 0), "ValueError: x", "Traceback", beginning=True)
    r = training(commit=Commit(1, 0))
    r.raised("ValueError: x", "Traceback")
    assert said(r)[-1] == Raised(2, Commit(2, 0), "ValueError: x", "Traceback")


def test_leave_request_and_exception_are_reported_again_after_a_reconnect():
    r = training(2)
    assert r.ask_to_leave("SIGTERM") == [Send(Leaving("SIGTERM"))]
    assert said(r)[1:] == [Leaving("SIGTERM")]
    r.raised("ValueError: x", "trace")
    assert said(r)[-1] == Raised(2, Commit(2, 0), "ValueError: x", "trace", beginning=True)
    assert r.ask_to_leave("SIGTERM") == []
    r = training(2)
    r.quit(0)
    assert said(r)[1:] == [Quit(2, 0, "sys.exit(0)")]


def test_a_repeated_query_of_the_safepoint_number_gets_the_same_answer():
    """The first one may have been received: all may be about to stop at its safepoint."""
    r = training(2)
    r.arrive()
    assert r.receive(Prepare(2, 1)) == [Send(Checked(2, 1, 1))]
    assert r.arrive() is Verdict.HOLD
    assert r.receive(Prepare(2, 1)) == [Send(Checked(2, 1, 1))]
    assert r.verdict() is Verdict.HOLD
    r.receive(StopAt(2, 1, 2))
    assert r.receive(Prepare(2, 1)) == []
    assert r.verdict() is Verdict.STOP


def test_completed_change_does_not_begin_again():
    r = training(2)
    r.receive(Prepare(2, 1))
    r.receive(Proceed(2, 1))
    assert r.receive(Prepare(2, 1)) == []
    assert r.arrive() is Verdict.PASS
    assert r.receive(Prepare(2, 2)) == [Send(Checked(2, 2, 1))]
    assert r.receive(Prepare(2, 1)) == []


def test_late_messages_of_a_lost_connection_have_no_effect():
    r = training(3)
    for late in (world(2), world(3), Broken(2, "old"), StopAt(2, 1, 1), Proceed(2, 1), Finish(2)):
        assert r.receive(late) == []
    r.receive(Welcome(Place(7, 8, 0, 1, 0, 1), newcomer=True, elastic=True))
    assert (r.phase, r.generation, r.place, r.newcomer) == (Phase.TRAINING, 3, PLACE, False)


def test_each_ready_message_has_a_new_number():
    r = outside()
    first, second = (r.wait_for_world(STORE, "x")[0] for _ in range(2))
    assert isinstance(first, Send) and isinstance(second, Send)
    assert (first.message.number, second.message.number) == (2, 3)  # type: ignore[attr-defined]


# ---- standing by -----------------------------------------------------------------------------------


def test_newcomer_is_a_standby_until_its_world_is_formed():
    r = Recovery()
    r.receive(Welcome(PLACE, newcomer=True, elastic=True))
    r.enter()
    r.wait_for_world(STORE, "x")
    assert r.receive(StandBy()) == []
    assert (r.stands_by, r.phase) == (True, Phase.WAITING)
    r.receive(world(7))
    assert (r.stands_by, r.phase) == (False, Phase.TRAINING)


def test_late_standby_message_is_ignored():
    r = training()
    r.receive(StandBy())
    assert not r.stands_by
