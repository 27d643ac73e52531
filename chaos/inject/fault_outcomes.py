"""Outcome of each fault injected into a job, read from its journal. Pure: no I/O, no clock."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from elastic.chaos.inject.plan import FLIPPED, SPOILS_FILE, Injected
from elastic.driver import events
from elastic.driver.journal.entries import Entry
from elastic.protocol.messages import Worker

# The driver may have detected the fault shortly before the injector recorded its time.
EARLY_S = 0.02
# seconds after the end of a fault within which an exit is attributed to the fault
AFTERMATH_S = 10.0


class Sign(enum.Enum):
    """Evidence from which the driver detected a problem with a worker. The values are part of report texts."""

    EXIT = "its exit"
    FROZEN = "frozen"
    SILENCE = "its silence"
    COLLECTIVE = "its broken collective"
    WISH = "its wish"


@dataclass
class FaultOutcome:
    """Outcome of one injected fault.

    Args:
        at_s: seconds from the start of training to the fault.
        noticed_ms: milliseconds from the fault until the driver detected it.
        back_ms: milliseconds from the fault until a world without the victim, or a new ring with it, was training. None
            means never.
    """

    number: int
    at_s: float
    what: str
    worker: str
    rank: int
    size: int
    outcome: str
    noticed_ms: float | None = None
    back_ms: float | None = None
    generation: int | None = None


@dataclass
class _Happened:
    """Entries of a journal, grouped by kind, in order. The first item of each tuple is the entry's time in seconds."""

    exits: dict[Worker, tuple[float, int]] = field(default_factory=dict)
    kills: dict[Worker, tuple[float, str]] = field(default_factory=dict)
    noticed: dict[Worker, list[tuple[float, Sign]]] = field(default_factory=dict)
    broken: list[tuple[float, int]] = field(default_factory=list)
    worlds: list[tuple[float, int, frozenset[Worker]]] = field(default_factory=list)
    at_work: list[tuple[float, events.ReportRecovery]] = field(default_factory=list)
    ended: tuple[float, str] | None = None


def outcomes(
    entries: Sequence[Entry], injected: Sequence[Injected], *, began_at: float
) -> list[FaultOutcome]:
    """Return the outcome of each injected fault, in the order of injection."""
    happened = _happened(entries)
    found = []
    for each in injected:
        later = [
            i.at
            for i in injected
            if i.worker == each.worker and i.at > each.at and i.kind != SPOILS_FILE
        ]
        # A flipped bit is detected at the next checkpoint, which may be much later.
        until = min(
            [inf if each.kind in FLIPPED else (each.until or each.at) + AFTERMATH_S, *later]
        )
        found.append(_outcome(each, until, happened, began_at))
    return found


def _happened(entries: Sequence[Entry]) -> _Happened:
    happened = _Happened()

    def note(worker: Worker, at: float, what: Sign) -> None:
        happened.noticed.setdefault(worker, []).append((at, what))

    for entry in entries:
        match entry.event:
            case events.WorkerExited(worker=worker, code=code):
                happened.exits[worker] = (entry.at, code)
                note(worker, entry.at, Sign.EXIT)
            case events.WorkerFrozen(worker=worker):
                note(worker, entry.at, Sign.FROZEN)
            case events.WorkerDisconnected(worker=worker):
                note(worker, entry.at, Sign.SILENCE)
            case events.WorkerFailed(worker=worker):
                note(worker, entry.at, Sign.COLLECTIVE)
            case events.WorkerLeaving(worker=worker):
                note(worker, entry.at, Sign.WISH)
        for action in entry.actions:
            match action:
                case events.KillWorker(worker, reason):
                    happened.kills.setdefault(worker, (entry.at, str(reason)))
                case events.BreakWorld(generation=generation):
                    happened.broken.append((entry.at, generation))
                case events.PublishWorld(generation=generation, members=members):
                    workers = frozenset(member.worker for member in members)
                    happened.worlds.append((entry.at, generation, workers))
                case events.ReportRecovery():
                    happened.at_work.append((entry.at, action))
                case events.EndJob(reason=reason):
                    happened.ended = (entry.at, str(reason))
    return happened


def _outcome(each: Injected, until: float, happened: _Happened, began_at: float) -> FaultOutcome:
    outcome = FaultOutcome(
        each.number,
        max(0.0, each.at - began_at),
        each.what,
        str(each.worker),
        each.rank,
        each.size,
        "",
    )
    since = each.at - EARLY_S
    if happened.ended is not None:
        until = min(until, happened.ended[0])  # later exits are due to the end of the job
    noticed = [
        (at, what)
        for at, what in happened.noticed.get(each.worker, [])
        if since <= at <= until
        and (what is not Sign.COLLECTIVE or each.kind in ("cut", "partition"))
    ]
    if noticed:
        outcome.noticed_ms = _ms(noticed[0][0] - each.at)
    if each.kind == SPOILS_FILE:
        outcome.outcome = each.note
        return outcome
    exit_at, code = happened.exits.get(each.worker, (None, 0))
    worlds = [world for world in happened.worlds if world[0] <= until]
    if exit_at is not None and since <= exit_at <= until:
        _gone(outcome, each, exit_at, code, happened)
    elif each.kind == "leave" and any(each.at <= w[0] and each.worker not in w[2] for w in worlds):
        # The world changes immediately, but the victim's process needs some time to exit.
        _gone(outcome, each, worlds[-1][0], 0, happened)
    elif each.kind == "cut":
        _cut(outcome, each, happened)
    elif until <= (each.until or each.at):
        outcome.outcome = "the job ended meanwhile"
    elif each.kind in ("kill", "leave"):
        outcome.outcome = "it did not exit"
    elif each.kind in FLIPPED:
        outcome.outcome = (
            "not detected: no checkpoint was written afterwards, or the flipped bit had no effect"
        )
    elif any(what is Sign.FROZEN for _, what in noticed):
        outcome.outcome = (
            "was detected as frozen, no worker waited for it, and it continued afterwards"
        )
    elif noticed:
        outcome.outcome = f"noticed by {noticed[0][1].value}; it continued afterwards"
    elif each.kind == "slow":
        outcome.outcome = "training continued, slower"
    else:
        outcome.outcome = "the other workers waited, and it continued afterwards"
    return outcome


def _gone(outcome: FaultOutcome, each: Injected, at: float, code: int, happened: _Happened) -> None:
    how = "it left" if code == 0 else "lost"
    kill = happened.kills.get(each.worker)
    if kill is not None and kill[0] <= at:
        how = f"fenced {kill[0] - each.at:.1f} s later ({kill[1]})"
    was_member = any(
        each.worker in members for when, _, members in happened.worlds if when <= max(at, each.at)
    )
    if not was_member:
        outcome.outcome = f"{how}; it had not joined a world yet"
        return
    # A leaving worker exits only after the world has changed, while a killed worker exits before.
    since = min(at, each.at)
    worlds = [w for w in happened.worlds if w[0] >= since and each.worker not in w[2]]
    _back(outcome, each, how, worlds[0][1] if worlds else None, happened)


def _cut(outcome: FaultOutcome, each: Injected, happened: _Happened) -> None:
    broken = [b for b in happened.broken if each.at - EARLY_S <= b[0] <= each.at + AFTERMATH_S]
    if not broken:
        outcome.outcome = "no collective broke"
        return
    outcome.noticed_ms = _ms(broken[0][0] - each.at)
    worlds = [w for w in happened.worlds if w[0] >= broken[0][0]]
    _back(outcome, each, "the ring broke", worlds[0][1] if worlds else None, happened)


def _back(
    outcome: FaultOutcome, each: Injected, how: str, generation: int | None, happened: _Happened
) -> None:
    if generation is not None:
        for at, done in happened.at_work:
            if done.generation >= generation:
                outcome.back_ms, outcome.generation = _ms(at - each.at), done.generation
                more = ", after another fault" if done.generation > generation else ""
                size = f"{done.size} worker{'s' if done.size > 1 else ''}"
                outcome.outcome = f"{how}; {size} continued training{more}"
                return
    ended = f": {happened.ended[1]}" if happened.ended is not None else ""
    outcome.outcome = f"{how}; no world trained afterwards, the job ended{ended}"


def _ms(seconds: float) -> float:
    return max(0.0, round(seconds * 1e3, 1))
