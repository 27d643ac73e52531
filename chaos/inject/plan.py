"""Selection of faults, times and victims, as given in a plan or drawn from a seed. Pure: no I/O, no clock.

`plan_file` reads a plan, and `faulty_job` runs a job under it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elastic.protocol.messages import Worker

KINDS = {
    "kill": "SIGKILL: the process ends immediately",
    "leave": "SIGTERM: the worker leaves at its next commit",
    "freeze": "SIGSTOP, followed by SIGCONT after for_s",
    "slow": "stopped repeatedly during for_s, so that it runs at 1/factor of its speed",
    "partition": "all TCP packets of the worker are dropped during for_s; needs root and nft",
    "cut": "connections to other workers are closed from outside; needs root and ss",
    "flip-weights": "one bit of the weights is flipped; needs --checkpoint-dir",
    "flip-moments": "one bit of the optimizer state is flipped; needs --checkpoint-dir",
    "flip-gradients": "one bit of the reduced gradients is flipped; needs --checkpoint-dir",
    "flip-file": "one bit in a file of the newest checkpoint is flipped; needs --checkpoint-dir",
}
FLIPPED = {"flip-weights": "weights", "flip-moments": "moments", "flip-gradients": "gradients"}
SPOILS_FILE = "flip-file"
# minimum and maximum duration of random faults, in seconds
LASTING = {"freeze": (0.5, 8.0), "slow": (2.0, 10.0), "partition": (3.0, 10.0)}
FACTOR = 3.0
# minimum mean time between random faults, in seconds, since the journal is checked only fifty times a second
MEAN_LEAST_S = 0.05
SECONDS_MAX = 1e6
DRAWN_PER_LOOK = 20  # maximum number of random faults that one check of the journal returns


@dataclass(frozen=True)
class Fault:
    """One planned fault. Exactly one of ``at_s``, ``after_commits``, ``at_generation`` is set."""

    kind: str
    victim: str = "random"
    at_s: float | None = None
    after_commits: int | None = None
    at_generation: int | None = None
    for_s: float = 0.0
    factor: float = 0.0
    # whether the fault was drawn at random; random faults never affect the last worker
    drawn: bool = False

    def __str__(self) -> str:
        return f"{self.when()}: {self.what()} {self.victim}"

    def what(self) -> str:
        """Return a description such as ``freeze for 8 s``."""
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
        """Return whether the fault may remove a worker from its world."""
        return self.kind not in ("slow", "cut", SPOILS_FILE)

    def least_members(self) -> int:
        """Return how many members, including the victim, must be free of other faults before a random fault begins.

        A bit flip requires three replicas, because two replicas that differ do not show which one is correct.
        """
        return 3 if self.kind in FLIPPED else 2 if self.hurts() else 1


@dataclass
class Injected:
    """A fault injected into one worker. Times are this machine's monotonic clock, as in the journal."""

    number: int
    kind: str
    worker: Worker
    rank: int
    size: int  # size of the world at the time of the injection
    at: float
    what: str  # description of the fault: kind, factor, duration
    until: float | None = None  # time at which the fault was undone, or None
    note: str = ""


@dataclass(frozen=True)
class Chance:
    """Random faults of a plan, drawn from its seed.

    Args:
        duration_s: seconds after the start of training during which faults occur. None means until the end.
    """

    mean_s: float
    kinds: tuple[str, ...] = ("kill", "freeze")
    seed: int | None = None
    duration_s: float | None = None
    for_s: tuple[float, float] | None = None  # None selects the default range in LASTING
    factor: float = FACTOR
    spare: tuple[str, ...] = ()  # slots whose workers random faults never affect, as host:slot


@dataclass(frozen=True)
class Plan:
    faults: tuple[Fault, ...] = ()
    chance: Chance | None = None

    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults} | set(self.chance.kinds if self.chance else ())

    def flips(self) -> bool:
        """Return whether the plan contains bit flips."""
        return bool(self.kinds() & {*FLIPPED, SPOILS_FILE})

    def counts_commits(self) -> bool:
        return any(fault.after_commits is not None for fault in self.faults)

    def seeded(self, seed: int) -> Plan:
        """Return the plan with a seed: its own, or ``seed`` if it has none."""
        if self.chance is None or self.chance.seed is not None:
            return self
        return replace(self, chance=replace(self.chance, seed=seed))


# ---- drawing ---------------------------------------------------------------------------------------------------------


def draw(chance: Chance) -> Iterator[Fault]:
    """Yield the random faults of a seed. The same seed yields the same faults.

    The iterator is infinite unless ``duration_s`` is set.
    """
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
    """Schedule of the planned and random faults. `due` returns each fault once.

    One call returns at most DRAWN_PER_LOOK random faults. The next call returns the rest.
    """

    def __init__(self, plan: Plan) -> None:
        self._waiting = list(plan.faults)
        self._drawn = draw(plan.chance) if plan.chance is not None else iter(())
        self._next = next(self._drawn, None)

    def due(self, *, since_s: float, commits: int, generation: int) -> list[Fault]:
        """Return the faults that are due now.

        Args:
            since_s: seconds since training began.
            commits: number of commits so far.
            generation: number of the current generation.
        """
        now = [fault for fault in self._waiting if _has_come(fault, since_s, commits, generation)]
        self._waiting = [fault for fault in self._waiting if fault not in now]
        for _ in range(DRAWN_PER_LOOK):
            if self._next is None or not _has_come(self._next, since_s, commits, generation):
                break
            now.append(self._next)
            self._next = next(self._drawn, None)
        return now

    def put_off(self, fault: Fault) -> None:
        """Postpone a fault for which no victim is currently allowed: the next call of `due` returns it again."""
        self._waiting.append(fault)

    def left(self) -> list[Fault]:
        """Return the planned faults that `due` has not returned yet."""
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
    """Return the victims of a fault. The list is empty if no victim is allowed.

    Args:
        members: live members of the current world, by rank.
        arrived: the same members by age, oldest first.
        suffering: workers under another fault.
        spare: slots whose workers random faults never affect. Random faults also leave one member unaffected, so that
            the state is not lost.
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
        case _:  # The victim is "all", or "all but one".
            left = dice.choice(list(members)) if rest else None
            return [worker for worker in members if worker != left]
