"""Random rounds of calls and faults for one group, and the check of the ranks' reports. Deterministic.

It uses no clock, process or tensor. See `command`.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPS = ("SUM", "MIN", "MAX", "PRODUCT")
MOST_BYTES = 4 << 20  # maximum bytes of one tensor
LATE_S = 0.1  # an error that takes longer than this is a finding
FINDINGS = 20  # the most findings that are kept


class Kind(enum.Enum):
    REDUCE = "allreduce"
    BROADCAST = "broadcast"
    GATHER = "allgather"
    SCATTER = "alltoall"


class ReductionFault(enum.Enum):
    NONE = "none"
    KILL = "kill"
    FREEZE = "freeze"  # then the group is aborted, and the frozen rank is killed


@dataclass(frozen=True)
class Call:
    """One collective. ``at`` selects its inputs, ``inside`` says for each rank whether its tensor lies in its arena."""

    kind: Kind
    dtype: str
    op: str
    elements: int
    scale: float
    divisor: int
    root: int
    at: int
    inside: tuple[bool, ...]


@dataclass(frozen=True)
class Round:
    """Calls of one group; all are started before the first one is waited for.

    With a fault they are repeated until they fail. The fault is injected ``after_s`` after all ranks are in the group,
    an abort ``held_s`` later.
    """

    ranks: tuple[int, ...]  # workers by rank
    calls: tuple[Call, ...]
    fault: ReductionFault = ReductionFault.NONE
    victim: int = 0  # rank
    after_s: float = 0.0
    held_s: float = 0.0


def draw(pick: random.Random, workers: int, element_bytes: dict[str, int]) -> Round:
    size = pick.randint(2, workers)
    calls = [_call(pick, size, element_bytes) for _ in range(pick.choice((1, 1, 2, 3, 6)))]
    chance = pick.random()
    return Round(
        ranks=tuple(pick.sample(range(workers), size)),
        calls=tuple(calls),
        fault=ReductionFault.KILL
        if chance < 0.25
        else ReductionFault.FREEZE
        if chance < 0.4
        else ReductionFault.NONE,
        victim=pick.randrange(size),
        after_s=pick.choice((0.0, 0.001, 0.004, 0.015)) * pick.random(),
        held_s=0.01 * pick.random(),
    )


def _call(pick: random.Random, size: int, element_bytes: dict[str, int]) -> Call:
    dtype = pick.choice(DTYPES)
    kind = pick.choice((Kind.REDUCE,) * 5 + (Kind.BROADCAST, Kind.GATHER, Kind.SCATTER))
    # Sizes of every order of magnitude are equally likely; some end at a chunk or window border.
    most = MOST_BYTES // element_bytes[dtype] // (size if kind is Kind.SCATTER else 1)
    elements = min(most, int(2 ** (pick.random() * most.bit_length())))
    if pick.random() < 0.1:
        elements = max(1, elements * element_bytes[dtype] >> 16 << 16) // element_bytes[dtype] or 1
    same = pick.random()
    return Call(
        kind=kind,
        dtype=dtype,
        op=pick.choice(OPS),
        elements=elements,
        scale=pick.choice((1.0, 1.0, 0.5, 1 / size)),
        divisor=pick.choice((1, 1, 3, size)),
        root=pick.randrange(size),
        at=pick.randrange(1 << 16),
        inside=tuple(
            True if same < 0.4 else False if same < 0.7 else pick.random() < 0.5
            for _ in range(size)
        ),
    )


@dataclass(frozen=True)
class RankReport:
    """Report of one surviving rank of one round.

    ``late_s`` is the time to the error from the kill or the abort, or from its own call if that was later. ``ended`` is
    the rank that died according to the error.
    """

    right: int = 0
    wrong: tuple[str, ...] = ()  # the calls, and their errors
    error: str = ""
    ended: int | None = None
    late_s: float = 0.0
    undrained: bool = False  # at first, another rank might still write
    written: bool = False  # into its tensor, after the drain


@dataclass
class ReductionTally:
    rounds: Counter[ReductionFault] = field(default_factory=Counter)
    calls: Counter[Kind] = field(default_factory=Counter)
    right: int = 0
    wrong: int = 0
    late: int = 0
    undrained: int = 0
    errors_s: dict[ReductionFault, list[float]] = field(
        default_factory=lambda: {ReductionFault.KILL: [], ReductionFault.FREEZE: []}
    )
    findings: list[str] = field(default_factory=list)

    def note(self, number: int, done: Round, told: Sequence[RankReport]) -> None:
        """Add a round. ``told`` has the reports of all ranks except the victim."""
        self.rounds[done.fault] += 1
        for call in done.calls:
            self.calls[call.kind] += 1
        for each in told:
            self.right += each.right
            self.wrong += len(each.wrong)
            self.undrained += each.undrained
            for what in each.wrong:
                self.found(f"round {number}: {what}")
            if each.written:
                self.wrong += 1
                self.found(f"round {number}: a tensor was written into after the drain")
            if done.fault is ReductionFault.NONE:
                if each.error:
                    self.found(f"round {number}: error without a fault: {each.error}")
                continue
            if not each.error:
                self.found(f"round {number}: {done.fault.value}, and no error")
                continue
            self.errors_s[done.fault].append(each.late_s)
            if done.fault is ReductionFault.KILL and each.ended != done.victim:
                self.found(
                    f"round {number}: rank {done.victim} was killed, but the error is: {each.error}"
                )
            if each.late_s > LATE_S:
                self.late += 1
                if self.late > 1:  # only one finding for all, so that others fit
                    continue
                self.found(f"round {number}: the error came {each.late_s * 1e3:.0f} ms late")

    def found(self, text: str) -> None:
        if len(self.findings) < FINDINGS:
            self.findings.append(text)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0 if there are none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = -(-round(share * 1e6) * len(ordered) // 1_000_000)
    return ordered[max(0, rank - 1)]
