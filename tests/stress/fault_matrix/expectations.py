"""Rules of the fault matrix: how a cell must end, which failpoint rules inject it, which cells share a job. Pure.

It also selects the few cells that cover all pairs of values.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.driver.reasons import ReasonKind
from stress.fault_matrix import cells as faults
from stress.fault_matrix.cells import Cell

WORKERS = 4
GONE_S = 3.0  # time for all processes of a job to end after its driver
HOLD_S = 20.0  # a GIL that is held until the worker is fenced
MOMENT_S = 1.5  # pause of a worker that is stopped or holds its GIL without being fenced
SLOW_S = 0.4
EVALUATE_EVERY = 3  # steps
IN_A_STEP = (
    faults.FORWARD,
    faults.BUCKET,
    faults.STEP,
    faults.BEFORE_COMMIT,
    faults.SNAPSHOT,
    faults.EVALUATION,
    *faults.COMMITS_SHARDS,
)


class ExpectedEnd(enum.Enum):
    """How a cell ends."""

    GOES_ON = "continues"
    REGROUPS = "regroups"
    RECOVERS = "recovers"
    LEAVES = "leaves"
    JOB_ENDS = "job ends"
    STOPS = "stops"
    ALL_GONE = "all gone"
    SUCCEEDS = "succeeds"
    FAILS = "fails at the end"


ENDS = {
    ExpectedEnd.GOES_ON: "No worker is lost, and all workers keep training in the same world.",
    ExpectedEnd.REGROUPS: "No worker is lost. All workers restore the last commit and keep training.",
    ExpectedEnd.RECOVERS: "The victims are lost. The other workers resume from the last commit, and new workers fill"
    " the free slots.",
    ExpectedEnd.LEAVES: "The victims exit with code 0 at a commit, and no step is repeated.",
    ExpectedEnd.JOB_ENDS: "The job ends with exit code 1 and prints the traceback.",
    ExpectedEnd.STOPS: "The driver stops its workers and exits.",
    ExpectedEnd.ALL_GONE: f"No process of the job is left {GONE_S:g} s after the fault.",
    ExpectedEnd.SUCCEEDS: "The fault occurs after the end of training, and the job succeeds.",
    ExpectedEnd.FAILS: "The fault occurs after the end of training. It does not affect other workers, but the exit"
    " code of the job is 1.",
}
LONGEST = 10  # the most cells of a job whose order is free
LAST_OF_ITS_JOB = (
    ExpectedEnd.JOB_ENDS,
    ExpectedEnd.STOPS,
    ExpectedEnd.ALL_GONE,
    ExpectedEnd.SUCCEEDS,
    ExpectedEnd.FAILS,
)


@dataclass(frozen=True)
class Result:
    """Result of a cell.

    ``ms`` is the time from the fault until all survivors trained again, if there was something to recover from.
    """

    cell: Cell
    passed: bool
    ms: float | None = None
    said: str = ""  # trouble; empty if it passed
    date: str = ""  # day of the run; empty: just now


@dataclass(frozen=True)
class Expected:
    """Expected end of a cell. ``fenced`` has the possible reasons of the kill; empty: the driver kills no victim."""

    end: ExpectedEnd
    why: str
    fenced: tuple[ReasonKind, ...] = ()


def expected(cell: Cell) -> Expected:
    """Return how this possible cell must end, and why."""
    victim, fault, phase = cell.victim, cell.fault, cell.phase
    if victim == faults.DRIVER:
        return _expected_of_driver(fault, phase)
    if phase == faults.SHUTDOWN:
        return _expected_at_shutdown(fault)
    if phase in (faults.BEFORE_INIT, faults.PREPARED):
        return _expected_before_init(fault)
    if phase in faults.IN_BACKGROUND and fault in faults.RAISING:
        return Expected(ExpectedEnd.GOES_ON, "what keeps a commit from the storage fails no step")
    if phase == faults.RESUME and fault == faults.DISK:
        return Expected(ExpectedEnd.GOES_ON, "a storage that fails is tried again")
    if phase == faults.RESUME and fault == faults.GIL:
        return Expected(
            ExpectedEnd.GOES_ON, "a worker that reads the checkpoint does not count as stuck"
        )
    several = victim in (faults.TWO, faults.ALL_BUT_ONE)
    if fault == faults.TERM:
        return Expected(ExpectedEnd.LEAVES, "SIGTERM asks a worker to leave at its next commit")
    if fault == faults.STOP:
        return Expected(
            ExpectedEnd.RECOVERS,
            "others wait for it, and its lease is shorter than its pause",
            (ReasonKind.FROZEN,),
        )
    if fault == faults.GIL:
        why = "it is idle while others wait for it"
        return Expected(ExpectedEnd.RECOVERS, why, (ReasonKind.IDLE, ReasonKind.BUSY))
    if fault == faults.DROP:
        return Expected(
            ExpectedEnd.RECOVERS, "its host acknowledges nothing any more", (ReasonKind.CUT_OFF,)
        )
    if fault == faults.SHUT:
        return Expected(ExpectedEnd.REGROUPS, "a collective broke, and no worker is lost")
    if fault == faults.SLOW:
        return Expected(ExpectedEnd.GOES_ON, "slow is not lost")
    if fault in faults.RAISING and several:
        why = "the same exception at several members is the script's"
        return Expected(ExpectedEnd.JOB_ENDS, why)
    return Expected(ExpectedEnd.RECOVERS, "its exit is seen at once")


def _expected_before_init(fault: str) -> Expected:
    if fault in (faults.STOP, faults.GIL, faults.SLOW):
        return Expected(ExpectedEnd.GOES_ON, "a worker may take --start-timeout to call init()")
    if fault == faults.TERM:
        return Expected(ExpectedEnd.RECOVERS, "before init() SIGTERM has its ordinary meaning")
    return Expected(ExpectedEnd.RECOVERS, "its exit is seen at once")


def _expected_at_shutdown(fault: str) -> Expected:
    if fault in (*faults.ENDING, *faults.RAISING):
        return Expected(ExpectedEnd.FAILS, "a worker that should not have ended so fails the job")
    return Expected(ExpectedEnd.SUCCEEDS, "only its exit is still waited for")


def _expected_of_driver(fault: str, phase: str) -> Expected:
    match fault:
        case faults.KILL | faults.SEGV:
            return Expected(
                ExpectedEnd.ALL_GONE, "the agent and its workers do not outlive their driver"
            )
        case faults.TERM:
            return Expected(ExpectedEnd.STOPS, "SIGTERM at the driver ends the job")
        case _ if phase == faults.SHUTDOWN:
            return Expected(ExpectedEnd.SUCCEEDS, "training was over before it happened")
        case faults.DISK:
            return Expected(
                ExpectedEnd.SUCCEEDS, "the journal ends, with a warning; the job does not"
            )
        case _:
            return Expected(ExpectedEnd.GOES_ON, "workers train on while the driver does not run")


# ---- rules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FaultRules:
    """``rules`` are lines for `elastic.failpoints`, ``victims`` is the number of workers that they will hit."""

    rules: list[str]
    victims: int


def fault_rules(
    cell: Cell, members: Sequence[str], newest: str, name: str, go: str, *, step: int = 0
) -> FaultRules:
    """Return the rules that inject a cell into a world of ``members``, by rank; ``newest`` joined last.

    Before the first world, ``members`` are its future members. An action from outside waits for the file ``go``.
    ``name`` makes the traces of this cell unique; ``step`` is in the future.
    """
    place = faults.PHASES[cell.phase]
    others = f"other-than={','.join(members)}"
    picked, count = _picked(cell, members, newest)
    condition = f"worker={','.join(picked)}" if picked else others
    # A new worker copies its own shard once before it joins, as its state is made.
    made = cell.victim == faults.JOINER and cell.phase in (faults.SHARD_COPY, faults.SHARD_MIRROR)
    hit = " hit=2" if cell.phase == faults.BUCKET or made else ""
    if count > 1 and cell.phase == faults.CHANGE:
        # A worker that learns of the change one check earlier would wait there for the others, and they for it in their
        # next step.
        place = "stop"
    if count > 1 and cell.phase in IN_A_STEP:
        # Without a common step, a victim could wait at this step for others that only learn of the rule at the next
        # one.
        hit += f" step={step + -step % EVALUATE_EVERY}"
    action = action_of(cell, go)
    rules = [f"{place} {action} {condition}{hit} victims={count} id={name}"]
    if cell.victim == faults.TWO and cell.phase == faults.COPY:
        rules = [
            f"{place} {action} {who} victims=2 id={name}"
            for who in (f"worker={members[0]}", others)
        ]
        count = 2
    if cell.phase == faults.RESUME:
        apart = step + -step % EVALUATE_EVERY
        rules.append(f"forward kill step={apart} victims={len(members)} id={name}-before")
    elif cell.phase == faults.CHANGE:
        leaver = members[3] if cell.victim == faults.ALL_BUT_ONE else members[1]
        rules.append(f"forward term worker={leaver} id={name}-before")
    elif needs_joiner(cell):
        rules.append(f"forward kill worker={members[-1]} id={name}-before")
    elif cell.phase in faults.MOVES_SHARDS:
        rules.append(f"forward kill worker={members[1]} id={name}-before")
    elif is_disturbed(cell):
        rules.append(f"forward shut worker={members[1]} id={name}-before")
    return FaultRules(rules, count)


def _picked(cell: Cell, members: Sequence[str], newest: str) -> tuple[list[str], int]:
    """Return the workers that the rule names (none: any new worker) and their number."""
    if cell.phase in (faults.RESUME, faults.STANDBY, faults.PREPARED):
        return [], 1
    match cell.victim:
        case faults.RANK_0:
            return [members[0]], 1
        case faults.MIDDLE:
            return [members[2]], 1
        case faults.LAST:
            return [members[-1]], 1
        case faults.TWO:
            return [members[0], members[2]], 2
        case faults.ALL_BUT_ONE:
            return list(members[:-1]), len(members) - 1
        case faults.JOINER if cell.phase == faults.SHUTDOWN:
            return [newest], 1
        case faults.DRIVER:  # the driver's fault happens while a member is at this place
            return [members[0]], 1
    return [], 1


def needs_joiner(cell: Cell) -> bool:
    """Return whether a member must be killed first, so that a worker joins."""
    joins = cell.victim == faults.JOINER and cell.phase != faults.SHUTDOWN
    return joins or cell.phase in (faults.COPY, faults.STANDBY, faults.PREPARED)


def is_disturbed(cell: Cell) -> bool:
    """Return whether something else must happen first, because no worker is in this phase otherwise."""
    alone = (faults.RENDEZVOUS, faults.RESET, faults.RESUME, faults.CHANGE, *faults.MOVES_SHARDS)
    return needs_joiner(cell) or cell.phase in alone


def shuts_connections(cell: Cell) -> bool:
    """Return whether connections between workers are shut: the workers must use them instead of shared memory."""
    regroups = cell.phase in (faults.RENDEZVOUS, faults.RESET) and not needs_joiner(cell)
    return cell.fault == faults.SHUT or regroups


def action_of(cell: Cell, go: str) -> str:
    """Return the action of the worker at the failpoint."""
    if cell.victim == faults.DRIVER or cell.fault == faults.DROP:
        return f"wait={go}"
    fenced = bool(expected(cell).fenced)
    return {
        faults.KILL: "kill",
        faults.TERM: "term",
        faults.STOP: "stop",
        faults.SEGV: "segv",
        faults.EXIT: "exit=7",
        faults.RAISE: "raise=a-damaged-sample",
        faults.GIL: f"hold-gil={HOLD_S if fenced else MOMENT_S:g}",
        faults.SHUT: "shut",
        faults.SLOW: f"slow={SLOW_S:g}",
        faults.DISK: "disk-full",
        faults.MEMORY: "out-of-memory",
    }[cell.fault]


# ---- jobs ----------------------------------------------------------------------------------------


def is_first(cell: Cell) -> bool:
    """Return whether a cell must be the first of its job."""
    return cell.phase == faults.BEFORE_INIT and cell.victim != faults.JOINER


class JobKind(enum.Enum):
    """Kinds of jobs, by the needs of their cells."""

    PLAIN = "plain"
    DURABLE = "with checkpoints"
    STANDBYS = "with a standby"
    PREPARED = "with a prepared process"
    SHARDED = "with a sharded state"


def kind_of(cell: Cell) -> JobKind:
    """Return the kind of job that can run this cell."""
    if cell.phase in (*faults.IN_BACKGROUND, faults.RESUME):
        return JobKind.DURABLE
    if cell.phase in (*faults.COMMITS_SHARDS, *faults.MOVES_SHARDS):
        return JobKind.SHARDED
    others = {faults.STANDBY: JobKind.STANDBYS, faults.PREPARED: JobKind.PREPARED}
    return others.get(cell.phase, JobKind.PLAIN)


def is_last(cell: Cell) -> bool:
    """Return whether the job ends with this cell."""
    return cell.phase == faults.SHUTDOWN or expected(cell).end in LAST_OF_ITS_JOB


def batches(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Divide cells into jobs of one kind, in order. In a job, either all cells shut connections or none does.

    Returns as few jobs as possible, because starting a job takes longer than most cells.
    """
    chosen = list(cells)
    kinds: dict[tuple[bool, str], list[Cell]] = {}
    for cell in chosen:
        kinds.setdefault((shuts_connections(cell), kind_of(cell).value), []).append(cell)
    return [batch for kind in kinds.values() for batch in _batches(kind)]


def _batches(chosen: Sequence[Cell]) -> list[list[Cell]]:
    alone = [[c] for c in chosen if is_first(c) and is_last(c)]
    first = [c for c in chosen if is_first(c) and not is_last(c)]
    last = [c for c in chosen if is_last(c) and not is_first(c)]
    middle = [c for c in chosen if not is_first(c) and not is_last(c)]
    number = max(len(first), len(last), -(-len(middle) // LONGEST))
    made = []
    for n in range(number):
        share = middle[n * len(middle) // number : (n + 1) * len(middle) // number]
        made.append([*first[n : n + 1], *share, *last[n : n + 1]])
    return alone + made


def pairwise(cells: Iterable[Cell]) -> list[Cell]:
    """Return a small set of cells with every pair of values that occurs in any cell."""
    return covering(cells, 2)


def covering(cells: Iterable[Cell], together: int) -> list[Cell]:
    """Return a small set of cells with every combination of ``together`` values that occurs in any cell.

    Greedy and deterministic; among cells that cover equally much, it prefers the cheaper one.
    """
    costs = {cell: cost(cell) for cell in cells}
    left = sorted(costs, key=lambda cell: (costs[cell], cell))
    values = {cell: _values(cell, together) for cell in left}
    missing = {each for cell in left for each in values[cell]}

    def gain(cell: Cell) -> float:
        return sum(each in missing for each in values[cell]) / math.sqrt(costs[cell])

    # The gain of a cell only decreases. So the cell with the largest earlier gain is the best one if its gain has not
    # changed.
    gains = [(-gain(cell), place) for place, cell in enumerate(left)]
    heapq.heapify(gains)
    chosen: list[Cell] = []
    while missing:
        earlier, place = gains[0]
        now = -gain(left[place])
        if now > earlier:
            heapq.heapreplace(gains, (now, place))
            continue
        heapq.heappop(gains)
        missing.difference_update(values[left[place]])
        chosen.append(left[place])
    order = {cell: n for n, cell in enumerate(faults.all_cells())}
    return sorted(chosen, key=order.__getitem__)


def _values(cell: Cell, together: int) -> list[tuple[str, ...]]:
    return list(itertools.combinations((cell.victim, cell.fault, cell.phase), together))


def cost(cell: Cell) -> float:
    """Estimate the seconds that a cell takes."""
    seconds = 1.0
    if expected(cell).end in (ExpectedEnd.RECOVERS, ExpectedEnd.LEAVES):
        seconds += 2.0 * {faults.TWO: 2, faults.ALL_BUT_ONE: 3}.get(cell.victim, 1)
    if needs_joiner(cell):
        seconds += 2.0
    seconds += {JobKind.PLAIN: 0.0, JobKind.PREPARED: 5.0}.get(kind_of(cell), 2.0)
    if is_first(cell) or is_last(cell):
        seconds += 6.0  # a job of its own
    if cell.fault == faults.GIL and expected(cell).fenced:
        seconds += 5.0
    return seconds
