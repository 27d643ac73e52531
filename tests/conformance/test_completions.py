"""Collectives whose callers get a callback instead of waiting: in whatever order they end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from conformance.worlds import everywhere, works
from elastic.collectives.interface import Op
from elastic.negotiation import submission
from elastic.negotiation.completion_callbacks import Completions

WAIT_S = 10.0


class Several:
    """Sums by name, and a callback for each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.completions = Completions()
        self.ended: dict[str, BaseException | None] = {}
        self.all_ended = threading.Event()
        self.device = (
            torch.get_default_device()
        )  # of this thread; `start` may be called in another one

    def start(self, name: str, count: int, then: Callable[[], None] = lambda: None) -> None:
        """``count``: number of started ones; when they have ended, `all_ended` is set."""
        handle = submission.start_allreduce(
            [torch.ones(2, device=self.device)], name, Op.SUM, soon=True
        )

        def finish() -> None:
            error: BaseException | None = None
            try:
                (result,) = submission.synchronize(handle)
                assert result.tolist() == [self.size] * 2
            except BaseException as raised:
                error = raised
            self.ended[name] = error
            then()
            if len(self.ended) == count:
                self.all_ended.set()

        self.completions.when_over(handle, finish)


@everywhere()
def test_late_collective_does_not_delay_the_completion_of_later_ones(rank, size):
    """The first one of each rank waits for a collective that the other ranks start when the second one has ended."""
    several = Several(size)
    first, last = ("a", "x") if rank == 0 else ("x", "a")
    several.start(first, 3)
    several.start("q", 3, lambda: several.start(last, 3))
    assert several.all_ended.wait(WAIT_S), several.ended
    assert set(several.ended.values()) == {None}
    works(size)


@everywhere()
def test_many_collectives_in_different_orders_complete_on_all_ranks(rank, size):
    several = Several(size)
    for number in range(50):
        several.start(f"many {(number * 7 + 13 * rank) % 50}", 50)
    assert several.all_ended.wait(WAIT_S), several.ended
    assert set(several.ended.values()) == {None}
    works(size)


@everywhere(3)
def test_each_handle_gets_its_own_error(rank, size):
    several = Several(size)
    handle = submission.start_allreduce([torch.ones(rank + 1)], "differs", Op.SUM, soon=True)
    raised: list[BaseException] = []
    over = threading.Event()

    def finish() -> None:
        try:
            submission.synchronize(handle)
        except BaseException as error:
            raised.append(error)
        over.set()

    several.completions.when_over(handle, finish)
    several.start("fits", 1)
    assert over.wait(WAIT_S) and several.all_ended.wait(WAIT_S)
    assert [type(each).__name__ for each in raised] == ["TensorMismatch"]
    assert several.ended == {"fits": None}
    works(size)
