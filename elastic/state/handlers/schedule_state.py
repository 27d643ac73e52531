"""Handler of learning rate schedulers.

The handler checks that a schedule's functions of the step are equal on this worker and on the sender of the state.
``LambdaLR.state_dict()`` does not contain the functions. A joining worker creates its own, possibly from a number of
steps that was computed for another world size. Without this check, ranks with different learning rates would diverge
silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from elastic.errors import StateMismatch
from elastic.state.handlers.part import DictPart

# values of each function at STEPS, or None for a function that raises
Factors = dict[str, list[float | None]]

# Steps at which functions are compared. Dense enough, up to 8 million steps, to detect any decay that lasts a tenth of
# all steps.
STEPS = sorted({0, *(round(2 ** (eighth / 8)) for eighth in range(184))})
# relative tolerance; the math libraries of two hosts may differ in the last bits
TOLERANCE = 1e-9


class ScheduleDifference(NamedTuple):
    """First step at which a function has different values on this worker and on the sender of the state."""

    function: str
    step: int
    theirs: float | None
    ours: float | None


class SentSchedule(NamedTuple):
    """Values of a schedule's functions, as sent with the state."""

    state: dict[str, Any]
    factors: Factors


def factors(schedule: Any) -> Factors:
    """Return the values of all functions of the step in ``schedule`` and the schedules nested in it."""
    return {name: [_value(call, step) for step in STEPS] for name, call in _functions(schedule)}


def difference(
    theirs: Mapping[str, list[float | None]], ours: Factors
) -> ScheduleDifference | None:
    """Return the first difference between the sender's and this worker's values, or None."""
    for name, values in ours.items():
        for step, there, here in zip(STEPS, theirs.get(name, values), values, strict=True):
            if not _same(there, here):
                return ScheduleDifference(name, step, there, here)
    return None


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (
        math.isnan(one) and math.isnan(other)
    )


def _functions(schedule: Any, within: str = "") -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Yield the functions of ``LambdaLR``, ``MultiplicativeLR`` and ``CyclicLR`` schedules.

    This includes schedules nested in ``SequentialLR`` and ``ChainedScheduler``.
    """
    lambdas = getattr(schedule, "lr_lambdas", None)
    for number, each in enumerate(lambdas if isinstance(lambdas, list) else ()):
        if callable(each):
            yield f"{within}lr_lambdas[{number}]", each
    scale = getattr(schedule, "_scale_fn_custom", None)
    if callable(scale):
        yield f"{within}scale_fn", scale
    inner = getattr(schedule, "_schedulers", None)
    for number, each in enumerate(inner if isinstance(inner, list | tuple) else ()):
        yield from _functions(each, f"{within}schedulers[{number}].")


def _value(call: Callable[[int], Any], step: int) -> float | None:
    try:
        return float(call(step))
    except Exception:  # any exception of the script's function, such as an index out of range
        return None


class SchedulePart(DictPart):
    """Handler of a torch LR scheduler. Transfers contain the values of the sender's functions; commits do not."""

    value: torch.optim.lr_scheduler.LRScheduler

    def _adopt_value(self) -> None:
        self._received: Factors | None = None

    def live(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return super().pack()

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return SentSchedule(self.value.state_dict(), factors(self.value)), {}

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        if isinstance(structure, SentSchedule):
            structure, self._received = structure
        super().place(structure, fresh, own, restoring=restoring)

    def check_received(self) -> None:
        received, self._received = self._received, None
        if received is None:
            return
        differs = difference(received, factors(self.value))
        if differs is not None:
            raise StateMismatch(
                f"{self.what}: {differs.function} of {type(self.value).__name__} returns {_shown(differs.ours)}"
                f" at step {differs.step} on this worker and {_shown(differs.theirs)} on the worker that sent the"
                " state, so learning rates would differ. Compute the schedule from numbers that are the same in every"
                " world, not from size() or the length of a loader (with Lightning, pass max_steps to Trainer)."
                " Alternatively, create the schedule from a number in the state, in the function under"
                " elastic.run"
            )


def _shown(value: float | None) -> str:
    return "an error" if value is None else f"{value:g}"
