"""Comparison of the tensor digests at the commits of two runs. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.driver.events import Event, WorkerDigested
from elastic.protocol.messages import Worker

SHOWN = 5  # maximum number of tensor names to show


@dataclass(frozen=True)
class HeldCommit:
    """Digests of a worker's state at a commit. ``step`` is the next step to train.

    Args:
        gradients: digests of the gradients of the previous step, by shard and parameter.
    """

    step: int
    worker: Worker
    generation: int
    tensors: dict[str, int]
    gradients: dict[tuple[int, str], int]


@dataclass(frozen=True)
class OddGradient:
    """First gradient of a step that differs from the fault-free run, and the worker that computed it."""

    shard: int
    parameter: str
    worker: Worker
    others: int  # number of other gradients of this step that differ
    all: bool = False  # whether all compared gradients differ


@dataclass(frozen=True)
class DigestDifference:
    """First difference between two runs: the digests of ``tensors`` of ``worker`` differ after ``step``."""

    since: int  # first step after the last equal commit
    step: int
    worker: Worker
    generation: int
    tensors: tuple[str, ...]
    workers: int  # number of workers that differ after this step
    gradient: OddGradient | None = None
    compared: int = 0  # number of compared gradients, each of one shard

    def sentence(self) -> str:
        shown = ", ".join(self.tensors[:SHOWN])
        more = len(self.tensors) - SHOWN
        others = f", and of {self.workers - 1} more" if self.workers > 1 else ""
        steps = f"step {self.step}"
        if self.since < self.step:
            steps = f"one of the steps {self.since} to {self.step}"
        return (
            f"{steps} differs: {shown}{f' and {more} more' if more > 0 else ''} of worker {self.worker}{others}, in"
            f" generation {self.generation}{self._cause()}"
        )

    def _cause(self) -> str:
        cause, odd = "", self.gradient
        if self.since < self.step:
            cause = "; commit after every step to identify the step"
        elif odd is not None:
            more = f", and {odd.others} more" if odd.others else ""
            cause = (
                f". The first difference is in shard {odd.shard}: worker {odd.worker} computed another gradient of"
                f" {odd.parameter}{more}"
            )
        elif self.compared:
            cause = (
                f". The {self.compared} gradients of single shards are equal: their sum, a buffer or the optimizer"
                " step differs"
            )
        if self.since == 0 and odd is not None and odd.all:
            cause += (
                f". All gradients of step {self.step} differ, which suggests different initial weights: call"
                " torch.manual_seed() before creating the model"
            )
        return cause


def held(events: Iterable[Event]) -> list[HeldCommit]:
    """Return the digests of all commits of all workers, in the order in which they were reported."""
    return [
        HeldCommit(
            event.step, event.worker, event.generation, event.tensors, _by_shard(event.gradients)
        )
        for event in events
        if isinstance(event, WorkerDigested) and event.step > 0 and event.tensors
    ]


def in_both(undisturbed: list[HeldCommit], other: list[HeldCommit]) -> list[HeldCommit]:
    """Return the commits in ``other`` at steps at which the fault-free run also has a commit."""
    steps = {each.step for each in undisturbed}
    return [each for each in other if each.step in steps]


def difference(undisturbed: list[HeldCommit], other: list[HeldCommit]) -> DigestDifference | None:
    """Find the first difference, over all workers, between the fault-free run and the other run.

    Repeated steps are compared as well. Return None if all steps that occur in both runs are equal.
    """
    wanted: dict[int, dict[str, int]] = {}
    for each in undisturbed:
        wanted.setdefault(each.step, each.tensors)
    found = [
        (each, odd)
        for each in in_both(undisturbed, other)
        if (odd := _odd(each.tensors, wanted[each.step]))
    ]
    if not found:
        return None
    step = min(each.step for each, _ in found)
    first = [(each, odd) for each, odd in found if each.step == step]
    each, odd = first[0]
    workers = len({one.worker for one, _ in first})
    gradient, compared = _odd_gradient(
        [one for one in undisturbed if one.step == step], [one for one in other if one.step == step]
    )
    since = max((one.step for one in in_both(undisturbed, other) if one.step < step), default=0)
    return DigestDifference(
        since, step - 1, each.worker, each.generation, odd, workers, gradient, compared
    )


def _odd_gradient(
    undisturbed: list[HeldCommit], other: list[HeldCommit]
) -> tuple[OddGradient | None, int]:
    wanted: dict[tuple[int, str], int] = {}
    for each in reversed(undisturbed):
        wanted |= each.gradients
    made = [
        (key, each.worker, value)
        for each in other
        for key, value in each.gradients.items()
        if key in wanted
    ]
    odd = [(key, worker) for key, worker, value in made if value != wanted[key]]
    if not odd:
        return None, len(made)
    (shard, parameter), worker = min(odd, key=lambda each: each[0][0])
    differ, keys = {key for key, _ in odd}, {key for key, _, _ in made}
    return OddGradient(shard, parameter, worker, len(differ) - 1, differ == keys), len(made)


def _by_shard(gradients: dict[str, int]) -> dict[tuple[int, str], int]:
    found = {}
    for key, value in gradients.items():
        shard, _, parameter = key.partition(" ")
        found[int(shard), parameter] = value
    return found


def _odd(own: dict[str, int], wanted: dict[str, int]) -> tuple[str, ...]:
    return tuple(name for name in {**wanted, **own} if own.get(name) != wanted.get(name))
