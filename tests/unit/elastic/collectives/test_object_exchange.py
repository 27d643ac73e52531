"""Objects between ranks, short ones and long ones, over a group of threads, and through a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from elastic.collectives import object_exchange, store_group
from elastic.collectives.interface import Op
from elastic.collectives.store_group import DistantGroup, Wait


class Done:
    def wait(self) -> None:
        pass


class ThreadsGroup:
    """Ranks that are threads."""

    def __init__(
        self, rank: int, size: int, shared: dict[str, Any], met: threading.Barrier
    ) -> None:
        self.rank, self.size = rank, size
        self._shared, self._met = shared, met

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._shared[str(self.rank)] = tensor.clone()
        self._met.wait(10)
        found = [self._shared[str(rank)] for rank in range(self.size)]
        self._met.wait(10)
        return found

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Done:
        for output, part in zip(outputs, self._exchange(tensor), strict=True):
            output.copy_(part)
        return Done()

    def start(self, blob: bytes) -> Wait:
        padded = torch.zeros(store_group.LIMIT + 9, dtype=torch.uint8)
        padded[:8].view(torch.int64)[0] = len(blob)
        padded[8 : 8 + len(blob)] = torch.tensor(list(blob), dtype=torch.uint8)
        parts = [bytes(each.numpy()) for each in self._exchange(padded)]
        return lambda: [each[8 : 8 + int.from_bytes(each[:8], "little")] for each in parts]

    def allreduce(self, tensor: torch.Tensor, op: Op) -> Done:
        tensor.copy_(torch.stack(self._exchange(tensor)).amax(0))
        return Done()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
        parts = self._exchange(tensor)
        if self.rank != root:
            tensor.copy_(parts[root])
        return Done()


@pytest.mark.parametrize("lengths", [(0, 3, 10), (0, 8000, 9000), (20_000, 1, 8150)])
def test_every_rank_gets_the_objects_of_all_ranks_and_of_the_root(lengths):
    values = [["x" * length, rank] for rank, length in enumerate(lengths)]
    shared: dict[str, Any] = {}
    met = threading.Barrier(3)

    def rank(number: int) -> tuple[list[Any], Any]:
        group: Any = ThreadsGroup(number, 3, shared, met)
        return object_exchange.gather(group, values[number]), object_exchange.broadcast(
            group, values[number], 1
        )

    with ThreadPoolExecutor(3) as pool:
        for gathered, of_root in pool.map(rank, range(3)):
            assert gathered == values
            assert of_root == values[1]


def on_ranks(run: Callable[[int, ThreadsGroup], Any]) -> list[Any]:
    shared: dict[str, Any] = {}
    met = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        return [*pool.map(lambda rank: run(rank, ThreadsGroup(rank, 3, shared, met)), range(3))]


def never(*_: object) -> Any:
    raise AssertionError("the ranks need no connection")


def test_distant_ranks_exchange_short_values_without_being_connected():
    def run(rank: int, threads: ThreadsGroup) -> Any:
        group = DistantGroup(rank, 3, threads.start, never)
        received = object_exchange.broadcast_bytes(group, b"from %d" % rank, 1)
        flags = object_exchange.any_of(group, [rank == 2, False, True])
        return received, flags

    assert on_ranks(run) == [(b"from 1", [True, False, True])] * 3


@pytest.mark.parametrize("more", [0, 1])
def test_distant_ranks_are_connected_for_a_long_value(more):
    value = b"x" * (store_group.LIMIT + more)
    formed = []

    def run(rank: int, threads: ThreadsGroup) -> Any:
        def form() -> Any:
            formed.append(rank)
            return threads

        group = DistantGroup(rank, 3, threads.start, form)
        return object_exchange.broadcast_bytes(group, value if rank == 1 else b"", 1)

    assert on_ranks(run) == [value] * 3
    assert sorted(formed) == [0, 1, 2] * more


@pytest.mark.parametrize("distant", [False, True])
def test_flag_of_any_rank_is_set_on_all_ranks(distant):
    def run(rank: int, threads: ThreadsGroup) -> Any:
        group: Any = DistantGroup(rank, 3, threads.start, never) if distant else threads
        return object_exchange.any_of(group, [rank == 0, rank > 3])

    assert on_ranks(run) == [[True, False]] * 3


@pytest.mark.parametrize("count", [0, 1, 8, 9])
def test_flags_of_distant_ranks_are_sent_as_bits(count):
    sizes = []

    def run(rank: int, threads: ThreadsGroup) -> Any:
        def start(blob: bytes) -> Wait:
            sizes.append(len(blob))
            return threads.start(blob)

        flags = [number % 3 == rank for number in range(count)]
        return object_exchange.any_of(DistantGroup(rank, 3, start, never), flags)

    assert on_ranks(run) == [[True] * count] * 3
    assert max(sizes) <= count // 8 + 1


def test_distant_ranks_are_connected_for_many_flags():
    count = store_group.LIMIT * 8 // 3 + 8
    formed = []

    def run(rank: int, threads: ThreadsGroup) -> Any:
        def form() -> Any:
            formed.append(rank)
            return threads

        flags = [False] * count
        flags[rank] = True
        return object_exchange.any_of(DistantGroup(rank, 3, never, form), flags)

    assert on_ranks(run) == [[True] * 3 + [False] * (count - 3)] * 3
    assert sorted(formed) == [0, 1, 2]
