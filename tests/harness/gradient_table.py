"""Gradients of each collective, as in Horovod 0.28 (RegisterGradient in horovod/tensorflow/mpi_ops.py, the
autograd functions of horovod/torch/mpi_ops.py): one table, for the tests of all doors. Pure: numpy and numbers.

    allreduce       the same reduction of the gradients, with its factors (also of Min, Max and Product)
    allgather       this rank's rows of the averaged gradients
    broadcast       the averaged gradients on the root, zeros elsewhere
    alltoall        each row's gradient goes back to the rank that sent it; rows that were not sent have zeros
    reducescatter   all ranks' gradients, one after the other, with its factors; times the number of ranks for Sum

A rank is its place among the ``size`` members of a process set here. Its gradient of a result is `Case.upstream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDTH = 2
_FOLDS: dict[str, Any] = {
    "Average": np.mean,
    "Sum": np.sum,
    "Min": np.min,
    "Max": np.max,
    "Product": np.prod,
}


@dataclass(frozen=True)
class Case:
    """One collective with its options; ``grouped``: of two tensors, whose second result has twice the gradient."""

    kind: str
    op: str = ""
    factors: tuple[float, float] = (1.0, 1.0)
    grouped: bool = False
    unsent: int = 0  # unsent rows of an alltoall

    @property
    def name(self) -> str:
        words = [self.kind, self.op, "factors" * (self.factors != (1.0, 1.0))]
        return " ".join(
            filter(None, ["grouped" * self.grouped, *words, "unsent" * (self.unsent > 0)])
        )

    @property
    def count(self) -> int:
        return 2 if self.grouped else 1

    def rows(self, place: int, size: int) -> int:
        """Return this rank's tensors."""
        match self.kind:
            case "allgather":
                return place + 1
            case "alltoall":
                return sum(self.splits(place, size)) + self.unsent
            case "reducescatter":
                return 2 * size
        return 3

    def splits(self, place: int, size: int) -> list[int]:
        return [place + to + 1 for to in range(size)]

    def upstream(self, place: int, size: int) -> np.ndarray[Any, Any]:
        """Return the gradient of this rank's (first) result."""
        match self.kind:
            case "allgather":
                rows = size * (size + 1) // 2
            case "alltoall":
                rows = sum(self.splits(source, size)[place] for source in range(size))
            case "reducescatter":
                rows = 2
            case _:
                rows = 3
        return (np.arange(rows * WIDTH).reshape(rows, WIDTH) + 1.0) * (place + 1)

    def wanted(self, place: int, size: int) -> np.ndarray[Any, Any]:
        """Return the gradient of this rank's (first) tensor."""
        every = [self.upstream(each, size) for each in range(size)]
        scale = self.factors[0] * self.factors[1]
        match self.kind:
            case "allreduce":
                return np.asarray(_FOLDS[self.op](every, axis=0)) * scale
            case "allgather":
                begin = place * (place + 1) // 2
                return np.asarray(np.mean(every, axis=0))[begin : begin + place + 1]
            case "broadcast":
                mean = np.asarray(np.mean(every, axis=0))
                return mean if place == size - 1 else np.zeros_like(mean)
            case "alltoall":
                parts = []
                for to, rows in enumerate(self.splits(place, size)):
                    begin = sum(self.splits(source, size)[to] for source in range(place))
                    parts.append(every[to][begin : begin + rows])
                return np.concatenate([*parts, np.zeros((self.unsent, WIDTH))])
            case _:
                return np.concatenate(every) * scale * (size if self.op == "Sum" else 1)

    def call(self, hvd: Any, tensors: Sequence[Any], members: Sequence[int], among: Any) -> Any:
        """Return the results of an API's function; ``among``: the process set of these members."""
        size, place = len(members), members.index(hvd.rank())
        options: dict[str, Any] = {"process_set": among}
        if self.op:
            options["op"] = getattr(hvd, self.op)
        if self.factors != (1.0, 1.0):
            options["prescale_factor"], options["postscale_factor"] = self.factors
        if self.grouped:
            return list(getattr(hvd, f"grouped_{self.kind}")(list(tensors), **options))
        if self.kind == "broadcast":
            options["root_rank"] = members[-1]
        if self.kind == "alltoall":
            splits = np.array(self.splits(place, size), np.int32)
            return [hvd.alltoall(tensors[0], hvd_splits(hvd, splits), **options)[0]]
        return [getattr(hvd, self.kind)(tensors[0], **options)]


def hvd_splits(hvd: Any, splits: np.ndarray[Any, Any]) -> Any:
    """Convert to the API's types."""
    if hvd.__name__.endswith("torch"):
        import torch

        return torch.from_numpy(splits)
    return splits


SCALED = (0.5, 4.0)
CASES = [
    *(Case("allreduce", op) for op in _FOLDS),
    Case("allreduce", "Average", SCALED),
    Case("allreduce", "Sum", SCALED),
    Case("allreduce", "Average", grouped=True),
    Case("allreduce", "Sum", SCALED, grouped=True),
    Case("allgather"),
    Case("allgather", grouped=True),
    Case("broadcast"),
    Case("alltoall"),
    Case("alltoall", unsent=2),
    Case("reducescatter", "Average"),
    Case("reducescatter", "Sum"),
    Case("reducescatter", "Average", SCALED),
    Case("reducescatter", "Sum", SCALED),
    Case("reducescatter", "Average", grouped=True),
    Case("reducescatter", "Sum", grouped=True),
]
MOVING = [case for case in CASES if case.kind in ("allgather", "broadcast", "alltoall")]


def sets(size: int) -> list[list[int]]:
    """Members of process sets besides the world: with the first rank and without it."""
    return [[0, size - 1], list(range(1, size))] if size > 2 else [[size - 1]]
