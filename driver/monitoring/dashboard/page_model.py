"""Model of a job's live page, built from the events and decisions that the journal contains. Pure: no I/O, no clock.

`PageModel` receives events and returns patches, each with the changes since the previous one. `page_state` defines
their format. The same model serves a running job and the replay of a journal:

    view = JobView()
    model = PageModel(TimeSpent(view), name="bert", command=header.command, least=1, most=4)
    state = applied(None, model.full(began))
    for entry in entries:
        at = entry.at - header.writer.at + header.writer.unix_s      # seconds since 1970
        view.note(entry.event, entry.actions, at)
        for action in entry.actions:                                # a live page shows the driver's log instead
            if isinstance(action, Report):
                model.line(action.level, "", action.text, at)
        state = applied(state, model.patch(at))                     # one frame; or send the patch to a page

The journal does not contain the values and the output of workers, so a replay does not show them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from elastic.driver import events
from elastic.driver.monitoring.change_waits import ChangeWaits
from elastic.driver.monitoring.dashboard.page_state import PageState, Patch
from elastic.driver.monitoring.dashboard.worker_grid import WorkerGrid, slot_of
from elastic.driver.monitoring.job_rates import JobRates
from elastic.driver.monitoring.job_view import ViewReader
from elastic.driver.monitoring.shard_status import (
    ShardStatus,
    as_sentence,
    recovery_facts,
    source_sentence,
)
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.output_interfaces import Usage
from elastic.driver.reasons import brief
from elastic.driver.settings import StartCheckpoint
from elastic.protocol.messages import Commit, Worker

LINES = 200  # maximum number of log lines per second; further lines are omitted
LINE = 500  # maximum number of characters shown of a line
NAMES = 8  # maximum number of reported names that are shown
STACKS = 8  # maximum number of workers whose stacks are stored
STACK_LIMIT = 16_000  # maximum number of characters stored for one worker's stacks
STACK_S = 5.0  # seconds after a request during which stderr lines count as part of the stacks
SLOW_S = 1.0  # minimum interval between two updates of all workers, in seconds
SLOW_EACH_S = 0.002  # seconds added to SLOW_S per worker
# evidence for a wrong gradient that the page shows
EVIDENCE = ("step", "shard", "digest", "right", "witnesses", "agreed")
# seconds without a report from a rank after which a higher rank's values are shown
REPORTED_S = 60.0


class PageModel(ViewReader):
    """Model of the live page of one job. After a driver failover, the new driver creates a new model.

    All times are in seconds since 1970.
    """

    def __init__(
        self,
        spent: TimeSpent,
        *,
        name: str,
        command: Sequence[str],
        least: int,
        most: int,
        begins: StartCheckpoint | None = None,
    ) -> None:
        self.state = PageState(
            {
                "job": {
                    "name": name,
                    "command": " ".join(command),
                    "phase": "starting",
                    "generation": 0,
                    "size": 0,
                    "least": least,
                    "most": most,
                    "began": None,
                    "ended": None,
                },
                "begins": None if begins is None else msgspec.structs.asdict(begins),
                "commit": None,
                "durable": None,
                "shards": None,
                "unhealthy": [],
                "quarantined": [],
                "mistakes": [],
                "merged": None,
                "rate": None,
                "steps": None,
                "samples": None,
                "steps_at": None,
                "stall": None,
                "change_wait": None,
                "goodput": None,
                "held_up": [],
                "slowest": None,
            }
        )
        self.now = 0.0
        self.spent = spent
        self.view = spent.view
        self._grid = WorkerGrid(self.state, self.view)
        self._looked_at = -math.inf  # time of the last update of all workers
        self._rates = JobRates(spent)
        # commit rate that the page currently shows
        self._measured: tuple[float, float] | None = None
        self._commit: Commit | None = None  # newest commit that the page currently shows
        self._shards = ShardStatus()
        self._change_waits = ChangeWaits(self.view)
        self._stalls_drawn = 0
        self._expects_stack: dict[Worker, float] = {}
        self._asked: set[Worker] = set()  # workers whose stacks an operator requested
        # Current second, the number of log lines in it, and the number of lines omitted since the limit was reached.
        self._second, self._lines, self._left_out = -math.inf, 0, 0
        self._metric_at: dict[str, float] = {}
        self.view.follow(self)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        self._at(now)
        if self.view.touched:
            self._grid.show(now)
        self._show_commit()
        self._happened(event)
        if self._shards.note(event, actions) and (facts := self._shards.facts) is not None:
            self.state.set("shards", {**facts, "text": as_sentence(facts)})
        if not actions:
            return
        if any(isinstance(action, events.AnswerRequest) and action.done for action in actions):
            self._requested(event)
        # affected workers or hosts, by action and reason
        decided: dict[tuple[str, str], list[str]] = {}
        for action in actions:
            description = _describe_action(action)
            if description is not None:
                what, target, why = description
                decided.setdefault((what, why), []).append(target)
        for (what, why), names in decided.items():
            self.state.add("decisions", [now, what, _some(names), why])

    def adopted(self, now: float) -> None:
        self._at(now)
        # After a driver failover, the job does not begin from a checkpoint: the workers hold newer commits.
        self.state.set("begins", None)
        self._grid.show(now)
        self._published()

    def report(self, rank: int, metrics: Mapping[str, Any], now: float) -> None:
        """Record the values that a worker reported. Only top-level numbers are shown."""
        self._at(now)
        table = self.state.tables["reported"]
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            known = table.get(name)
            if known is None and len(table) >= NAMES:
                continue
            if known is not None and known["rank"] < rank and now - known["at"] < REPORTED_S:
                continue
            shown = float(value) if math.isfinite(value) else None
            self.state.row("reported", name, {"rank": rank, "value": shown, "at": now})
            if shown is not None and now - self._metric_at.get(name, -math.inf) >= 1.0:
                self._metric_at[name] = now
                self.state.add("metrics", [now, name, shown])

    def uses(self, worker: Worker, usage: Usage, now: float) -> None:
        """Record the resource usage of a worker, measured on its host."""
        self._at(now)
        self._grid.change(worker, usage=usage)

    def line(self, level: str, source: str, text: str, now: float) -> None:
        """Add a log line to the page.

        Args:
            level: level of the line.
            source: the worker that printed the line. Empty for a line of the driver.
            text: the line.
            now: current time, in seconds.
        """
        self._at(now)
        if not self.has_room(now):
            self.leave_out(1)
            return
        self._lines += 1
        shown = text if len(text) <= LINE else f"{text[:LINE]}..."
        self.state.add("log", [now, level, source, shown])

    def has_room(self, now: float) -> bool:
        """Return whether the limit of log lines per second allows another line."""
        if now - self._second < 1.0:
            return self._lines < LINES
        if self._left_out:
            text = f"{self._left_out} lines omitted"
            self.state.add("log", [now, "warning", "", text])
        self._second, self._lines, self._left_out = now, 0, 0
        return True

    def leave_out(self, count: int) -> None:
        """Record that log lines were omitted because the limit of lines per second was reached."""
        self._left_out += count

    def expect_stack(self, worker: Worker, why: str, now: float, *, asked: bool = False) -> None:
        """Prepare to collect a requested stack dump from a worker's stderr.

        Args:
            worker: the worker.
            why: reason for the request.
            now: current time, in seconds.
            asked: whether an operator requested the stacks.
        """
        table = self.state.tables["stacks"]
        while len(table) >= STACKS:
            self.state.row("stacks", min(table, key=lambda key: table[key]["at"]), None)
        self._expects_stack[worker] = now + STACK_S
        (self._asked.add if asked else self._asked.discard)(worker)
        self.state.row("stacks", slot_of(worker), {"at": now, "why": why, "text": ""})

    def expects_stack(self, worker: Worker) -> bool:
        """Return whether a requested stack dump is expected on a worker's stderr."""
        return worker in self._expects_stack

    def was_asked(self, worker: Worker) -> bool:
        """Return whether an operator requested the latest stack dump of a worker."""
        return worker in self._asked

    def stderr(self, worker: Worker, text: str, now: float) -> None:
        """Add a line of a worker's stderr to its stacks, if a stack dump is expected."""
        until = self._expects_stack.get(worker)
        if until is None:
            return
        if now > until:
            del self._expects_stack[worker]
            return
        key = slot_of(worker)
        row = self.state.tables["stacks"].get(key)
        if row is not None and len(row["text"]) < STACK_LIMIT:
            self.state.row("stacks", key, {**row, "text": row["text"] + text[:LINE] + "\n"})

    # ---- queries ---------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Return whether anything has changed since the last patch."""
        return self.state.changed or self._grid.changed

    def worker_rows(self) -> Mapping[str, dict[str, Any]]:
        """Return the table ``workers`` with the rows of all changed workers."""
        self._grid.update_rows()
        return self.state.tables["workers"]

    def go_on(self, now: float) -> None:
        """Update the values that change over time without events."""
        self._look_at_all(now)

    def patch(self, now: float) -> Patch:
        """Return the changes of the page since the last patch."""
        self._look_at_all(now)
        self._grid.update_rows()
        return self.state.patch(now)

    def full(self, now: float) -> Patch:
        """Return the whole state of the page as a patch.

        Call `patch` first, because the state already includes pending changes.
        """
        self._look_at_all(now)
        self._grid.update_rows()
        return self.state.full(now)

    # ---- events ----------------------------------------------------------------------------------------------------

    def _happened(self, event: events.Event) -> None:
        grid, now = self._grid, self.now
        match event:
            case events.WorkerResumed() | events.WorkersResumed():
                pass  # frequent: skip the other cases
            case events.WorkersReady(workers):
                grid.left(*workers)
            case events.WorkerPaced(worker, over_s=over_s) if over_s > 0:
                grid.paced(worker, event.waited_s, over_s, event.commits)
            case events.WorkerProgressed(worker, inside=inside):
                grid.change(worker, inside=now - event.waited_s if inside else None)
            case events.WorkerReady(worker):
                grid.left(worker)
            case events.WorkerSpent():
                self._far(event)
            case events.WorkerFoundMistake(_, _, text):
                self.state.set("mistakes", [*self.view.mistakes.values()])
                self.line("warning", "", f"mistake in the script: {text}", now)
            case events.WorkerMerged():
                before = self.state.values["merged"]
                absent = event.absent
                self.state.set(
                    "merged",
                    {
                        "merges": event.merges,
                        "position": event.position,
                        "islands": event.islands,
                        "absent": absent,
                        "waited_s": self.view.islands.waited_s,
                        "rows": self.view.islands.rows(),
                    },
                )
                if absent and (before is None or before["absent"] != absent):
                    text = f"merge {event.merges} did not wait for islands {', '.join(absent)}"
                    self.line("warning", "", text, now)
            case events.WorkerReturned():
                self._job(phase="ending")
            case events.WorkerExited():
                grid.exited(event, now)
            case events.WorkerHealthChecked():
                self._show_health()
            case events.CheckpointMade(commit):
                self._note_commit("durable", commit, self.view.checkpoints)
            case events.HostsChanged(hosts):
                grid.listed(hosts)
                self._show_health()
            case events.HostLeaving(host, notice):
                grid.host(host, state="leaving", note=notice.text)
            case events.HostStaying(host):
                grid.host(host, state="up", note="")
            case events.HostReported(host, notice=notice):
                grid.lost(now, "it exited while its host was disconnected")
                grid.host(host, state="up" if notice is None else "leaving")
            case events.HostLost(host, reason):
                grid.lost_host(host, reason, now)
            case _:
                pass

    def _show_health(self) -> None:
        shown = [
            {
                "slot": f"{host}:{slot}",
                "outcome": each.outcome.value,
                "code": each.code,
                "line": each.line,
                "took_s": each.took_s,
            }
            for (host, slot), each in sorted(self.view.unhealthy.items())
        ]
        if shown != self.state.values["unhealthy"]:
            self.state.set("unhealthy", shown)
        quarantined = [
            {
                "place": host if why.facts.get("quarantine") == "host" else f"{host}:{slot}",
                "slot": f"{host}:{slot}",
                **{name: why.facts.get(name) for name in EVIDENCE},
            }
            for (host, slot), why in sorted(self.view.quarantined.items())
        ]
        if quarantined != self.state.values["quarantined"]:
            self.state.set("quarantined", quarantined)

    def _requested(self, event: events.Event) -> None:
        match event:
            case events.ScaleRequested(_, workers):
                self._job(most=workers)
            case events.DrainRequested(_, host, off):
                note = "" if off else "no new workers are started there"
                self._grid.host(host, state="up" if off else "drained", note=note)
                self._show_health()
            case _:
                pass

    # ---- decisions -------------------------------------------------------------------------------------------------

    def decided(self, action: events.Action, now: float) -> None:
        if isinstance(action, events.PublishWorld):
            self._published()
        elif self.view.touched:
            self._grid.show(now)
        match action:
            case events.KillWorker() | events.WelcomeWorker():
                self._show_health()
            case events.BreakWorld():
                self._job(phase="recovering")
            case events.PrepareChange():
                self._job(phase="changing")
            case events.CallOffChange():
                self._job(phase="training")
            case events.DumpStacks(worker, reason):
                self.expect_stack(worker, brief(reason), now)
            case events.ReportRecovery():
                recovery = {
                    "at": now,
                    "kind": action.kind,
                    "generation": action.generation,
                    "size": action.size,
                    "total_ms": action.total_ms,
                    "phases_ms": action.phases_ms,
                    "why": str(action.reason)[:LINE],
                    "shards": source_sentence(recovery_facts(action.shards)),
                }
                self.state.add("recoveries", recovery)
            case events.EndJob(code, reason):
                self._job(phase="ended", ended=[code, str(reason)[: 4 * LINE]])
            case _:
                pass

    def _published(self) -> None:
        size = len(self.view.ranks)
        self._grid.published(self.now)
        self._show_commit()
        if size != self.state.values["job"]["size"]:
            self.state.add("world", [self.now, size])
        phase = "starting" if self.view.prepares else "training"
        self._job(phase=phase, generation=self.view.generation, size=size)

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _at(self, now: float) -> None:
        self.now = now
        if self.state.values["job"]["began"] is None:
            self._job(began=now)

    def _look_at_all(self, now: float) -> None:
        """Update the values that depend on all workers, unless they were updated recently.

        These values also change without events.
        """
        self.now = now
        soon = now - self._looked_at < SLOW_S + SLOW_EACH_S * len(self._grid)
        if soon and self.spent.stalls.count == self._stalls_drawn and not self.spent.over:
            return
        self._looked_at = now
        values = self.state.values
        self.spent.go_on(now)
        goodput = {
            "at": self.spent.now,
            "workers": msgspec.structs.asdict(self.spent.total()),
            "job": self.spent.stretches(),
            "counts": dict(self.spent.count),
            "ratio": self.spent.goodput(),
        }
        if goodput != values["goodput"]:
            self.state.set("goodput", goodput)
        self._look_at_stalls(now)
        wait = None if self.spent.over else self._change_waits.current(now)
        change_wait = None if wait is None else wait.facts()
        if change_wait != values["change_wait"]:
            self.state.set("change_wait", change_wait)
        held_up = self._grid.held_up(self.spent.stalls.awaited(now))
        if held_up != values["held_up"]:
            self.state.set("held_up", held_up)
        slowest = self._grid.slowest()
        if slowest != values["slowest"]:
            self.state.set("slowest", slowest)

    def _look_at_stalls(self, now: float) -> None:
        stalls, stall, values = self.spent.stalls, self.spent.stall, self.state.values
        current_stall = None if stall is None else stall.facts()
        if current_stall != values["stall"]:
            self.state.set("stall", current_stall)
        self._grid.stalled(stall)
        new, self._stalls_drawn = stalls.count - self._stalls_drawn, stalls.count
        for each in [*stalls.past][-new:] if new else ():
            self.state.add("stalls", each.facts())
        self._show_steps(now)
        rate = self._rates.commits.value(now)
        rate = None if rate is None else round(rate, 3)
        if rate != values["rate"]:
            self.state.set("rate", rate)
            if rate is not None and rate < self.state.series["speed"][-1][1]:
                self.state.add("speed", [now, rate])

    def _job(self, **fields: Any) -> None:
        job = self.state.values["job"]
        if job["ended"] is not None:
            fields.pop("phase", None)
        if any(job[name] != value for name, value in fields.items()):
            self.state.set("job", {**job, **fields})

    def _show_commit(self) -> None:
        if self.view.newest is not None and self.view.newest is not self._commit:
            self._commit = self.view.newest
            self._note_commit("commit", self._commit, self.view.commits)
            if self.view.uncommitted and self.state.values["begins"] is None:
                self.state.set("commit", {**self.state.values["commit"], "initial": True})
        measured = self._rates.measured
        if measured is not None and measured is not self._measured:
            self._measured = measured
            since, rate = measured[0], round(measured[1], 3)
            speed = self.state.series["speed"]
            if speed and speed[-1][1] == 0.0 and since > speed[-1][0]:
                # The rate stayed 0 until the start of the measured interval.
                self.state.add("speed", [since, 0.0])
            self.state.set("rate", rate)
            self.state.add("speed", [self.now, rate])

    def _far(self, event: events.WorkerSpent) -> None:
        if self.view.ranks.get(event.worker) != 0:
            return
        self._show_steps(self.now)
        known = self.state.values["commit"]
        news = event.step is not None or event.every > 1
        if known is not None and event.commit is not None and news:
            numbers = known["generation"], known["number"]
            if numbers == (event.commit.generation, event.commit.number):
                self.state.set("commit", {**known, "step": event.step, "every": event.every})

    def _show_steps(self, now: float) -> None:
        size = self.state.values["job"]["size"]
        for name, value in (
            ("steps", self._rates.steps.steps(now)),
            ("samples", self._rates.steps.samples(now, size)),
        ):
            shown = None if value is None else round(value, 3)
            if shown != self.state.values[name]:
                self.state.set(name, shown)
        if (at := self._rates.steps.reported_at) != self.state.values["steps_at"]:
            self.state.set("steps_at", at)

    def _note_commit(self, name: str, commit: Commit, total: int) -> None:
        numbers = {"generation": commit.generation, "number": commit.number}
        step = self.view.step_of(commit)
        known = {} if step is None else {"step": step}
        self.state.set(name, {**numbers, "at": self.now, "total": total, **known})


def _describe_action(action: events.Action) -> tuple[str, str, str] | None:
    match action:
        case events.StartWorker(worker, _, reason):
            return "start", str(worker), str(reason)
        case events.KillWorker(worker, reason):
            return "kill", str(worker), str(reason)
        case events.LetGo(worker, reason):
            return "release", str(worker), str(reason)
        case events.DumpStacks(worker, reason):
            return "stacks of", str(worker), str(reason)
        case events.GiveUpHost(host, reason):
            return "give up", host, str(reason)
        case events.RejectWorker(worker):
            return "reject", str(worker), "its state differs from the world's"
        case events.TellStandby(worker):
            return "standby", str(worker), "the world has its maximum size"
        case events.BreakWorld(generation, _, reason):
            return "break", f"generation {generation}", str(reason)
        case events.PublishWorld(generation, members, reason=reason):
            return "world", f"generation {generation}: {len(members)}", str(reason)
        case events.PrepareChange(generation, reason=reason):
            return "change", f"generation {generation}", str(reason)
        case events.CallOffChange(generation, reason=reason):
            return "call off", f"generation {generation}", str(reason)
        case events.EndJob(code, reason):
            return "end", f"exit code {code}", str(reason)
        case events.AnswerRequest(_, done, reason):
            return "operator", "done" if done else "refused", str(reason)
        case _:
            return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
