"""Recording of the activity of a job's slots over time, for a timeline: spans per slot, world sizes, and recoveries.

Pure: no I/O, no clock.

    span      [start, end, state, incarnation, rank]      seconds; an index into STATES; rank -1 outside a world
    world     [at, size, generation]
    recovery  [began, ended, generation, kind]            from the cause until all members completed a collective
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.driver import events
from elastic.driver.monitoring.job_view import JobView, Stage, ViewReader, WorkerView
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
    "lost",  # the worker raised an exception, or its host was lost; its process may still run
    # not recorded: `table` derives these states from the stalls passed to it
    "waiting",
    "stalled",
)
_STATES = {
    Stage.STARTING: "starting",
    Stage.CONNECTED: "joining",
    Stage.STANDBY: "standby",
    Stage.IN_WORLD: "training",
    Stage.RETURNED: "done",
    Stage.LEAVING: "leaving",
}
SPANS = 200_000  # maximum number of spans in all rows together; further spans are dropped
Span = list[float | int]


@dataclass
class _Now:
    row: str
    since: float
    state: str
    rank: int = -1


class WorkerRows(ViewReader):
    """Recorder of the activity of one job's slots over time."""

    def __init__(self, view: JobView) -> None:
        self.rows: dict[str, list[Span]] = {}  # spans of each slot, by ``host:slot``
        self.worlds: list[tuple[float, int, int]] = []
        self.recoveries: list[tuple[float, float, int, str]] = []
        self.deaths: list[tuple[float, str, int]] = []  # time, slot and exit code of each loss
        self.left_out = 0
        self._now: dict[Worker, _Now] = {}
        self._spans = 0
        self._view = view
        view.follow(self)

    def table(self, until: float, stalls: Iterable[Stall] = ()) -> dict[str, list[Span]]:
        """Return the spans of each slot. Spans that are still open end at ``until``.

        During a stall, the culprits are shown as stalled and the other members as waiting.
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

    def adopted(self, now: float) -> None:
        self._show(now)
        self.worlds.append((now, len(self._view.ranks), self._view.generation))

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        for known in self._view.exited.values():
            self._end(known, now)
        self._show(now)

    def decided(self, action: events.Action, now: float) -> None:
        self._show(now)
        match action:
            case events.PublishWorld(generation, members):
                self.worlds.append((now, len(members), generation))
            case events.ReportRecovery(generation, kind, total_ms=total_ms):
                self.recoveries.append((now - total_ms / 1e3, now, generation, kind))
            case _:
                pass

    def _show(self, now: float) -> None:
        for known in self._view.touched:
            worker, state = known.worker, _state(known)
            rank = -1 if known.rank is None else known.rank
            at = self._now.get(worker)
            if at is None:
                row = f"{worker.host}:{worker.slot}"
                self.rows.setdefault(row, [])
                self._now[worker] = _Now(row, now, state or "joining", rank)
            elif (at.state, at.rank) != (state or at.state, rank):
                self._keep(worker, at, now)
                at.since, at.state, at.rank = now, state or at.state, rank

    def _end(self, known: WorkerView, now: float) -> None:
        at = self._now.pop(known.worker, None)
        if at is None:
            return
        self._keep(known.worker, at, now)
        code = -9 if known.code is None else known.code
        if code and self._view.end is None and not known.removed:
            self.deaths.append((now, at.row, code))

    def _keep(self, worker: Worker, at: _Now, now: float) -> None:
        if self._spans >= SPANS:
            self.left_out += 1
            return
        self._spans += 1
        self.rows[at.row].append(_span(worker, at, now))


def _state(known: WorkerView) -> str | None:
    if known.failure is not None and known.failure.raised:
        return "lost"
    if known.removed and known.stage is Stage.KILLED:
        return "leaving"
    if known.frozen is not None and known.stage not in (Stage.RETURNED, Stage.LEAVING):
        return "frozen"
    if known.recovering and known.stage in (Stage.IN_WORLD, Stage.READY):
        return "recovering"
    if known.stage is Stage.IN_WORLD and not known.member:
        return None
    return _STATES.get(known.stage)


def _parted(span: Span, stalls: Sequence[Stall]) -> list[Span]:
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
