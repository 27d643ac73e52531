"""The hosts and workers of a live page: one cell for each slot, with its latest worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elastic.driver.membership.failure_detection.root_cause import describe_exit
from elastic.driver.monitoring.dashboard.page_state import PageState
from elastic.driver.monitoring.stalls import Stall
from elastic.driver.sinks import Usage
from elastic.protocol.messages import Worker

STATES = (
    "starting",  # the process was ordered but has not called init()
    "joining",  # init() was called, and the worker waits for a place
    "training",
    "waiting",  # it has been inside a collective for a second or longer
    "stalled",  # others have waited for it for some time; see `stalls`
    "recovering",  # its world broke
    "frozen",
    "standby",
    "leaving",
    "done",  # its function returned, or it was released
    "lost",
)
HELD_UP = 8  # workers listed that others wait for
AWAITED = 4  # stalled ranks named for each worker that waits
MUCH = 0.05  # share of time: a worker that waits this much less than the others is listed


@dataclass
class Cell:
    """One slot and its latest worker."""

    worker: Worker
    state: str
    since: float
    pid: int = 0
    rank: int | None = None
    note: str = ""
    frozen: str = ""
    inside: float | None = None  # time since which it waits in a collective
    share: float | None = None  # share of its time spent waiting, in its last report
    step_s: float | None = None  # time from one commit to the next, in its last report
    own_s: float | None = None  # part of that time outside collectives
    usage: Usage = field(default_factory=Usage)  # last measurement of its host
    awaits: tuple[int, ...] = ()  # ranks that it waits for, in a stall
    stalled: str | None = None  # script line at which others wait for it; empty: unknown line

    def row(self) -> dict[str, Any]:
        state, note = self.state, self.frozen or self.note
        if state == "training":
            state = "frozen" if self.frozen else "waiting" if self.inside is not None else state
            if self.stalled is not None:
                state = "stalled"
                note = "; ".join(filter(None, [self.stalled and f"at {self.stalled}", self.frozen]))
            elif self.awaits:
                state = "waiting"
                note = f"waits for {_ranks(self.awaits)}"
        elif self.frozen and state not in ("lost", "done"):
            state = "frozen"
        return {
            "host": self.worker.host,
            "slot": self.worker.slot,
            "start": self.worker.incarnation,
            "pid": self.pid,
            "rank": self.rank,
            "state": state,
            "since": self.since if self.inside is None else self.inside,
            "note": note,
            "awaits": self.awaits,
            "step_s": self.step_s,
            "own_s": self.own_s,
            "usage": msgspec.structs.asdict(self.usage),
        }


class WorkerGrid:
    """The tables ``hosts`` and ``workers`` of a page. Times are on the model's clock."""

    def __init__(self, state: PageState) -> None:
        self.state = state
        self.members: set[Worker] = set()
        self._shows_stall = False
        self._cells: dict[str, Cell] = {}

    def __len__(self) -> int:
        return len(self._cells)

    # ---- workers

    def start(self, worker: Worker, now: float, state: str = "starting") -> Cell:
        """Record a new process in its slot."""
        cell = self._cells[slot_of(worker)] = Cell(worker, state, now)
        if worker.host not in self.state.tables["hosts"]:
            self.host(worker.host, slots=0)
        self._show(cell)
        return cell

    def move(self, worker: Worker, state: str, now: float, note: str = "") -> None:
        cell = self._of(worker)
        if cell is None or (cell.state == "lost" and state != "lost"):
            return  # late reports are possible
        if cell.state == "done" and state not in ("done", "lost"):
            return
        if (cell.state, cell.note) != (state, note):
            cell.since = now if cell.state != state else cell.since
            cell.state, cell.note = state, note
            self._show(cell)

    def change(self, worker: Worker, **fields: Any) -> None:
        """Set fields of a worker's cell. A change of the share alone is not shown, since it changes often."""
        cell = self._of(worker)
        if cell is None:
            return
        shown = [name for name, new in fields.items() if getattr(cell, name) != new]
        for name, new in fields.items():
            setattr(cell, name, new)
        if shown and shown != ["share"]:
            self._show(cell)

    def exited(self, worker: Worker, code: int, reason: str, now: float) -> None:
        cell = self._of(worker)
        if cell is None:
            return
        cell.inside, cell.frozen, cell.usage = None, "", Usage()
        if cell.state in ("leaving", "done") or code == 0:
            self.move(worker, "done", now, cell.note)
        else:
            ended = f"ended with {describe_exit(code)}"
            fenced = f"{cell.note}; " if cell.state == "lost" and cell.note else ""
            self.move(worker, "lost", now, f"{fenced}{reason or ended}")

    def published(self, members: Sequence[Worker], now: float) -> None:
        """Record a new world; ``members`` in rank order."""
        for worker in self.members - set(members):
            self.change(worker, rank=None)
        self.members = set(members)
        for rank, worker in enumerate(members):
            if self._of(worker) is None:
                self.start(worker, now, "training")
            self.change(worker, rank=rank, inside=None, share=None, stalled=None, awaits=())
            self.change(worker, step_s=None, own_s=None)
            self.move(worker, "training", now)
        self._forget_exited()

    # ---- hosts

    def listed(self, hosts: Mapping[str, int]) -> None:
        """Apply a new list from discovery."""
        for order, (host, slots) in enumerate(hosts.items()):
            self.host(host, slots=slots, order=order)
        for host in self.state.tables["hosts"].keys() - hosts.keys():
            self.host(host, slots=0)
        self._forget_exited()

    def host(self, host: str, **fields: Any) -> None:
        """Set fields of a host's row. Hosts that were never listed are ignored."""
        table = self.state.tables["hosts"]
        if host not in table and "slots" not in fields:
            return
        before = table.get(host, {"slots": 0, "state": "up", "order": len(table), "note": ""})
        if (row := {**before, **fields}) != table.get(host):
            self.state.row("hosts", host, row)

    def lost_host(self, host: str, reason: str, now: float) -> None:
        self.host(host, state="lost", note=reason)
        for cell in [each for each in self._cells.values() if each.worker.host == host]:
            self.move(cell.worker, "lost", now, f"its host was lost: {reason}")

    def _forget_exited(self) -> None:
        """Remove slots that are not listed and whose worker has exited."""
        hosts = self.state.tables["hosts"]
        for key, cell in [*self._cells.items()]:
            listed = cell.worker.slot < hosts.get(cell.worker.host, {"slots": 0})["slots"]
            if not listed and cell.state in ("lost", "done"):
                del self._cells[key]
                self.state.row("workers", key, None)
        alive = {cell.worker.host for cell in self._cells.values()}
        for host in [host for host, row in hosts.items() if not row["slots"] and host not in alive]:
            self.state.row("hosts", host, None)

    # ---- workers that are waited for

    def held_up(self, awaited: Stall | None) -> list[dict[str, Any]]:
        """Return the workers that hold up others; see `page_state`. ``awaited``: the current stall, if any."""
        members = [cell for cell in self._cells.values() if cell.worker in self.members]
        now = []
        if awaited is not None:
            others = {"others": awaited.others, "since": awaited.since}
            now = [
                {"worker": slot_of(each.worker), "rank": each.rank, **others}
                for each in awaited.culprits
            ]
        return [*now, *_slow(members)][:HELD_UP]

    def paced(self, worker: Worker, waited_s: float, over_s: float, commits: int) -> None:
        """Record the pace that a worker reported for the last ``over_s`` seconds."""
        own_s = max(0.0, over_s - waited_s)
        self.change(worker, share=min(1.0, waited_s / over_s))
        if commits > 0:
            self.change(
                worker,
                step_s=float(f"{over_s / commits:.3g}"),
                own_s=float(f"{own_s / commits:.3g}"),
            )

    def slowest(self) -> dict[str, Any] | None:
        """Return the member whose own part of a step is longest; see `page_state`.

        None: fewer than two have reported.
        """
        cells = [cell for cell in self._cells.values() if cell.worker in self.members]
        ranked = sorted(
            (cell.own_s, -(cell.rank or 0), cell) for cell in cells if cell.own_s is not None
        )
        if len(ranked) < 2:
            return None
        own_s, _, cell = ranked[-1]
        median_s = ranked[(len(ranked) - 1) // 2][0]
        where = {"worker": slot_of(cell.worker), "rank": cell.rank}
        return {**where, "own_s": own_s, "step_s": cell.step_s, "median_s": median_s}

    def stalled(self, stall: Stall | None) -> None:
        """Show the workers that hold up the others, their script lines, and the workers that wait for them."""
        if stall is None and not self._shows_stall:
            return
        self._shows_stall = stall is not None
        culprits = () if stall is None else stall.culprits
        lines = {each.worker: each.line for each in culprits}
        awaited = tuple(each.rank for each in culprits[:AWAITED])
        for worker in self.members:
            cell = self._of(worker)
            inside = cell is not None and worker not in lines and cell.inside is not None
            self.change(worker, stalled=lines.get(worker), awaits=awaited if inside else ())

    def _of(self, worker: Worker) -> Cell | None:
        cell = self._cells.get(slot_of(worker))
        return cell if cell is not None and cell.worker == worker else None

    def _show(self, cell: Cell) -> None:
        self.state.row("workers", slot_of(cell.worker), cell.row())


def _slow(members: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the workers that wait less than the others, from their reports on the last half minute."""
    shares = sorted(cell.share for cell in members if cell.share is not None)
    if len(shares) < 2:
        return []
    median = shares[len(shares) // 2]
    slow = sorted((c.share, c.rank or 0, c) for c in members if c.share is not None)
    return [
        {
            "worker": slot_of(cell.worker),
            "rank": cell.rank,
            "share": round(share, 3),
            "median": round(median, 3),
        }
        for share, _, cell in slow[:HELD_UP]
        if median - share > MUCH
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def slot_of(worker: Worker) -> str:
    """Return ``h:2``, the key of a worker's row."""
    return f"{worker.host}:{worker.slot}"
