"""Journals under construction, for tests of their checks: each line is given explicitly, without decisions."""

from __future__ import annotations

import pytest

from elastic.chaos.invariants.invariants import BrokenInvariant, Invariants, Summary
from elastic.driver.events import (
    Action,
    BreakWorld,
    EndJob,
    Event,
    FinishWorld,
    Member,
    PublishWorld,
    StartWorker,
    TimePassed,
    WorkerDigested,
    WorkerExited,
    WorkerReturned,
)
from elastic.driver.membership.scheduling.rank_order import places
from elastic.driver.reasons import Reason, ReasonKind, as_sentence, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Place, Worker
from harness.conversation import connected, exited, hosts, ready, resumed, store, worker

PLACE = Place(0, 1, 0, 1, 0, 1)


def started(name: str) -> StartWorker:
    return StartWorker(worker(name), PLACE, because(ReasonKind.FIRST_START))


def world(
    generation: int, *names: str, holders: int = 0, commit: tuple[int, int] | None = None
) -> PublishWorld:
    workers = [worker(name) for name in names]
    members = [Member(w, p) for w, p in zip(workers, places(workers), strict=True)]
    held = Commit(*commit) if commit else None
    return PublishWorld(generation, members, store(names[0]), holders, held, as_sentence("because"))


def broken(generation: int, *names: str) -> BreakWorld:
    return BreakWorld(generation, [worker(name) for name in names], as_sentence("because"))


def digested(name: str, commit: tuple[int, int], digest: int = 0xA, **fields) -> Event:
    return WorkerDigested(worker(name), commit[0], Commit(*commit), digest, **fields)


def returned_from(generation: int, *, members: int) -> Reason:
    return because(ReasonKind.ALL_RETURNED, members=members, generation=generation)


class ScriptedJournal:
    """A journal under construction: a line every 10 ms."""

    def __init__(self, **settings) -> None:
        np = settings.setdefault("np", 3)
        limits = {"workers_min": 2, "workers_max": np, "elastic": True}
        self.samples = settings.pop("samples", 0)
        self.settings = Settings(**limits | settings)
        self.lines: list[tuple[float, Event, list[Action]]] = []
        self.now = 0.0
        self.invariants = Invariants(self.settings, samples=self.samples)

    def line(self, event: Event, *actions: Action, after: float = 0.01) -> ScriptedJournal:
        self.now += after
        self.lines.append((self.now, event, list(actions)))
        self.invariants.saw(*self.lines[-1])
        return self

    def lines_of(self, *events: Event) -> ScriptedJournal:
        for event in events:
            self.line(event)
        return self

    def end(self, code: int = 0, reason: str = "") -> Summary:
        """End with success, after all members have returned; or with this exit code."""
        if code:
            self.line(TimePassed(), EndJob(code, as_sentence(reason)))
        else:
            self.all_return()
        self.invariants.finish()
        return self.invariants.summary

    def all_return(self) -> ScriptedJournal:
        """Every live member returns, and the job ends with success."""
        present = self.present()
        *others, last = [member.worker for member in present.members if self.lives(member.worker)]
        for each in others:
            self.line(WorkerReturned(each, present.generation))
        return self.line(
            WorkerReturned(last, present.generation),
            FinishWorld(present.generation, [*others, last]),
            EndJob(0, returned_from(present.generation, members=len(others) + 1)),
        )

    def present(self) -> PublishWorld:
        """Return the newest world."""
        actions = [action for _, _, answer in self.lines for action in answer]
        return [action for action in actions if isinstance(action, PublishWorld)][-1]

    def lives(self, each: Worker) -> bool:
        return not any(isinstance(e, WorkerExited) and e.worker == each for _, e, _ in self.lines)

    def breaks(self, invariant: str, event: Event, *actions: Action, after: float = 0.01) -> str:
        """Expect the next line to break this invariant."""
        with pytest.raises(BrokenInvariant, match=f"^{invariant}: ") as caught:
            self.line(event, *actions, after=after)
        assert f"line {len(self.lines) + 1}, at " in str(caught.value)
        return str(caught.value)


def training(workers: int = 3, names: list[str] | None = None, **settings) -> ScriptedJournal:
    """h:0, h:1, ... train in generation 2, or these workers."""
    names = names or [f"h:{slot}" for slot in range(workers)]
    told = ScriptedJournal(np=workers, **settings)
    told.line(hosts(h=workers, g=workers), *map(started, names))
    told.lines_of(*map(connected, names))
    told.lines_of(*(ready(name, 0, running=False) for name in names[1:]))
    told.line(ready(names[0], 0, running=False), world(1, *names))
    told.lines_of(*(ready(name, 1) for name in names[1:]))
    told.line(ready(names[0], 1), world(2, *names))
    return told.lines_of(*(resumed(name, 2) for name in names))


def gathering(workers: int = 3, commit: tuple[int, int] = (2, 5), **settings) -> ScriptedJournal:
    """h:2 was killed; h:1 is ready and has the commit."""
    told = training(workers, **settings)
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    return told.line(ready("h:1", 2, commit))
