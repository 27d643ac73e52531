"""The first differing step and tensor of two runs."""

from __future__ import annotations

from msgspec.structs import replace

from elastic.chaos.exact.digests import DigestDifference, OddGradient, difference, held
from elastic.driver.events import Event, TimePassed, WorkerDigested
from elastic.protocol.messages import Commit, Worker
from harness.golden import recorded

FIRST, SECOND = Worker("h", 0, 1), Worker("h", 1, 1)


def told(step: int, worker: Worker = FIRST, generation: int = 1, **tensors: int) -> WorkerDigested:
    commit = Commit(generation, step)
    return WorkerDigested(worker, generation, commit, 9, step=step, tensors=tensors)


def compared(undisturbed: list[Event], other: list[Event]) -> DigestDifference | None:
    return difference(held(undisturbed), held(other))


def test_equal_runs_may_repeat_steps_and_be_shorter():
    whole: list[Event] = [TimePassed(), told(1, a=1), told(2, a=2), told(3, a=3)]
    assert compared(whole, [told(1, a=1), told(2, a=2), told(2, SECOND, 2, a=2)]) is None
    assert compared(whole, []) is None


def test_first_difference_is_the_one_of_the_earliest_step():
    undisturbed: list[Event] = [told(1, a=1, b=1), told(2, a=2, b=2), told(3, a=3, b=3)]
    other: list[Event] = [
        told(1, a=1, b=1),
        told(3, a=0, b=0),
        told(2, SECOND, 2, a=2, b=7),
        told(2, FIRST, 2, a=2, b=7),
    ]
    found = compared(undisturbed, other)
    assert found == DigestDifference(1, 1, SECOND, 2, ("b",), 2)
    recorded("messages", found.sentence())


def test_tensor_missing_in_one_run_differs():
    found = compared([told(1, a=1, b=2)], [told(1, a=1)])
    assert found is not None
    assert found.tensors == ("b",)


def with_gradients(worker: Worker, odd: int, **gradients: int) -> WorkerDigested:
    """Digests after step 1. ``s3_a``: of shard 3 and the parameter a."""
    named = {key.removeprefix("s").replace("_", " "): value for key, value in gradients.items()}
    commit = Commit(1, 2)
    return WorkerDigested(worker, 1, commit, 9, step=2, tensors={"model.a": odd}, gradients=named)


def test_the_first_differing_shard_and_its_worker_are_named():
    gradients = with_gradients(FIRST, 1, s0_b=1, s0_a=2, s10_b=3, s10_a=4)
    undisturbed: list[Event] = [told(1, a=1), gradients]
    other: list[Event] = [
        told(1, a=1),
        with_gradients(SECOND, 5, s10_b=9, s10_a=9),
        with_gradients(FIRST, 5, s0_b=1, s0_a=7),
    ]
    found = compared(undisturbed, other)
    assert found is not None
    assert found.gradient == OddGradient(0, "a", FIRST, 2)
    recorded("messages", found.sentence())


def test_difference_with_equal_shards_is_attributed_to_their_sum():
    undisturbed: list[Event] = [told(1, a=1), with_gradients(FIRST, 1, s0_a=2, s1_a=4)]
    other: list[Event] = [
        told(1, a=1),
        with_gradients(SECOND, 5, s1_a=4),
        with_gradients(FIRST, 5, s0_a=2),
    ]
    found = compared(undisturbed, other)
    assert found is not None and found.gradient is None
    recorded("messages", found.sentence())


def test_no_worker_is_blamed_when_steps_are_missing_between_commits():
    """The values of the last one follow from a possibly corrupt earlier one."""
    undisturbed: list[Event] = [told(4, a=1), replace(with_gradients(FIRST, 1, s0_a=2), step=8)]
    other: list[Event] = [told(4, a=1), replace(with_gradients(FIRST, 5, s0_a=3), step=8)]
    found = compared(undisturbed, other)
    assert found is not None
    recorded("messages", found.sentence())


def test_runs_that_begin_with_other_weights_are_reported():
    undisturbed: list[Event] = [replace(with_gradients(FIRST, 1, s0_a=2, s1_a=4), step=1)]
    other: list[Event] = [replace(with_gradients(FIRST, 5, s0_a=3, s1_a=5), step=1)]
    found = compared(undisturbed, other)
    assert found is not None
    recorded("messages", found.sentence())


def test_many_tensors_are_counted():
    found = compared(
        [told(1, t0=1, t1=1, t2=1, t3=1, t4=1, t5=1, t6=1, t7=1)],
        [told(1, t0=2, t1=2, t2=2, t3=2, t4=2, t5=2, t6=2, t7=2)],
    )
    assert found is not None
    recorded("messages", found.sentence())


def test_initial_commits_and_reports_without_tensors_are_omitted():
    assert held([told(0, a=1), told(-1, a=1), told(4)]) == []
