"""Agreement between ranks on the reduction plans of optimizers, and descriptions of plans for joined ranks.

Pure: no I/O, no clock.

The ranks of a generation agree on each plan once (see `elastic.optimizer.gradients.gradient_reducer`), in the same
order, so plans can be numbered. Each plan has its own group, so plans of two optimizers never wait for each other. When
an optimizer no longer exists on any rank, its number is reused, so a script that keeps creating optimizers needs only a
few groups.

A rank that has joined (`elastic.optimizer.join`) takes part in the other ranks' steps. The first buffer of each plan
therefore has an additional last element, the step flag, which states whether any rank takes a step. This module uses no
tensors and does not communicate.
"""

from __future__ import annotations

import enum
import hashlib
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from elastic.collectives.interface import Op
from elastic.errors import StateMismatch
from elastic.protocol.messages import GRADIENTS

# name of the group for all agreements of a generation except the first
CHANNEL = "gradients plans"
MAX_PLANS = 64  # maximum number of plans at a time; numbers of dropped plans are reused


# ---- the step flag ---------------------------------------------------------------------------------------------------


class StepFlag(enum.Enum):
    """Last element of a plan's first buffer, both as sent by a rank and as reduced over all ranks."""

    # As sent: this rank has no more data. As reduced: no rank has more data.
    JOINED = 0
    STEP = 1
    # This is the last step with this plan: a rank has changed its parameters, or no rank uses the plan any more.
    CHANGE = 2


# Values of the flags for each reduction. The reduced value is unambiguous with any number of joined ranks and in any
# floating dtype: a sum may lose precision, become infinite or be scaled, but keeps its sign.
_VALUES: dict[Op, dict[StepFlag, float]] = {
    Op.SUM: {StepFlag.JOINED: 0.0, StepFlag.STEP: 1.0, StepFlag.CHANGE: -math.inf},
    Op.MAX: {StepFlag.JOINED: 0.0, StepFlag.STEP: 1.0, StepFlag.CHANGE: 2.0},
    Op.MIN: {StepFlag.JOINED: 0.0, StepFlag.STEP: -1.0, StepFlag.CHANGE: -2.0},
    Op.PRODUCT: {StepFlag.JOINED: 1.0, StepFlag.STEP: 2.0, StepFlag.CHANGE: 0.0},
}


def mark_value(op: Op, mark: StepFlag) -> float:
    """Return the number by which a step flag is represented in a reduction.

    ``op`` is the reduction as sent, for example SUM for an average.
    """
    return _VALUES[op][mark]


def read_mark(op: Op, reduced: float) -> StepFlag:
    """Return the step flag that a reduced value represents. CHANGE takes precedence over STEP, and STEP over JOINED."""
    values = _VALUES[op]
    if reduced == values[StepFlag.JOINED]:
        return StepFlag.JOINED
    match op:
        case Op.SUM:
            changed = reduced < 0.0
        case Op.MAX | Op.MIN:
            changed = abs(reduced) > 1.5
        case _:
            # true for NaN as well, which results from zero times an overflowed product
            changed = not reduced > 1.0
    return StepFlag.CHANGE if changed else StepFlag.STEP


# ---- description of a plan -------------------------------------------------------------------------------------------


class BucketSpec(msgspec.Struct, frozen=True):
    """Description of a buffer that is reduced.

    ``dtype`` and ``device`` are torch's names, the device without an index.
    """

    elements: int
    dtype: str
    device: str


class Sparse(msgspec.Struct, frozen=True):
    """Description of a sparse gradient, whose entries are gathered instead of reduced.

    ``number`` is its index among all trainable parameters.
    """

    number: int
    shape: tuple[int, ...]
    dims: int
    dtype: str
    device: str


class StepPlan(msgspec.Struct, frozen=True):
    """Buffers and sparse gradients that a step reduces, in the order of the reductions.

    The last element of the first buffer is the step flag. ``op`` is the reduction as sent. A group that scales during
    the reduction multiplies its results by ``scale`` and divides them by ``divisor``. ``order`` is the order in which
    gradients become ready.

    Args:
        trained: for each parameter of the optimizer, whether it has a gradient on any rank.
    """

    digest: int
    trained: tuple[int, ...]
    op: int
    scale: float
    divisor: int
    order: tuple[int, ...]
    wires: tuple[BucketSpec, ...]
    sparse: tuple[Sparse, ...]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> StepPlan:
        return msgspec.json.decode(data, type=StepPlan)


# ---- comparison of plans: one vector of integers, reduced by MAX -----------------------------------------------------


class ComparisonPoint(enum.IntEnum):
    """Moment in a step at which a rank compares its plan with those of the other ranks."""

    LAST_PASS = 0  # at the end of the step's last backward pass
    # at the end of a backward pass that is not the last on this rank
    PASS = 1
    STEP = 2  # in step() or synchronize()


class PlanProposal(NamedTuple):
    """Proposal of a plan by a rank that has data. All ranks receive the minimum and the maximum of each field.

    Attributes:
        digest: digest of the plan. Must be equal on all ranks, as must the next three fields.
        parameters: number of all parameters, including frozen ones.
        replaces: number of the optimizer's previous plan in this generation, or -1.
        anew: 1 if the parameters have changed and the current step is therefore restarted, else 0.
        trains: digest of the set of parameters that require a gradient on this rank.
        sparse: number of sparse gradients.
        rank: rank of the sender.
        point: moment of the comparison.
        twin: index of the optimizer among those created with equal parameters.
        twins: number of such optimizers that still exist.
        order: digest of the order in which gradients become ready on this rank. See `order_digest`.
    """

    digest: int
    parameters: int
    replaces: int
    anew: int
    trains: int
    sparse: int
    rank: int
    point: int = ComparisonPoint.STEP
    twin: int = 0
    twins: int = 1
    order: int = 0

    @property
    def compared(self) -> tuple[int, int, int, int]:
        """Return the values that must be equal on all ranks, for the comparison."""
        return self.digest, self.parameters, self.replaces, self.anew


# lower than any value of a field; its negative is higher than any value
_NOTHING = -(1 << 62)
_FIELDS = len(PlanProposal._fields)
# number of elements of the vector that ranks reduce to compare plans
VECTOR = 2 * _FIELDS + 1 + MAX_PLANS


def order_digest(order: Sequence[int]) -> int:
    """Return a 56-bit integer digest of an order of gradients."""
    digest = hashlib.blake2b(repr(tuple(order)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def vector(proposal: PlanProposal | None, taken: Sequence[int]) -> list[int]:
    """Return the vector that this rank contributes to the comparison.

    It contains the proposal's fields, their negatives, a flag for joined ranks, and the plan numbers in use.

    Args:
        proposal: None for a rank that has joined; its vector affects no field of the result.
        taken: the result of `Plans.taken`.
    """
    if proposal is None:
        return [*[_NOTHING] * (2 * _FIELDS), 1, *taken]
    return [*proposal, *(-value for value in proposal), 0, *taken]


class PlanVerdict(NamedTuple):
    """Result of a comparison of plans, equal on all ranks.

    Attributes:
        least: minimum of each field over all proposals. Meaningless if no rank has data.
        greatest: maximum of each field over all proposals.
        joined: whether any rank has joined.
        taken: for each plan number, 1 if any rank still uses the number, else 0.
    """

    least: PlanProposal
    greatest: PlanProposal
    joined: bool
    taken: list[int]

    @property
    def source(self) -> int | None:
        """Return the lowest rank that still has data, or None."""
        return None if self.greatest.rank == _NOTHING else self.least.rank

    @property
    def equal(self) -> bool:
        """Return whether all ranks have proposed the same plan."""
        return self.least.compared == self.greatest.compared

    @property
    def alike(self) -> bool:
        """Return whether the same parameters require a gradient on all ranks."""
        return self.least.trains == self.greatest.trains

    @property
    def same_order(self) -> bool:
        """Return whether all ranks with data have the same order of gradients, so that it need not be sent."""
        return self.alike and self.least.order == self.greatest.order

    @property
    def last(self) -> bool:
        """Return whether all ranks are at the end of the step's last backward pass."""
        return self.greatest.point == ComparisonPoint.LAST_PASS

    @property
    def again(self) -> bool:
        """Return whether ranks must compare again in step().

        They must if they have run backward passes of different optimizers.
        """
        differ = not self.equal or (
            self.least.twin != self.greatest.twin and self.greatest.twins > 1
        )
        return self.least.point < ComparisonPoint.STEP and differ


def verdict(reduced: Sequence[int]) -> PlanVerdict:
    """Return the result of a comparison, from the element-wise maximum of all ranks' vectors."""
    greatest = PlanProposal(*reduced[:_FIELDS])
    least = PlanProposal(*(-value for value in reduced[_FIELDS : 2 * _FIELDS]))
    joined, *taken = reduced[2 * _FIELDS :]
    return PlanVerdict(least, greatest, bool(joined), taken)


# ---- the plans of one generation -------------------------------------------------------------------------------------


class Owner(Protocol):
    """Interface of a reducer that owns an agreed plan."""

    def plan_replaced(self) -> None:
        """Handle the replacement of this optimizer's plan by the other ranks, after this rank has called `join`."""


class AgreedPlan:
    """Plan that was agreed on, with its number and its reducer on this rank."""

    def __init__(self, number: int, layout: StepPlan, owner: Owner | None) -> None:
        self.number = number
        self.layout = layout
        self.version = 0
        # None on a joined rank whose optimizer has not adopted the plan yet
        self.owner: weakref.ref[Any] | None = None if owner is None else weakref.ref(owner)

    @property
    def purpose(self) -> str:
        return GRADIENTS if self.number == 0 else f"{GRADIENTS} {self.number + 1}"

    @property
    def taken(self) -> bool:
        return self.owner is None or self.owner() is not None


class Plans:
    """Plans on which the ranks of one group have agreed in one generation."""

    def __init__(self) -> None:
        self.agreed: list[AgreedPlan] = []
        self.channel_open = False  # whether all ranks have created the group CHANNEL

    @property
    def channel(self) -> str:
        """Return the name of the group for the next agreement.

        The first agreement uses the gradients' own group, which is idle at that time.
        """
        return CHANNEL if self.agreed else GRADIENTS

    def taken(self) -> list[int]:
        """Return, for each plan number, 1 if this rank still uses the number, else 0."""
        taken = [int(each.taken) for each in self.agreed[:MAX_PLANS]]
        return taken + [0] * (MAX_PLANS - len(taken))

    def number(self, verdict: PlanVerdict) -> int:
        """Return the number for a plan that was just agreed on."""
        if verdict.greatest.replaces >= 0:
            return verdict.greatest.replaces
        for number in range(min(len(self.agreed), MAX_PLANS)):
            if not verdict.taken[number]:
                return number
        return len(self.agreed)

    def record(self, number: int, layout: StepPlan, owner: Owner | None) -> AgreedPlan:
        """Record an agreed plan.

        Args:
            number: number of the plan.
            layout: the plan.
            owner: reducer of the plan, or None on a rank that has joined. On such a rank, the reducer of a replaced
                plan is notified.
        """
        if self.agreed:
            # The group CHANNEL was used for this agreement, so all ranks have created it.
            self.channel_open = True
        if number == len(self.agreed):
            self.agreed.append(AgreedPlan(number, layout, owner))
            return self.agreed[number]
        agreed = self.agreed[number]
        agreed.layout = layout
        agreed.version += 1
        if owner is not None:
            agreed.owner = weakref.ref(owner)
        elif agreed.owner is not None:
            before = agreed.owner()
            if before is None:
                agreed.owner = None
            else:
                before.plan_replaced()
        return agreed

    def find(self, owner: Owner) -> AgreedPlan | None:
        """Return the plan that this optimizer already has, or None."""
        for agreed in self.agreed:
            if agreed.owner is not None and agreed.owner() is owner:
                return agreed
        return None

    def adopt(self, owner: Owner, digest: int, version: int) -> AgreedPlan | None:
        """Adopt a plan of the active ranks for a rank that has joined, if ``owner`` has the same plan.

        This method does not communicate.

        Args:
            owner: reducer that may already have the plan.
            digest: digest of the reducer's plan.
            version: version of the reducer's plan.

        Returns:
            The adopted plan, or None if the ranks must first agree on one.

        Raises:
            StateMismatch: the other ranks have changed their optimizer's parameters, and this rank has not changed them
                in the same way.
        """
        agreed = self.find(owner)
        if agreed is not None:
            if agreed.version == version:
                return None
            if agreed.layout.digest != digest:
                raise StateMismatch(
                    "the parameters of the optimizer on other ranks changed after this rank called join(): make"
                    " the same changes on all ranks before the next step"
                )
            return agreed
        for agreed in self.agreed:
            if agreed.owner is None and agreed.layout.digest == digest:
                agreed.owner = weakref.ref(owner)
                return agreed
        return None


_of: weakref.WeakKeyDictionary[Any, tuple[int, dict[tuple[int, ...] | None, Plans]]] = (
    weakref.WeakKeyDictionary()
)


def every(runtime: Any) -> dict[tuple[int, ...] | None, Plans]:
    """Return the plans of the current generation, keyed by the ranks that share them.

    The key None means the whole world.
    """
    generation, plans = _of.get(runtime, (None, {}))
    if generation != runtime.generation:
        plans = {}
        _of[runtime] = (runtime.generation, plans)
    return plans


def of(runtime: Any, members: tuple[int, ...] | None) -> Plans:
    return every(runtime).setdefault(members, Plans())
