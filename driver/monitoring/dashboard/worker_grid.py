"""Grid of the hosts and workers on a live page. Pure: no I/O, no clock.

Each cell shows a slot and its latest worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elastic.driver.events import WorkerExited
from elastic.driver.membership.worlds.root_cause import describe_exit
from elastic.driver.monitoring.dashboard.page_state import PageState
from elastic.driver.monitoring.job_view import JobView, Stage, WorkerView
from elastic.driver.monitoring.stalls import Stall
from elastic.driver.output_interfaces import Usage
from elastic.driver.reasons import brief
from elastic.protocol.messages import Worker

STATES = (
    "starting",  # the driver has started the worker, which has not called init() yet
    # the worker called init() and waits for a world, or is in a world but has not entered elastic.run
    "joining",
    "training",
    "waiting",  # the worker has been inside a collective for at least one second
    "stalled",  # other workers are waiting for this worker; see `stalls`
    "recovering",  # the worker's world failed
    "frozen",
    "standby",
    "leaving",
    "done",  # the worker's training function returned, or the driver released the worker
    "lost",
)
_STATES = {
    Stage.STARTING: "starting",
    Stage.CONNECTED: "joining",
    Stage.READY: "joining",
    Stage.STANDBY: "standby",
    # the worker's world has ended, and the next world does not include the worker
    Stage.IN_WORLD: "recovering",
    Stage.RETURNED: "done",
    Stage.LEAVING: "leaving",
    Stage.KILLED: "lost",
}
_IN_WORLD = (Stage.READY, Stage.IN_WORLD)
NOTE = 500  # maximum number of characters of a note
HELD_UP = 8  # maximum number of entries in `held_up`
AWAITED = 4  # maximum number of awaited ranks listed for each waiting worker
# A worker is listed if the fraction of time that it waits is lower than that of the others by at least this much.
MUCH = 0.05


@dataclass
class Cell:
    """Cell of the grid: a slot and its latest worker."""

    key: str  # key of the worker's row in the table, such as ``h:2``
    worker: Worker
    process: WorkerView
    state: str
    since: float
    note: str = ""
    exited: bool = False
    inside: float | None = None  # start of the worker's current wait in a collective
    # fraction of time spent waiting in collectives, from the worker's last report
    share: float | None = None
    step_s: float | None = None  # seconds between two commits, as last reported
    own_s: float | None = None  # seconds of `step_s` spent outside collectives
    usage: Usage = field(default_factory=Usage)  # resource usage last measured on the worker's host
    awaits: tuple[int, ...] = ()  # ranks that the worker waits for in a stall
    # script line that this worker executes while others wait for it; empty if unknown, None if none wait
    stalled: str | None = None

    def row(self, rank: int | None) -> dict[str, Any]:
        """Return the row of the cell for the table ``workers``.

        Args:
            rank: rank of the worker in the newest world, or None if it is not a member.
        """
        how = None if self.exited else self.process.frozen
        frozen = "" if how is None else how or "it is not able to run"
        state, note = self.state, frozen or self.note
        if state in ("training", "joining"):
            state = "frozen" if frozen else "waiting" if self.inside is not None else state
            if self.stalled is not None:
                state = "stalled"
                note = "; ".join(filter(None, [self.stalled and f"at {self.stalled}", frozen]))
            elif self.awaits:
                state = "waiting"
                note = f"waits for {_ranks(self.awaits)}"
        elif frozen and state not in ("lost", "done"):
            state = "frozen"
        return {
            "host": self.worker.host,
            "slot": self.worker.slot,
            "start": self.worker.incarnation,
            "pid": self.process.pid,
            "rank": rank,
            "state": state,
            "since": self.since if self.inside is None else self.inside,
            "note": note,
            "awaits": self.awaits,
            "step_s": self.step_s,
            "own_s": self.own_s,
            "usage": msgspec.structs.asdict(self.usage),
        }


class WorkerGrid:
    """Writer of the tables ``hosts`` and ``workers`` of a live page. Times are in seconds on the model's clock."""

    def __init__(self, state: PageState, view: JobView) -> None:
        self.state = state
        self._view = view
        self._shows_stall = False
        self._cells: dict[str, Cell] = {}
        self._of_worker: dict[Worker, Cell] = {}  # the cells in `_cells`
        # Cells that changed since `update_rows`. Rows are built when a viewer reads them: a change of the world
        # changes each cell several times.
        self._changed: dict[str, Cell] = {}

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def changed(self) -> bool:
        """Whether changes of workers have not been written to the table ``workers`` yet."""
        return bool(self._changed)

    def update_rows(self) -> None:
        """Write the rows of all changed workers to the table ``workers``."""
        rows = self.state.tables["workers"]
        for key, cell in self._changed.items():
            row = cell.row(self._view.ranks.get(cell.worker))
            if row != rows.get(key):
                self.state.row("workers", key, row)
        self._changed.clear()

    # ---- workers

    def show(self, now: float, *, published: bool = False) -> None:
        """Update the rows of all workers that have changed in the view.

        Args:
            now: current time, in seconds.
            published: whether the last action published a new world.
        """
        prepares, changed, of_worker = self._view.prepares, self._changed, self._of_worker
        for process in self._view.touched:
            state, note = _state(process, prepares=prepares)
            cell = of_worker.get(process.worker) or self._new_cell(process, state, now)
            if cell is not None:
                if published and process.member:
                    cell.inside = cell.share = cell.stalled = cell.step_s = cell.own_s = None
                    cell.awaits = ()
                if cell.state != state or cell.note != note:
                    self._move(cell, state, note, now)
                changed[cell.key] = cell

    def _new_cell(self, process: WorkerView, state: str, now: float) -> Cell | None:
        """Return a new cell for a worker, or None if the slot's cell shows a later worker or the slot was removed."""
        worker, key = process.worker, slot_of(process.worker)
        before = self._cells.get(key)
        if before is None and state in ("lost", "done"):
            return None  # The slot was removed from the list of hosts.
        if before is not None:
            if before.worker.incarnation >= worker.incarnation:
                return None
            del self._of_worker[before.worker]
        cell = self._cells[key] = self._of_worker[worker] = Cell(key, worker, process, "", now)
        if worker.host not in self.state.tables["hosts"]:
            self.host(worker.host, slots=0)
        return cell

    def _move(self, cell: Cell, state: str, note: str, now: float) -> None:
        if cell.state == "lost" and state != "lost":
            return  # Ignore reports that arrive after the exit of the worker.
        if cell.state == "done" and state not in ("done", "lost"):
            return
        cell.since = now if cell.state != state else cell.since
        cell.state, cell.note = state, note

    def change(self, worker: Worker, **fields: Any) -> None:
        """Set fields of a worker's cell.

        If only the fraction of waiting time has changed, the row is not updated, because this value changes often.
        """
        cell = self._of(worker)
        if cell is None:
            return
        shown = [name for name, new in fields.items() if getattr(cell, name) != new]
        for name, new in fields.items():
            setattr(cell, name, new)
        if shown and shown != ["share"]:
            self._changed[cell.key] = cell

    def left(self, *workers: Worker) -> None:
        """Record that workers do not wait in a collective."""
        for cell in map(self._of_worker.get, workers):
            if cell is not None and cell.inside is not None:
                cell.inside = None
                self._changed[cell.key] = cell

    def exited(self, event: WorkerExited, now: float) -> None:
        why = event.reason or f"ended with {describe_exit(event.code)}"
        self._exited(event.worker, why, now, succeeded=event.code == 0)

    def lost(self, now: float, why: str) -> None:
        """Update the rows of workers whose loss was detected without an observed exit."""
        for worker in self._view.exited:
            self._exited(worker, why, now)

    def _exited(self, worker: Worker, why: str, now: float, *, succeeded: bool = False) -> None:
        cell = self._of(worker)
        if cell is None:
            return
        cell.inside, cell.exited, cell.usage = None, True, Usage()
        if succeeded or cell.state in ("leaving", "done"):
            self._move(cell, "done", cell.note, now)
        else:
            fenced = f"{cell.note}; " if cell.state == "lost" and cell.note else ""
            self._move(cell, "lost", f"{fenced}{why}", now)
        self._changed[cell.key] = cell

    def published(self, now: float) -> None:
        """Update the rows for a new world."""
        self.show(now, published=True)
        for worker in self._view.before.keys() - self._view.ranks.keys():
            cell = self._of(worker)
            if cell is not None:
                # Clear the rank in the worker's row, even if the worker has exited.
                self._changed[cell.key] = cell
        self._forget_exited()

    # ---- hosts

    def listed(self, hosts: Mapping[str, int]) -> None:
        """Apply a new list of hosts from discovery."""
        for order, (host, slots) in enumerate(hosts.items()):
            self.host(host, slots=slots, order=order)
        for host in self.state.tables["hosts"].keys() - hosts.keys():
            self.host(host, slots=0)
        self._forget_exited()

    def host(self, host: str, **fields: Any) -> None:
        """Set fields of a host's row. Hosts without a row are ignored unless ``slots`` is given."""
        table = self.state.tables["hosts"]
        if host not in table and "slots" not in fields:
            return
        before = table.get(host, {"slots": 0, "state": "up", "order": len(table), "note": ""})
        if (row := {**before, **fields}) != table.get(host):
            self.state.row("hosts", host, row)

    def lost_host(self, host: str, reason: str, now: float) -> None:
        self.host(host, state="lost", note=reason)
        self.lost(now, f"its host was lost: {reason}")

    def _forget_exited(self) -> None:
        hosts = self.state.tables["hosts"]
        over = [cell for cell in self._cells.values() if cell.state in ("lost", "done")]
        for cell in over:
            if cell.worker.slot >= hosts.get(cell.worker.host, {"slots": 0})["slots"]:
                del self._cells[cell.key], self._of_worker[cell.worker]
                self._changed.pop(cell.key, None)
                self.state.row("workers", cell.key, None)
        unlisted = [host for host, row in hosts.items() if not row["slots"]]
        alive = {cell.worker.host for cell in self._cells.values()} if unlisted else set()
        for host in unlisted:
            if host not in alive:
                self.state.row("hosts", host, None)

    # ---- workers that are waited for

    def held_up(self, awaited: Stall | None) -> list[dict[str, Any]]:
        """Return the workers that other workers wait for, as rows in the format of `page_state`.

        Args:
            awaited: the current stall, or None.
        """
        members = [cell for cell in self._cells.values() if cell.worker in self._view.ranks]
        now = []
        if awaited is not None:
            others = {"others": awaited.others, "since": awaited.since}
            now = [
                {"worker": slot_of(each.worker), "rank": each.rank, **others}
                for each in awaited.culprits
            ]
        return [*now, *_slow(members, self._view.ranks)][:HELD_UP]

    def paced(self, worker: Worker, waited_s: float, over_s: float, commits: int) -> None:
        """Record a worker's report of its commits and of its waiting time in the last ``over_s`` seconds."""
        own_s = max(0.0, over_s - waited_s)
        self.change(worker, share=min(1.0, waited_s / over_s))
        if commits > 0:
            self.change(
                worker,
                step_s=float(f"{over_s / commits:.3g}"),
                own_s=float(f"{own_s / commits:.3g}"),
            )

    def slowest(self) -> dict[str, Any] | None:
        """Return the member with the longest time per step outside collectives, in the format of `page_state`.

        Return None if fewer than two members have reported.
        """
        cells = [cell for cell in self._cells.values() if cell.worker in self._view.ranks]
        ranks = self._view.ranks
        ranked = sorted(
            (cell.own_s, -ranks[cell.worker], cell) for cell in cells if cell.own_s is not None
        )
        if len(ranked) < 2:
            return None
        own_s, _, cell = ranked[-1]
        median_s = ranked[(len(ranked) - 1) // 2][0]
        where = {"worker": cell.key, "rank": ranks[cell.worker]}
        return {**where, "own_s": own_s, "step_s": cell.step_s, "median_s": median_s}

    def stalled(self, stall: Stall | None) -> None:
        """Update the rows for a stall, or for its end.

        The rows show which workers wait, which workers they wait for, and the script lines of the awaited workers.
        """
        if stall is None and not self._shows_stall:
            return
        self._shows_stall = stall is not None
        culprits = () if stall is None else stall.culprits
        lines = {each.worker: each.line for each in culprits}
        awaited = tuple(each.rank for each in culprits[:AWAITED])
        for worker in self._view.ranks:
            cell = self._of(worker)
            inside = cell is not None and worker not in lines and cell.inside is not None
            self.change(worker, stalled=lines.get(worker), awaits=awaited if inside else ())

    def _of(self, worker: Worker) -> Cell | None:
        return self._of_worker.get(worker)


def _state(process: WorkerView, *, prepares: bool) -> tuple[str, str]:
    failure, stage = process.failure, process.stage
    if failure is None and process.member and not prepares and stage in _IN_WORLD:
        return "recovering" if process.recovering else "training", ""  # the usual case
    state = _STATES[stage]
    if stage is Stage.KILLED and process.why is not None:
        state = "leaving" if process.removed and failure is None else state
        return state, f"killed: {brief(process.why)}"
    if failure is not None:
        if failure.raised:
            return "lost", f"its script raised {failure.what}"[:NOTE]
        what = failure.what
        return "lost", f"its script called {what}" if what else "its state differs from the world's"
    return state, "" if process.why is None else brief(process.why)


def _slow(members: Sequence[Cell], ranks: Mapping[Worker, int]) -> list[dict[str, Any]]:
    shares = sorted(cell.share for cell in members if cell.share is not None)
    if len(shares) < 2:
        return []
    median = shares[len(shares) // 2]
    slow = sorted((c.share, ranks[c.worker], c) for c in members if c.share is not None)
    return [
        {
            "worker": cell.key,
            "rank": ranks[cell.worker],
            "share": round(share, 3),
            "median": round(median, 3),
        }
        for share, _, cell in slow[:HELD_UP]
        if median - share > MUCH
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def slot_of(worker: Worker) -> str:
    """Return the key of a worker's row, such as ``h:2``."""
    return f"{worker.host}:{worker.slot}"
