"""Learning-rate schedules for training whose number of steps changes with the world. Pure, except for the warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from elastic.errors import StaleValueWarning

# learning-rate factor as a function of the position in a schedule
Factor = Callable[[float], float]


class ScaledSchedule:
    """Function for ``LambdaLR`` that adapts to the number of steps in the current world without a discontinuity.

    The factor is a function of the completed fraction of training. ``make(steps)`` creates the factor for a number of
    steps. ``steps`` is that number in the first world. Every attribute except these two is a number and part of
    ``LambdaLR.state_dict()``. A joining worker, whose own first world had another number of steps, therefore has the
    same factor as all other workers once it has loaded that dict.
    """

    __slots__ = ("__dict__", "_made", "_make")

    def __init__(self, make: Callable[[int], Factor], steps: int) -> None:
        self._make = make
        self._made: tuple[int, Factor] | None = None
        self.steps = steps
        # Step `since` corresponds to `position`, in steps of the first world. Each later step advances the position by
        # `rate`.
        self.since, self.position, self.rate = 0, 0.0, 1.0

    def __call__(self, step: int) -> float:
        if self._made is None or self._made[0] != self.steps:
            self._made = self.steps, self._make(self.steps)
        return self._made[1](self.at(step))

    def at(self, step: int) -> float:
        """Return the position of a step, counted in the steps of the first world.

        The position is an int if the world has not changed.
        """
        if self.rate == 1.0 and self.position == self.since:
            return step
        return min(self.position + (step - self.since) * self.rate, self.steps)

    def resume(self, step: int, share: float) -> None:
        """Set the position of ``step`` to a fraction of training, from 0 to 1.

        This method is called if a checkpoint does not contain the position.
        """
        position = share * self.steps
        if self.at(step) == step and abs(position - step) > 1:
            self.since, self.position = step, position

    def follow(self, step: int, left: int) -> None:
        """Rescale the remaining schedule, so that it ends after ``left`` more steps."""
        position = self.at(step)
        planned = (self.steps - position) / self.rate if self.rate else 0
        if left <= 0 or abs(planned - left) < 0.5:
            return
        self.since, self.position = step, float(position)
        self.rate = max(0.0, self.steps - position) / left


class ScheduleLengthChange:
    """Detector of changes of the number of steps, to which a script's schedule does not adapt.

    `warn` warns once. The numbers are part of a state.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.warned = False

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "warned": self.warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, unless no number of steps was recorded when it was saved."""
        if state["first"] is not None:
            self.first, self.warned = state["first"], state["warned"]

    def see(self, steps: int) -> bool:
        """Record a number of steps. Return whether it differs from the first one and no warning was issued yet."""
        if self.first is None:
            self.first = steps
        if self.warned or steps == self.first:
            return False
        self.warned = True
        return True


def counts_steps(scheduler: Any) -> bool:
    """Return whether the learning rate of a schedule may depend on a number of steps."""
    return scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau)


def warn(scheduler: Any, first: int, now: int, what: str, remedy: str) -> None:
    """Warn that ``scheduler`` does not adapt to the number of ``what``, such as steps or batches of an epoch."""
    warnings.warn(
        f"the number of {what} changed with the world: {first} at the start, {now} now. The script's schedule"
        f" {type(scheduler).__name__} keeps its original number of steps, so it may reach its final learning"
        f" rate too early or never. {remedy}",
        StaleValueWarning,
        # Lightning does not show the category of warnings that are issued from its folders.
        stacklevel=1,
    )
