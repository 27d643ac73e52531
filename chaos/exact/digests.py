"""What the commits of two runs held, tensor by tensor, and where they differ first. Pure: events in, a finding out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.driver.events import Event, WorkerDigested
from elastic.protocol.messages import Worker

SHOWN = 5  # tensors


@dataclass(frozen=True)
class HeldCommit:
    """What a worker held before ``step``, the first one that it has not trained."""

    step: int
    worker: Worker
    generation: int
    tensors: dict[str, int]


@dataclass(frozen=True)
class Difference:
    """The first one: after ``step`` these tensors of ``worker`` are not what they are in the undisturbed run."""

    step: int
    worker: Worker
    generation: int
    tensors: tuple[str, ...]
    workers: int  # that differ after this step

    def sentence(self) -> str:
        shown = ", ".join(self.tensors[:SHOWN])
        more = len(self.tensors) - SHOWN
        others = f", and of {self.workers - 1} more" if self.workers > 1 else ""
        return (
            f"step {self.step} made other bits: {shown}{f' and {more} more' if more > 0 else ''} of worker"
            f" {self.worker}{others}, in generation {self.generation}"
        )


def held(events: Iterable[Event]) -> list[HeldCommit]:
    """Of every commit of every worker, in the order in which they were told."""
    return [
        HeldCommit(event.step, event.worker, event.generation, event.tensors)
        for event in events
        if isinstance(event, WorkerDigested) and event.step > 0 and event.tensors
    ]


def difference(undisturbed: list[HeldCommit], other: list[HeldCommit]) -> Difference | None:
    """Between what the first run held after each step, and what all workers of another one did, each time that they
    did the step. None: they are equal, as far as both went.
    """
    wanted: dict[int, dict[str, int]] = {}
    for each in undisturbed:
        wanted.setdefault(each.step, each.tensors)
    found = [
        (each, odd)
        for each in other
        if each.step in wanted and (odd := _odd(each.tensors, wanted[each.step]))
    ]
    if not found:
        return None
    step = min(each.step for each, _ in found)
    first = [(each, odd) for each, odd in found if each.step == step]
    each, odd = first[0]
    workers = len({one.worker for one, _ in first})
    return Difference(step - 1, each.worker, each.generation, odd, workers)


def _odd(own: dict[str, int], wanted: dict[str, int]) -> tuple[str, ...]:
    """In the order of the state: a model's tensors, then what its optimizer keeps."""
    return tuple(name for name in {**wanted, **own} if own.get(name) != wanted.get(name))
