"""Decides on which group the gradients of one optimizer travel, and what a rank without gradients must know. Pure.

The ranks of a generation agree on each plan once (see `elastic.optimizer.gradients.gradient_reducer`), all in the same
order, so the agreements can be numbered: every plan has a group of its own, and plans of two optimizers never wait for
each other. The number of an optimizer that is gone on every rank is given to the next one, so a script that makes
optimizers all its life has a few groups.

A rank that has joined (`elastic.optimizer.join`) has to follow the others' steps. The first buffer of each plan
therefore ends in one element more, the mark: it says whether anybody takes a step. Nothing here knows tensors or talks
to anybody.
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

CHANNEL = "gradients plans"  # the group on which all plans but the first of a generation are agreed
MAX_PLANS = 64  # numbers that can be used again


# ---- the mark --------------------------------------------------------------------------------------------------------


class StepFlag(enum.Enum):
    """What a rank puts at the end of a plan's first buffer, and what the sum of all says."""

    JOINED = 0  # it has no more data; as a sum: nobody has
    STEP = 1
    CHANGE = 2  # the last step with this plan: somebody has other parameters to train, or none takes this step at all


# By reduction, so that a mark survives it among any number of joined ranks, in any floating dtype: a sum may lose
# precision or become infinite, and be scaled, but not lose its sign.
_VALUES: dict[Op, dict[StepFlag, float]] = {
    Op.SUM: {StepFlag.JOINED: 0.0, StepFlag.STEP: 1.0, StepFlag.CHANGE: -math.inf},
    Op.MAX: {StepFlag.JOINED: 0.0, StepFlag.STEP: 1.0, StepFlag.CHANGE: 2.0},
    Op.MIN: {StepFlag.JOINED: 0.0, StepFlag.STEP: -1.0, StepFlag.CHANGE: -2.0},
    Op.PRODUCT: {StepFlag.JOINED: 1.0, StepFlag.STEP: 2.0, StepFlag.CHANGE: 0.0},
}


def mark_value(op: Op, mark: StepFlag) -> float:
    """What a rank sends. ``op`` is the reduction as it is sent: SUM for an average."""
    return _VALUES[op][mark]


def read_mark(op: Op, reduced: float) -> StepFlag:
    """What arrived. One CHANGE is heard among any number of others, one STEP among ranks that joined."""
    values = _VALUES[op]
    if reduced == values[StepFlag.JOINED]:
        return StepFlag.JOINED
    match op:
        case Op.SUM:
            changed = reduced < 0.0
        case Op.MAX | Op.MIN:
            changed = abs(reduced) > 1.5
        case _:
            changed = not reduced > 1.0  # no number is what zero makes of too many steps
    return StepFlag.CHANGE if changed else StepFlag.STEP


# ---- what a plan looks like on the wire ------------------------------------------------------------------------------


class BucketSpec(msgspec.Struct, frozen=True):
    """One buffer that is reduced. ``dtype`` and ``device`` are torch's names, the device without a number."""

    elements: int
    dtype: str
    device: str


class Sparse(msgspec.Struct, frozen=True):
    """A gradient whose entries are gathered. ``number`` counts all trainable parameters."""

    number: int
    shape: tuple[int, ...]
    dims: int
    dtype: str
    device: str


class StepPlan(msgspec.Struct, frozen=True):
    """All that travels in a step, in order: the buffers, then the sparse gradients.

    The last element of the first buffer is the mark. ``op`` is the reduction as it is sent, ``scale`` and
    ``divisor`` what a group that scales inside multiplies and then divides its results by, ``order`` the one in which
    gradients become ready. ``trained``: which of the optimizer's parameters have a gradient, on any rank.
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


# ---- comparing plans: one vector of whole numbers, reduced by MAX ----------------------------------------------------


class PlanDigest(NamedTuple):
    """What must be equal. ``replaces``: the number that the optimizer's plan had before in this generation, or -1.

    ``parameters`` counts all, frozen ones too. ``anew``: 1 if the step that is under way was taken back, because the
    parameters are other ones.
    """

    digest: int
    parameters: int
    replaces: int
    anew: int


_NOTHING = -(1 << 62)
_COMPARED = len(PlanDigest._fields)
VERDICT = 2 * _COMPARED + 12 + MAX_PLANS  # elements


class ComparisonPoint(enum.Enum):
    """When a rank compares its plan."""

    LAST_PASS = 0  # at the end of the last backward pass of a step
    PASS = 1  # at the end of another one, as far as this rank knows
    STEP = 2  # in step() or synchronize()


def proposal(
    outline: PlanDigest | None,
    trains: int,
    sparse: int,
    rank: int,
    taken: Sequence[int],
    moment: ComparisonPoint = ComparisonPoint.STEP,
    twin: int = 0,
    twins: int = 1,
    order: Sequence[int] = (),
) -> list[int]:
    """A rank's part in the comparison. ``outline``: None for a rank that has joined. ``sparse``: how many gradients.

    ``twin``: its number among the optimizers made with equal parameters, of which ``twins`` are left.
    ``trains``: a digest of which parameters require a gradient here. ``order``: in which its gradients become ready.
    """
    if outline is None:
        nothing = [_NOTHING] * (2 * _COMPARED + 2)
        return [*nothing, 0, 1, _NOTHING, 0, 0, _NOTHING, _NOTHING, 0, _NOTHING, _NOTHING, *taken]
    moments = [
        int(moment is not ComparisonPoint.LAST_PASS),
        int(moment is not ComparisonPoint.STEP),
    ]
    same = [twin, -twin, twins]
    digest = hashlib.blake2b(repr(tuple(order)).encode(), digest_size=7).digest()
    seen = int.from_bytes(digest, "big")
    bounds = [*outline, *(-number for number in outline), trains, -trains]
    return [*bounds, sparse, 0, -rank, *moments, *same, seen, -seen, *taken]


class PlanVerdict(NamedTuple):
    """What all proposals came to. ``source``: the lowest rank that has data left, or None."""

    least: PlanDigest
    greatest: PlanDigest
    alike: bool  # the same parameters require a gradient on every rank
    sparse: int
    joined: bool  # somebody has
    source: int | None
    last: bool  # it is the end of the step's last backward pass on all ranks
    again: bool  # to be compared in step(): here one rank's backward pass meets that of another optimizer
    same_order: bool  # who has data left has seen one order of gradients, and need not be told it
    taken: list[int]

    @property
    def equal(self) -> bool:
        return self.least == self.greatest


def verdict(reduced: list[int]) -> PlanVerdict:
    greatest = PlanDigest(*reduced[:_COMPARED])
    least = PlanDigest(*(-number for number in reduced[_COMPARED : 2 * _COMPARED]))
    trained, same_trained, sparse, joined, source, *moments = reduced[2 * _COMPARED : -MAX_PLANS]
    not_last, passed, last_twin, first_twin, twins, seen, same_seen = moments
    alike = trained == -same_trained
    return PlanVerdict(
        least,
        greatest,
        alike,
        sparse,
        bool(joined),
        None if source == _NOTHING else -source,
        not not_last,
        bool(passed) and (least != greatest or (last_twin != -first_twin and twins > 1)),
        alike and seen == -same_seen,
        reduced[-MAX_PLANS:],
    )


# ---- the plans of one generation -------------------------------------------------------------------------------------


class Owner(Protocol):
    """A reducer of gradients, as far as it is known here."""

    def plan_replaced(self) -> None:
        """While this rank had joined, the others agreed on another plan for this optimizer."""


class AgreedPlan:
    """One number: the plan that goes by it now, and whose it is on this rank."""

    def __init__(self, number: int, layout: StepPlan, owner: Owner | None) -> None:
        self.number = number
        self.layout = layout
        self.version = 0
        # None: agreed while this rank had joined, and its optimizer has not asked for it yet.
        self.owner: weakref.ref[Any] | None = None if owner is None else weakref.ref(owner)

    @property
    def purpose(self) -> str:
        return GRADIENTS if self.number == 0 else f"{GRADIENTS} {self.number + 1}"

    @property
    def taken(self) -> bool:
        return self.owner is None or self.owner() is not None


class Plans:
    """What the same ranks have agreed on in one generation."""

    def __init__(self) -> None:
        self.agreed: list[AgreedPlan] = []
        self.channel_open = False  # every one of the ranks has formed that group

    @property
    def channel(self) -> str:
        """The group for the next agreement. The first needs none of its own: nothing travels there yet."""
        return CHANNEL if self.agreed else GRADIENTS

    def taken(self) -> list[int]:
        """1 for each number that can't be used again, as this rank knows."""
        taken = [int(each.taken) for each in self.agreed[:MAX_PLANS]]
        return taken + [0] * (MAX_PLANS - len(taken))

    def number(self, verdict: PlanVerdict) -> int:
        """Which number the plan gets that was just agreed."""
        if verdict.greatest.replaces >= 0:
            return verdict.greatest.replaces
        for number in range(min(len(self.agreed), MAX_PLANS)):
            if not verdict.taken[number]:
                return number
        return len(self.agreed)

    def record(self, number: int, layout: StepPlan, owner: Owner | None) -> AgreedPlan:
        """``owner``: None on a rank that has joined. There the optimizer of a replaced plan is told."""
        if self.agreed:
            self.channel_open = True  # this agreement took place there
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
        """The number that this optimizer has already."""
        for agreed in self.agreed:
            if agreed.owner is not None and agreed.owner() is owner:
                return agreed
        return None

    def adopt(self, owner: Owner, digest: int, version: int) -> AgreedPlan | None:
        """A plan that the others agreed on while this rank had joined, if ``owner`` has the same. Talks to nobody.

        ``version``: of the plan that the owner knows. None: it is to be agreed. Raises StateMismatch where the owner
        has not made the change that the others have.
        """
        agreed = self.find(owner)
        if agreed is not None:
            if agreed.version == version:
                return None
            if agreed.layout.digest != digest:
                raise StateMismatch(
                    "while this rank had joined, the other ranks' optimizer got other parameters than this rank's:"
                    " add and change the same on every rank before the next step"
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
    """Those of the runtime's present generation, by the ranks that share them; None: the whole world."""
    generation, plans = _of.get(runtime, (None, {}))
    if generation != runtime.generation:
        plans = {}
        _of[runtime] = (runtime.generation, plans)
    return plans


def of(runtime: Any, members: tuple[int, ...] | None) -> Plans:
    return every(runtime).setdefault(members, Plans())
