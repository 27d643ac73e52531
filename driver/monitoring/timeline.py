"""Timeline of a job: the ranks of workers, the driver's events and actions, and the records of workers.

Converts records to trace events in JSON, which must be written in order. Pure: times are arguments, in nanoseconds on
the monotonic clock of the driver. The viewer shows the driver as a process with these rows:

    generations   a span for each world, from its publication to its end
    recoveries    a span for each start, recovery and planned change, from its cause until all members completed a
                  collective
    workers       starts, joins, kills, exits
    changes       planned changes, from the request to the new world or the cancellation
    warnings      warnings and errors of the log

The viewer shows each worker as a process named after its last rank, with a row ``world`` for its ranks and the rows
that the worker recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.driver import events
from elastic.protocol import messages
from elastic.protocol.messages import Worker
from elastic.protocol.trace_format import TraceFormat

DRIVER = "driver"
WORLD = "world"  # name of the row that shows a worker's ranks
MEMBERS_SHOWN = 64


class Timeline:
    """Converter of one job's records to the lines of one or several timeline files.

    The methods run in a separate thread, so the state of the view that they need is passed as arguments.
    """

    def __init__(self) -> None:
        self._format = TraceFormat(0, 0)
        # name of the open span, by process and row
        self._begun: dict[tuple[str, str], str] = {}
        self._now_ns = 0

    def begin(self, now_ns: int, epoch_us: int, world: events.PublishWorld | None) -> list[str]:
        """Begin a new file. Return its first lines.

        Args:
            now_ns: current time on the driver's monotonic clock, in nanoseconds.
            epoch_us: the same time in microseconds since 1970.
            world: the current world, or None.
        """
        self._format = TraceFormat(now_ns, epoch_us)
        self._begun = {}
        self._now_ns = now_ns
        lines = [*self._format.opening(), *self._format.process(DRIVER, DRIVER, 0)]
        return lines if world is None else lines + self._published(world)

    def end(self, now_ns: int) -> list[str]:
        """End a file. Return the lines that close all open spans."""
        self._now_ns = now_ns
        return [line for key, row in list(self._begun) for line in self._end(key, row)]

    def traced(
        self, worker: Worker, message: messages.Traced, ranks: Mapping[Worker, int]
    ) -> list[str]:
        """Return the lines for the records of a worker.

        Args:
            worker: the worker.
            message: the worker's records.
            ranks: ranks of the workers in the newest world.
        """
        key = str(worker)
        lines = self._named(worker, ranks.get(worker))
        lines += self._format.records(key, message.records, message.offset_ns)
        if message.dropped:
            at_ns = message.records[0][3] + message.offset_ns if message.records else self._now_ns
            lines += self._format.dropped(key, message.dropped, at_ns)
        return lines

    def noted(
        self,
        event: events.Event,
        actions: Sequence[events.Action],
        now_ns: int,
        ranks: Mapping[Worker, int],
    ) -> list[str]:
        """Return the lines for an event and the resulting actions.

        Args:
            event: the event.
            actions: the actions.
            now_ns: current time on the driver's monotonic clock, in nanoseconds.
            ranks: ranks of the workers in the newest world before the actions.
        """
        self._now_ns = now_ns
        lines = self._happened(event)
        for action in actions:
            lines += self._done(action, ranks)
        return lines

    # ---- events and actions

    def _happened(self, event: events.Event) -> list[str]:
        match event:
            case events.WorkerExited(worker, code, reason):
                lines = self._instant("workers", f"exit {worker}", code=code, reason=reason)
                return lines + self._end(str(worker), WORLD)
            case events.WorkerFailed(worker, generation, reason, _):
                title = f"{worker} reports a failure"
                return self._instant("workers", title, generation=generation, reason=reason)
            case events.WorkerRaised(worker, generation, _, summary):
                return self._instant(
                    "workers", f"{worker} raised", generation=generation, error=summary
                )
            case events.WorkerResumed(worker, generation, phases_ms, copied_bytes):
                phases = {f"{name}_ms": ms for name, ms in phases_ms.items()}
                return self._instant(
                    "workers",
                    f"{worker} resumed",
                    generation=generation,
                    copied_bytes=copied_bytes,
                    **phases,
                )
            case events.WorkersResumed():
                return [line for each in event.each() for line in self._happened(each)]
            case events.HostsChanged(hosts):
                return self._instant(
                    "workers", "hosts", **dict(list(hosts.items())[:MEMBERS_SHOWN])
                )
        return []

    def _done(self, action: events.Action, ranks: Mapping[Worker, int]) -> list[str]:
        match action:
            case events.StartWorker(worker, _, reason):
                return self._instant("workers", f"start {worker}", reason=str(reason))
            case events.KillWorker(worker, reason):
                return self._instant("workers", f"kill {worker}", reason=str(reason))
            case events.LetGo(worker, reason):
                return self._instant("workers", f"let go {worker}", reason=str(reason))
            case events.RejectWorker(worker):
                return self._instant("workers", f"reject {worker}")
            case events.BreakWorld(_, _, reason):
                return self._world_over(str(reason))
            case events.FinishWorld():
                return self._world_over("all returned")
            case events.PublishWorld():
                return self._publish(action, ranks)
            case events.PrepareChange(_, _, _, reason):
                return self._begin(DRIVER, "changes", "planned change", reason=str(reason))
            case events.StopMembersAt(_, _, check):
                return self._instant("changes", f"all stop at safepoint {check}")
            case events.CallOffChange(_, _, _, reason):
                called_off = self._instant("changes", "called off", reason=str(reason))
                return called_off + self._end(DRIVER, "changes")
            case events.ReportRecovery():
                return self._recovered(action)
            case events.EndJob(code, reason):
                return self._instant("workers", f"the job ended with {code}", reason=str(reason))
            case events.Report(level, text) if level in ("warning", "error"):
                return self._instant("warnings", text)
        return []

    def _publish(self, world: events.PublishWorld, ranks: Mapping[Worker, int]) -> list[str]:
        lines = self._world_over("") + self._end(DRIVER, "changes")
        before, now = ranks.keys(), {member.worker for member in world.members}
        for worker in sorted(now - before if before else ()):
            lines += self._instant("workers", f"join {worker}", generation=world.generation)
        for worker in sorted(before - now):
            lines += self._instant("workers", f"without {worker}", generation=world.generation)
        return lines + self._published(world)

    def _published(self, world: events.PublishWorld) -> list[str]:
        generation, size = world.generation, len(world.members)
        members = {str(m.place.rank): str(m.worker) for m in world.members[:MEMBERS_SHOWN]}
        noun = "worker" if size == 1 else "workers"
        name = f"generation {generation}: {size} {noun}"
        lines = self._begin(DRIVER, "generations", name, reason=str(world.reason), ranks=members)
        for member in world.members:
            key, rank = str(member.worker), member.place.rank
            lines += self._format.process(key, f"rank {rank} ({key})", rank + 1)
            lines += self._begin(key, WORLD, f"generation {generation}: rank {rank} of {size}")
        return lines

    def _world_over(self, reason: str) -> list[str]:
        lines: list[str] = []
        if reason and (DRIVER, "generations") in self._begun:
            lines += self._instant("generations", reason)
        for key, row in list(self._begun):
            if row in ("generations", WORLD):
                lines += self._end(key, row)
        return lines

    def _recovered(self, report: events.ReportRecovery) -> list[str]:
        ns = round(report.total_ms * 1e6)
        name = f"{report.kind}: generation {report.generation}"
        phases = {f"{phase}_ms": ms for phase, ms in report.phases_ms.items()}
        record = ("X", "recoveries", name, self._now_ns - ns, ns)
        args = {
            "reason": str(report.reason),
            "workers": report.size,
            "total_ms": report.total_ms,
            "copied_bytes": report.copied_bytes,
            **phases,
        }
        return self._format.event(DRIVER, record, args)

    # ---- rows

    def _named(self, worker: Worker, rank: int | None) -> list[str]:
        key = str(worker)
        if self._format.knows(key):
            return []
        if rank is None:
            return self._format.process(key, f"({key})", 1 << 20)
        return self._format.process(key, f"rank {rank} ({key})", rank + 1)

    def _instant(self, row: str, name: str, **args: Any) -> list[str]:
        return self._event(DRIVER, ("i", row, name, self._now_ns, 0), args)

    def _begin(self, key: str, row: str, name: str, **args: Any) -> list[str]:
        lines = self._end(key, row)
        self._begun[key, row] = name
        return lines + self._event(key, ("B", row, name, self._now_ns, 0), args)

    def _end(self, key: str, row: str) -> list[str]:
        name = self._begun.pop((key, row), None)
        if name is None:
            return []
        return self._event(key, ("E", row, name, self._now_ns, 0), {})

    def _event(self, key: str, record: messages.Trace, args: Mapping[str, Any]) -> list[str]:
        if args:
            return self._format.event(key, record, args)
        return self._format.records(key, [record])
