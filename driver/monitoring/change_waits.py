"""Measurement of the time that planned changes wait for the next commit, at which workers join and leave.

Pure: no I/O, no clock.

    PrepareChange  --WAIT_S-->  wait: workers to join, workers to leave, seconds
    a member reaches a commit, the world fails or ends, or the change is canceled  -->  over

The live page, ``status``, ``explain`` and the report read the same `ChangeWaits` object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.driver import events
from elastic.driver.monitoring.job_view import JobView, Stage, ViewReader, WorkerView
from elastic.driver.reasons import Reason, ReasonKind
from elastic.protocol.messages import Worker

WAIT_S = 10.0  # Shorter waits are not recorded, because a single step may be slow.
KEPT = 200  # maximum number of past waits that are stored
NAMED = 8  # maximum number of joining workers that are listed


@dataclass(frozen=True)
class ChangeWait:
    """Wait of one planned change for a commit.

    Args:
        until: end of the wait, or the current time if the wait is in progress.
        reached: whether a member reached a commit. None while the wait is in progress.
    """

    since: float
    until: float
    joining: tuple[Worker, ...]
    leaving: int
    reached: bool | None = None

    @property
    def seconds(self) -> float:
        return self.until - self.since

    def facts(self) -> dict[str, Any]:
        """Return the wait as JSON-serializable values."""
        return {
            "since": self.since,
            "for_s": self.seconds,
            "joining": len(self.joining),
            "leaving": self.leaving,
            "workers": [str(worker) for worker in self.joining[:NAMED]],
            "reached": self.reached,
        }


class ChangeWaits(ViewReader):
    """Record of the planned changes of a job that waited at least WAIT_S seconds for a commit.

    Attributes:
        count: number of waits that have ended.
    """

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.past: deque[ChangeWait] = deque(maxlen=KEPT)
        self.count = 0
        # time at which the current change was requested; None if no change is planned
        self._since: float | None = None
        self._leaving = 0
        # joining workers that have not exited since the change was requested
        self._joining: dict[Worker, None] = {}
        view.follow(self)

    def current(self, now: float) -> ChangeWait | None:
        """Return the wait of the current planned change, or None if no change is waiting."""
        if self._since is None or now - self._since < WAIT_S:
            return None
        if not (self._joining or self._leaving):
            return None  # all joining workers have exited
        return ChangeWait(self._since, now, tuple(self._joining), self._leaving)

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        if self._since is None:
            return
        ready: Sequence[Worker] = ()
        match event:
            case events.WorkerReady(worker):
                ready = (worker,)
            case events.WorkersReady(workers):
                ready = workers
        for worker in ready:
            if worker in self.view.ranks:
                # A member has reached a commit, so this wait is over. If other members do not reach it, `Stalls`
                # detects that.
                self._over(now, reached=True)
                break
            self._add(self.view.workers.get(worker))
        for worker in self.view.exited:
            self._joining.pop(worker, None)

    def decided(self, action: events.Action, now: float) -> None:
        match action:
            case events.PrepareChange(reason=reason):
                self._since, self._leaving = now, _leaving(reason)
                self._joining = {}
                for known in self.view.workers.values():
                    self._add(known)
            case events.PublishWorld():
                self._over(now, reached=True)
            case (
                events.CallOffChange()
                | events.BreakWorld()
                | events.FinishWorld()
                | events.EndJob()
            ):
                self._over(now, reached=False)
            case _:
                pass

    def _over(self, now: float, *, reached: bool) -> None:
        wait = self.current(now)
        self._since = None
        if wait is not None:
            self.past.append(replace(wait, reached=reached))
            self.count += 1

    def _add(self, known: WorkerView | None) -> None:
        if known is not None and known.stage is Stage.READY and known.running and not known.member:
            self._joining[known.worker] = None


def _leaving(reason: Reason) -> int:
    causes = reason.facts.get("causes")
    each = causes if isinstance(causes, list) else [reason]
    return sum(isinstance(one, Reason) and one.kind is ReasonKind.LEAVES for one in each)
