"""Scripts that repeatedly fail in the same way end their job; an end on fewer workers names the failed scripts."""

from __future__ import annotations

import pytest

from elastic.driver.events import (
    Action,
    BreakWorld,
    EndJob,
    ExitCause,
    KillWorker,
    PublishWorld,
    RejectWorker,
    WorkerFailed,
    WorkerQuit,
    WorkerRaised,
)
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.protocol.calls import Called
from elastic.protocol.messages import Commit
from harness.conversation import (
    MembershipConversation,
    exited,
    has,
    inside,
    raised,
    ready,
    returned,
    running,
    started,
    the,
    worker,
)

CALLS = (Called(0, "allreduce", "a.py:3"), Called(1, "broadcast", "a.py:5"))
OTHERS = (Called(0, "allreduce", "a.py:30"), Called(1, "broadcast", "a.py:50"))


def judged(workers: int = 3, **settings: object) -> MembershipConversation:
    return running(workers, judge_scripts=True, workers_min=1, **settings)


def differ(talk: MembershipConversation, *calls: Called) -> list[Action]:
    """Report that ranks call different collectives, as learned by one of them."""
    return talk.tell(WorkerFailed(worker("h:0"), talk.m.generation, "calls", True, calls))


def again(talk: MembershipConversation) -> None:
    assert has(PublishWorld, talk.ready(*talk.members, commit=(2, 4)))


def end(actions: list[Action]) -> tuple[int, ReasonKind]:
    found = the(EndJob, actions)
    return found.code, found.reason.kind


# ---- different calls -----------------------------------------------------------------------------


def test_different_calls_again_in_the_next_world_end_the_job():
    talk = judged()
    first = differ(talk, *CALLS)
    assert the(BreakWorld, first).reason == because(ReasonKind.CALLS_DIFFER, text="calls")
    again(talk)
    found = the(EndJob, differ(talk, CALLS[1]))  # a rank that did not learn the others' calls
    cause = because(ReasonKind.CALLS_DIFFER, text="calls")
    assert (found.code, found.reason) == (1, because(ReasonKind.SAME_CALLS, cause=cause))


@pytest.mark.parametrize("second", [OTHERS, ()])
def test_other_calls_or_a_broken_connection_are_another_failure(second):
    talk = judged()
    differ(talk, *CALLS)
    again(talk)
    assert not has(EndJob, differ(talk, *second))


def test_different_calls_after_a_world_broken_otherwise_are_another_failure():
    talk = judged()
    differ(talk, *CALLS)
    again(talk)
    talk.tell(exited("h:2"))
    talk.ready("h:0", "h:1", commit=(3, 2))
    assert not has(EndJob, differ(talk, *CALLS))
    again(talk)
    assert end(differ(talk, *CALLS)) == (1, ReasonKind.SAME_CALLS)


def test_waits_in_different_collectives_again_in_the_next_world_end_the_job():
    talk = judged(2)
    for generation in (2, 3):
        for name, collective in (("h:0", "loss"), ("h:1", "accuracy")):
            talk.works(name)
            talk.tell(inside(name, generation, collective, line="a.py:3"))
        actions = talk.wait(31)
        if generation == 2:
            assert the(BreakWorld, actions).reason.kind is ReasonKind.DIFFERENT_COLLECTIVES
            again(talk)
    assert end(actions) == (1, ReasonKind.SAME_CALLS)


def test_mismatching_tensors_end_the_job_regardless_of_the_first_reporter():
    talk = judged()
    raised = WorkerRaised(
        *(worker("h:2"), 2, Commit(2, 4), "TensorMismatch: x", "Traceback"), calls=CALLS
    )
    found = the(EndJob, talk.tell(raised))
    assert (found.code, found.reason) == (
        1,
        because(ReasonKind.TENSORS_DIFFER, summary="TensorMismatch: x"),
    )


# ---- different states ----------------------------------------------------------------------------


def turned_away() -> MembershipConversation:
    """Rank 1 of the world of init() enters elastic.run with another model than the others."""
    talk = started(3, judge_scripts=True, workers_min=1)
    entered = [
        ready("h:0", 1, layout="a"),
        ready("h:1", 1, layout="b"),
        ready("h:2", 1, layout="a"),
    ]
    actions = talk.tell(*entered)
    assert the(RejectWorker, actions).worker == worker("h:1")
    assert has(PublishWorld, actions)
    talk.resume()
    talk.tell(exited("h:1", 1))
    talk.wait(1)
    talk.connect("h:1#2")
    return talk


def test_same_mismatching_state_in_the_same_slot_ends_the_job():
    found = the(EndJob, turned_away().tell(ready("h:1#2", 0, layout="b")))
    both = because(ReasonKind.LAYOUTS_DIFFER, first="h:1#1", worker="h:1#2", rank_0="h:0#1")
    assert (found.code, found.reason) == (1, both)


def loses_shards(name: str, generation: int) -> WorkerRaised:
    return WorkerRaised(
        worker(name), generation, None, "shard 1 of 3 was on h", "", final=True, shards_lost=True
    )


def test_job_ends_with_the_mismatching_state_of_a_rejected_member_whose_shards_are_lost():
    talk = started(3, judge_scripts=True, workers_min=1)
    talk.tell(ready("h:0", 1, layout="a"), ready("h:1", 1, layout="b"), ready("h:2", 1, layout="a"))
    found = the(EndJob, talk.tell(loses_shards("h:0", talk.m.generation)))
    differs = because(ReasonKind.LAYOUTS_DIFFER, first=None, worker="h:1#1", rank_0="h:0#1")
    assert (found.code, found.reason) == (1, differs)
    assert str(found.reason)


def test_job_ends_for_shards_that_are_lost_in_a_later_world():
    talk = turned_away()
    talk.tell(exited("h:2", -9))
    talk.ready("h:0", commit=(2, 4))
    assert end(talk.tell(loses_shards("h:0", talk.m.generation))) == (1, ReasonKind.SHARDS_LOST)


def test_third_state_is_only_rejected():
    actions = turned_away().tell(ready("h:1#2", 0, layout="c"))
    assert has(RejectWorker, actions) and not has(EndJob, actions)


def test_newcomers_with_another_state_do_not_end_the_job():
    """A host with an older script must not end the job of the others."""
    talk = started(3, judge_scripts=True, workers_min=1)
    talk.tell(*(ready(f"h:{slot}", 1, layout="a") for slot in range(3)))
    talk.resume()
    talk.tell(exited("h:2"))
    talk.tell(*(ready(f"h:{slot}", 2, (2, 4), layout="a") for slot in range(2)))
    for incarnation in (2, 3, 4):
        talk.wait(60)
        talk.connect(f"h:2#{incarnation}")
        actions = talk.tell(ready(f"h:2#{incarnation}", 0, layout="b"))
        assert has(RejectWorker, actions) and not has(EndJob, actions)
        talk.tell(exited(f"h:2#{incarnation}", 1))


# ---- an end on fewer workers ---------------------------------------------------------------------


def ended(talk: MembershipConversation) -> Reason:
    """Make all remaining workers return."""
    left = [str(record.worker) for record in talk.m.worlds.live()]
    found = the(EndJob, talk.tell(*(returned(name, talk.m.generation) for name in left)))
    assert (found.code, found.reason.kind) == (0, ReasonKind.ALL_RETURNED)
    return found.reason


def without(talk: MembershipConversation, *events: object) -> Reason:
    talk.tell(*events)  # type: ignore[arg-type]
    talk.ready("h:0", "h:2", commit=(2, 4))
    return ended(talk)


@pytest.mark.parametrize("strict", [False, True])
def test_end_names_the_worker_whose_script_failed(strict):
    found = without(judged(strict=strict), raised("h:1", 2, (2, 4)), exited("h:1", 1))
    assert found.facts == {
        **{"members": 2, "generation": 3, "began": 3, "strict": strict},
        "failed": [because(ReasonKind.LOST_RAISED, worker="h:1#1", summary="ValueError: x")],
    }


def test_end_names_a_sys_exit_call_and_an_exit_code():
    quits = WorkerQuit(worker("h:1"), 2, 3, "sys.exit(3)")
    found = without(judged(), quits, exited("h:1", 3))
    assert found.facts["failed"] == [
        because(ReasonKind.LOST_QUIT, worker="h:1#1", call="sys.exit(3)")
    ]
    raised_early = exited("h:1", 1, cause=ExitCause.EXCEPTION)
    assert without(judged(), raised_early).facts["failed"] == [
        because(ReasonKind.LOST_EXITED, worker="h:1#1", exit="exit code 1")
    ]


def restarted(talk: MembershipConversation, incarnation: int) -> None:
    """Let the others resume, and the next worker of slot 1 join them."""
    name = f"h:1#{incarnation}"
    talk.ready("h:0", "h:2", commit=(talk.m.generation, 4))
    talk.resume()
    while name not in map(str, talk.m.roster):
        talk.wait(1)
    talk.join(name)
    talk.wait(1)
    talk.stop_all()
    talk.resume()
    assert len(talk.members) == 3


@pytest.mark.parametrize(
    ("first", "second", "failed"), [(7, 7, True), (7, 8, False), (-9, 7, False)]
)
def test_unexplained_exit_code_is_a_script_failure_once_repeated_in_its_slot(first, second, failed):
    assert "failed" not in without(judged(), exited("h:1", first)).facts
    talk = judged()
    talk.tell(exited("h:1", first))
    restarted(talk, 2)
    talk.tell(exited("h:1#2", second))
    talk.ready("h:0", "h:2", commit=(talk.m.generation, 4))
    assert ("failed" in ended(talk).facts) is failed


@pytest.mark.parametrize("cause", [ExitCause.LOST_DRIVER, ExitCause.LOST_PEER])
def test_worker_that_lost_its_driver_or_a_peer_is_no_script_failure(cause):
    talk = judged(strict=True)
    talk.tell(exited("h:1", 1, cause=cause))
    restarted(talk, 2)
    talk.tell(exited("h:1#2", 1, cause=cause))
    talk.ready("h:0", "h:2", commit=(talk.m.generation, 4))
    assert "failed" not in ended(talk).facts


def test_killed_or_finished_worker_is_no_script_failure():
    for events in (
        [exited("h:1", -9)],
        [WorkerQuit(worker("h:1"), 2, 0, "sys.exit(0)"), exited("h:1", 0)],
        [raised("h:1", 2, (2, 4), hardware=True), exited("h:1", 1)],
    ):
        assert "failed" not in without(judged(), *events).facts


def test_worker_that_hangs_after_its_exception_still_raised():
    talk = judged()
    talk.tell(raised("h:1", 2, (2, 4)))
    talk.ready("h:0", "h:2", commit=(2, 4))
    assert has(KillWorker, talk.wait(31))
    talk.tell(exited("h:1", -9))
    assert "failed" in ended(talk).facts


def test_replaced_worker_is_not_missing():
    talk = judged()
    talk.tell(raised("h:1", 2, (2, 4)), exited("h:1", 1))
    talk.ready("h:0", "h:2", commit=(2, 4))
    talk.resume()
    talk.wait(1)
    talk.join("h:1#2")
    talk.wait(1)
    talk.stop_all()
    assert len(talk.members) == 3
    assert "failed" not in ended(talk).facts


def test_job_with_an_older_journal_ends_as_before():
    found = without(running(3, workers_min=1), raised("h:1", 2, (2, 4)), exited("h:1", 1))
    assert found == because(ReasonKind.ALL_RETURNED, members=2, generation=3)


def test_sys_exit_call_is_reported_to_the_remaining_members():
    actions = judged().tell(WorkerQuit(worker("h:1"), 2, 3, "sys.exit(3)"))
    assert the(BreakWorld, actions).reason == because(
        ReasonKind.LOST_QUIT, worker="h:1#1", call="sys.exit(3)"
    )
