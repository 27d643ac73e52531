"""Decides what goes wrong, when and to whom: by a plan, or drawn from a seed. Pure; touches no process.

A plan is read by `plan_file`, carried out by `faulty_job`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elastic.protocol.messages import Worker

KINDS = {
    "kill": "SIGKILL: the process is gone at once",
    "leave": "SIGTERM: it leaves at its next commit",
    "freeze": "SIGSTOP, and SIGCONT for_s later",
    "slow": "stopped again and again for for_s, so that it runs at 1/factor of its speed",
    "partition": "all its TCP packets are dropped for for_s; needs root and nft",
    "cut": "its connections to other workers are closed from outside; needs root and ss",
    "flip-weights": "one bit of its weights becomes another one; needs --checkpoint-dir",
    "flip-moments": "the same of the state of its optimizers",
    "flip-gradients": "the same of its gradients, after all ranks have added them up",
    "flip-file": "one bit of a file of the newest checkpoint becomes another one",
}
FLIPPED = {"flip-weights": "weights", "flip-moments": "moments", "flip-gradients": "gradients"}
SPOILS_FILE = "flip-file"
LASTING = {"freeze": (0.5, 8.0), "slow": (2.0, 10.0), "partition": (3.0, 10.0)}  # for_s, if drawn
FACTOR = 3.0
MEAN_LEAST_S = 0.05  # between drawn faults; more often there would be more of them than looks
SECONDS_MAX = 1e6
DRAWN_PER_LOOK = 20  # so that one that comes late does not keep who looks from looking


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. Exactly one of ``at_s``, ``after_commits``, ``at_generation`` is set."""

    kind: str
    victim: str = "random"
    at_s: float | None = None
    after_commits: int | None = None
    at_generation: int | None = None
    for_s: float = 0.0
    factor: float = 0.0
    drawn: bool = False  # by chance: it spares the last worker

    def __str__(self) -> str:
        return f"{self.when()}: {self.what()} {self.victim}"

    def what(self) -> str:
        """``freeze for 8 s``."""
        slower = f" {self.factor:g} times" if self.kind == "slow" else ""
        lasting = f" for {self.for_s:.3g} s" if self.for_s else ""
        return f"{self.kind}{slower}{lasting}"

    def when(self) -> str:
        if self.at_s is not None:
            return f"{self.at_s:.1f} s after training began"
        if self.after_commits is not None:
            return f"after {self.after_commits} commits"
        return f"when generation {self.at_generation} begins"

    def hurts(self) -> bool:
        """Whether it may take a worker out of its world."""
        return self.kind not in ("slow", "cut", SPOILS_FILE)

    def least_members(self) -> int:
        """Of those that no fault holds, so that chance may do it. Of two replicas nobody knows which one is right."""
        return 3 if self.kind in FLIPPED else 2 if self.hurts() else 1


@dataclass
class Injected:
    """A fault that was done to one worker. Times are this machine's monotonic clock, as the journal's."""

    number: int
    kind: str
    worker: Worker
    rank: int
    size: int  # of the world then
    at: float
    what: str  # in words: kind, factor, how long
    until: float | None = None  # when it was undone
    note: str = ""


@dataclass(frozen=True)
class Chance:
    """Faults drawn at random, for ``duration_s`` after training began (None: to its end)."""

    mean_s: float
    kinds: tuple[str, ...] = ("kill", "freeze")
    seed: int | None = None
    duration_s: float | None = None
    for_s: tuple[float, float] | None = None  # None: as LASTING says
    factor: float = FACTOR
    spare: tuple[str, ...] = ()  # host:slot, never hit by chance


@dataclass(frozen=True)
class Plan:
    faults: tuple[Fault, ...] = ()
    chance: Chance | None = None

    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults} | set(self.chance.kinds if self.chance else ())

    def flips(self) -> bool:
        """Whether it has bits that change."""
        return bool(self.kinds() & {*FLIPPED, SPOILS_FILE})

    def counts_commits(self) -> bool:
        return any(fault.after_commits is not None for fault in self.faults)

    def seeded(self, seed: int) -> Plan:
        """The same with a seed where it has none."""
        if self.chance is None or self.chance.seed is not None:
            return self
        return replace(self, chance=replace(self.chance, seed=seed))


# ---- drawing ---------------------------------------------------------------------------------------------------------


def draw(chance: Chance) -> Iterator[Fault]:
    """The faults of a seed, without end unless ``duration_s`` ends it. The same seed gives the same ones."""
    dice = random.Random(chance.seed)
    at_s = 0.0
    while True:
        at_s += dice.expovariate(1.0 / chance.mean_s)
        if chance.duration_s is not None and at_s > chance.duration_s:
            return
        kind = dice.choice(chance.kinds)
        for_s = dice.uniform(*(chance.for_s or LASTING[kind])) if kind in LASTING else 0.0
        factor = chance.factor if kind == "slow" else 0.0
        yield Fault(kind, at_s=at_s, for_s=for_s, factor=factor, drawn=True)


class Schedule:
    """Which faults are due. Each is given out once, at its time or as soon as somebody asks afterwards.

    Of the drawn ones at most DRAWN_PER_LOOK at once; what is left is due at the next look.
    """

    def __init__(self, plan: Plan) -> None:
        self._waiting = list(plan.faults)
        self._drawn = draw(plan.chance) if plan.chance is not None else iter(())
        self._next = next(self._drawn, None)

    def due(self, *, since_s: float, commits: int, generation: int) -> list[Fault]:
        """``since_s``: seconds since training began; ``commits``: seen so far; ``generation``: the present one."""
        now = [fault for fault in self._waiting if _has_come(fault, since_s, commits, generation)]
        self._waiting = [fault for fault in self._waiting if fault not in now]
        for _ in range(DRAWN_PER_LOOK):
            if self._next is None or not _has_come(self._next, since_s, commits, generation):
                break
            now.append(self._next)
            self._next = next(self._drawn, None)
        return now

    def put_off(self, fault: Fault) -> None:
        """There was nobody to do it to: it stays due."""
        self._waiting.append(fault)

    def left(self) -> list[Fault]:
        """The planned ones that were not given out."""
        return list(self._waiting)


def _has_come(fault: Fault, since_s: float, commits: int, generation: int) -> bool:
    if fault.at_s is not None:
        return since_s >= fault.at_s
    if fault.after_commits is not None:
        return commits >= fault.after_commits
    return generation >= (fault.at_generation or 0)


def choose(
    fault: Fault,
    *,
    members: Sequence[Worker],
    arrived: Sequence[Worker],
    suffering: Sequence[Worker],
    spare: Sequence[str],
    dice: random.Random,
) -> list[Worker]:
    """The workers that a fault hits; none if there is nobody whom it may hit.

    ``members``: of the present world and alive, by rank. ``arrived``: the same by age, the oldest first.
    ``suffering``: those that another fault holds. Faults drawn by chance leave one member alone, so that somebody holds
    the state, and never hit a slot of ``spare``.
    """
    if fault.drawn:
        free = [worker for worker in members if worker not in suffering]
        able = [worker for worker in free if f"{worker.host}:{worker.slot}" not in spare]
        if not able or len(free) < fault.least_members():
            return []
        return [dice.choice(able)]
    word, _, rest = fault.victim.partition(" ")
    if not members:
        return []
    match word:
        case "random":
            return [dice.choice(list(members))]
        case "rank":
            return list(members[int(rest) : int(rest) + 1])
        case "newest":
            return [arrived[-1]] if arrived else []
        case "oldest":
            return [arrived[0]] if arrived else []
        case "worker":
            return [w for w in members if f"{w.host}:{w.slot}" == rest]
        case "host":
            return [w for w in members if w.host == rest]
        case _:  # all, or all but one
            left = dice.choice(list(members)) if rest else None
            return [worker for worker in members if worker != left]
