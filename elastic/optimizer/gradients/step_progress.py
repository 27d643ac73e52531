"""Progress of a step: counts of computed gradients, and detection of the step's last backward pass.

Pure: no I/O, no clock.

A step begins with its first gradient, or in `finish` if it has none::

    IDLE -> RECEIVING -> COMPLETING -> REDUCED -> IDLE      the last backward pass was recognized
            RECEIVING -> LATE -> IDLE                       ranks disagree on the last pass; finish() reduces
            RECEIVING -> IDLE                               no pass was the last on this rank; finish() reduces

A pass is the last of a step if no gradient is missing after it. If gradients are missing, either parameters are unused
or another loss follows. In this case, the pass is the last if other steps ended with the same number of passes. A pass
after which a parameter has some but not all of its gradients is never the last.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol


class StepPhase(enum.Enum):
    """Phase of the current step on this rank."""

    IDLE = enum.auto()  # No gradient has been computed yet, and no reduction is in flight.
    # Gradients are being computed, and full buckets of an agreed plan are launched.
    RECEIVING = enum.auto()
    COMPLETING = enum.auto()  # The last pass has ended, and all buckets have been launched.
    # Some rank did not recognize the last pass, so no collective is launched before finish().
    LATE = enum.auto()
    REDUCED = enum.auto()  # all gradients are reduced, and step() has not been called yet


class PlanState(enum.Enum):
    """Comparison state of this rank's plan in the current generation."""

    AGREED = enum.auto()  # The plan was compared in this generation, so buckets can be launched.
    UNCOMPARED = enum.auto()
    # This rank's parameters have changed, but the other ranks still use the previous plan.
    CHANGED = enum.auto()


class PassEnd(enum.Enum):
    """Action of a reducer at the end of a backward pass."""

    NOTHING = enum.auto()  # Do nothing: another pass follows, or finish() reduces the gradients.
    LAUNCH = enum.auto()  # Launch the remaining buckets, because this was the last pass.
    COMPARE_LAST = enum.auto()  # Compare plans, because this was the last pass on this rank.
    # Compare plans, because ranks that have all their gradients wait for the comparison.
    COMPARE = enum.auto()
    # Agree on a new plan, then launch its buckets, because this was the last pass.
    REPLACE_PLAN = enum.auto()


class CountedSlot(Protocol):
    """Gradient count of one parameter in a step."""

    passes_left: int


class StepProgress:
    """Progress of one optimizer through its steps.

    Attributes:
        phase: phase of the current step.
        complete: number of slots with all of their gradients. 0 in IDLE.
        partial: number of slots with some but not all of their gradients. 0 in IDLE.
        ended: number of backward passes that produced gradients in this step. 0 in IDLE.
        usual: number of such passes in other steps, or 0 if unknown. Equal on all ranks, because all of them reset it
            when they compare plans and then count the same steps.
    """

    __slots__ = ("complete", "ended", "partial", "phase", "usual")

    def __init__(self) -> None:
        self.usual = 0
        self.clear()

    def clear(self) -> None:
        """Return to IDLE, at the end of a step or to abandon it."""
        self.phase = StepPhase.IDLE
        self.complete = self.partial = self.ended = 0

    def begin(self) -> None:
        """Enter RECEIVING at the start of a step."""
        self.phase = StepPhase.RECEIVING

    def count(self, slot: CountedSlot, passes: int) -> bool:
        """Count one gradient of an incomplete slot. Return whether the slot now has all ``passes`` gradients."""
        self.partial += slot.passes_left == passes
        slot.passes_left -= 1
        if slot.passes_left:
            return False
        self.partial -= 1
        self.complete += 1
        return True

    def pass_ended(
        self, plan: PlanState, *, inner: bool, complete: bool, only_finish: bool
    ) -> PassEnd:
        """Count a backward pass that produced gradients, and decide whether it was the last of the step.

        Args:
            plan: state of this rank's plan.
            inner: whether the pass ran within another backward pass. If so, only the outer pass is counted, unless this
                one completes the step.
            complete: whether every parameter that is trained on this rank has all of its gradients.
            only_finish: whether ranks run the passes of several optimizers in different orders, so that no pass is
                the last.
        """
        if self.phase in (StepPhase.IDLE, StepPhase.REDUCED):
            return PassEnd.NOTHING
        if plan is PlanState.CHANGED:
            self.ended += not inner
            return self._as_last(PassEnd.REPLACE_PLAN, not inner and self._usual_reached)
        if inner and not complete:
            return PassEnd.NOTHING
        self.ended += 1
        if self.partial or self.phase is StepPhase.LATE or only_finish:
            return PassEnd.NOTHING
        last = complete or self._usual_reached
        if plan is PlanState.UNCOMPARED:
            return PassEnd.COMPARE_LAST if last else PassEnd.COMPARE
        return self._as_last(PassEnd.LAUNCH, last)

    def compared(self, last: bool) -> None:
        """Record the result of a plan comparison at the end of a pass.

        Args:
            last: whether all ranks were at the end of the step's last pass.
        """
        self.phase = StepPhase.COMPLETING if last else StepPhase.LATE

    def reduced(self) -> None:
        """Record that all gradients were reduced. `step()` has yet to be called."""
        self.phase = StepPhase.REDUCED

    def learn(self) -> None:
        """Set the number of passes expected in later steps to the maximum so far, including this step."""
        self.usual = max(self.usual, self.ended)

    def _as_last(self, end: PassEnd, last: bool) -> PassEnd:
        if not last:
            return PassEnd.NOTHING
        self.phase = StepPhase.COMPLETING
        return end

    @property
    def _usual_reached(self) -> bool:
        return 0 < self.usual <= self.ended


def end_counts(slots: Iterable[CountedSlot]) -> None:
    """Mark all slots as complete, so that further gradients are not counted in this step."""
    for slot in slots:
        slot.passes_left = 0
