"""Objects between ranks, short ones and long ones, over a group of threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from elastic.collectives import object_exchange


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

    def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
        parts = self._exchange(tensor)
        if self.rank != root:
            tensor.copy_(parts[root])
        return Done()


@pytest.mark.parametrize("lengths", [(0, 3, 10), (0, 8000, 9000), (20_000, 1, 8150)])
def test_every_rank_gets_the_objects_of_all_and_roots(lengths):
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
