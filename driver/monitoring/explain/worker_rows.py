"""The activity of each slot of a job over time: rows of spans for a timeline, sizes of its worlds, recoveries.

Pure.

    span      [start, end, state, incarnation, rank]      seconds; an index into STATES; rank -1 outside a world
    world     [at, size, generation]
    recovery  [began, ended, generation, kind]            from the cause to the first collective of all
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.driver import events
from elastic.driver.monitoring.stalls import Stall
from elastic.protocol.messages import Worker

STATES = (
    "starting",
    "joining",
    "training",
    "recovering",
    "frozen",
    "standby",
    "leaving",
    "done",
    "lost",  # it raised or its host was lost; its process may still run
    # Parts of the training time, from the stalls passed to `table`.
    "waiting",
    "stalled",
)
SPANS = 200_000  # maximum of all rows; later ones are dropped
Span = list[float | int]


@dataclass
class _Now:
    """Current span of a worker that has not exited."""

    row: str
    since: float
    state: str
    rank: int = -1
    before: str = ""  # state before it was frozen


class WorkerRows:
    """Activity of the slots of one job."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Span]] = {}  # by host:slot
        self.worlds: list[tuple[float, int, int]] = []
        self.recoveries: list[tuple[float, float, int, str]] = []
        self.deaths: list[tuple[float, str, int]] = []  # time, row, exit code
        self.left_out = 0
        self._now: dict[Worker, _Now] = {}
        self._spans = 0
        self._over = False

    def note(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        """Record an event and its actions."""
        self._happened(event, now)
        for action in actions:
            self._decided(action, now)

    def adopt(self, members: Iterable[tuple[Worker, int]], generation: int, now: float) -> None:
        """Begin in the middle of a job, in this world."""
        for worker, rank in members:
            self._begin(worker, "training", now).rank = rank
        self.worlds.append((now, len(self._now), generation))

    def table(self, until: float, stalls: Iterable[Stall] = ()) -> dict[str, list[Span]]:
        """Return all rows, with unfinished spans up to ``until``.

        In a stall, its culprits are shown as stalled, and the other members as waiting.
        """
        rows = {row: [*spans] for row, spans in self.rows.items()}
        for worker, now in self._now.items():
            rows[now.row].append(_span(worker, now, max(until, now.since)))
        ordered = sorted(stalls, key=lambda stall: stall.since)
        begins, ends = [each.since for each in ordered], [each.until for each in ordered]
        for row, spans in rows.items() if ordered else ():
            rows[row] = [
                part
                for span in spans
                for part in _parted(
                    span, ordered[bisect_right(ends, span[0]) : bisect_left(begins, span[1])]
                )
            ]
        return rows

    def _happened(self, event: events.Event, now: float) -> None:
        match event:
            case events.WorkerConnected(worker):
                self._move(worker, "joining", now)
            case events.WorkerFrozen(worker):
                if worker in self._now:
                    before = self._now[worker].state
                    self._move(worker, "frozen", now)
                    self._now[worker].before = before
            case events.WorkerThawed(worker):
                if worker in self._now and self._now[worker].state == "frozen":
                    self._move(worker, self._now[worker].before or "joining", now)
            case events.WorkerRaised(worker):
                self._move(worker, "lost", now)
            case events.WorkerReturned(worker):
                self._move(worker, "done", now)
            case events.WorkerExited(worker, code):
                self._end(worker, now, code)
            case events.HostLost(host):
                for worker in [each for each in self._now if each.host == host]:
                    self._end(worker, now, -9)
            case events.HostReported(host, alive, known) if known is not None:
                for worker in [each for each in self._now if each.host == host]:
                    if worker in known and worker not in alive:
                        self._end(worker, now, -9)
            case _:
                pass

    def _decided(self, action: events.Action, now: float) -> None:
        match action:
            case events.StartWorker(worker):
                self._begin(worker, "starting", now)
            case events.TellStandby(worker):
                self._move(worker, "standby", now)
            case events.LetGo(worker):
                self._move(worker, "leaving", now)
            case events.BreakWorld(_, members):
                for worker in members:
                    if worker in self._now and self._now[worker].state == "training":
                        self._move(worker, "recovering", now)
            case events.PublishWorld(generation, members):
                for member in members:
                    self._move(member.worker, "training", now, member.place.rank)
                self.worlds.append((now, len(members), generation))
            case events.ReportRecovery(generation, kind, total_ms=total_ms):
                self.recoveries.append((now - total_ms / 1e3, now, generation, kind))
            case events.EndJob():
                self._over = True
            case _:
                pass

    def _begin(self, worker: Worker, state: str, now: float) -> _Now:
        row = f"{worker.host}:{worker.slot}"
        self.rows.setdefault(row, [])
        self._now[worker] = _Now(row, now, state)
        return self._now[worker]

    def _move(self, worker: Worker, state: str, now: float, rank: int | None = None) -> None:
        at = self._now.get(worker)
        if at is None:
            at = self._begin(worker, state, now)
        rank = at.rank if rank is None else rank
        if at.state != state or at.rank != rank:
            self._keep(worker, at, now)
            at.since, at.state, at.rank = now, state, rank

    def _end(self, worker: Worker, now: float, code: int) -> None:
        at = self._now.pop(worker, None)
        if at is None:
            return
        self._keep(worker, at, now)
        if code and not self._over and at.state != "leaving":
            self.deaths.append((now, at.row, code))

    def _keep(self, worker: Worker, at: _Now, now: float) -> None:
        if self._spans >= SPANS:
            self.left_out += 1
            return
        self._spans += 1
        self.rows[at.row].append(_span(worker, at, now))


def _parted(span: Span, stalls: Sequence[Stall]) -> list[Span]:
    """Split a span into the parts before, in and after each stall."""
    start, end, state, incarnation, rank = span
    if STATES[int(state)] != "training" or rank < 0:
        return [span]
    parts: list[Span] = []
    for stall in stalls:
        culprit = any(each.rank == rank for each in stall.culprits)
        inside = STATES.index("stalled" if culprit else "waiting")
        begin, until = max(start, stall.since), min(end, stall.until)
        parts += [
            [start, begin, state, incarnation, rank],
            [begin, until, inside, incarnation, rank],
        ]
        start = until
    parts.append([start, end, state, incarnation, rank])
    return [part for part in parts if part[1] > part[0]]


def _span(worker: Worker, at: _Now, end: float) -> Span:
    return [at.since, end, STATES.index(at.state), worker.incarnation, at.rank]
