"""Merging of the reports that all workers of a host send at about the same time. Pure: no I/O, no clock.

When a world ends, each of its members reports `Ready`, and when the next world has begun, each reports `Resumed`. The
driver of a large job handles one event for each host instead of one for each worker, because the agent of a host merges
these reports:

    end of a world was sent to its members     hold Ready of each      all have reported: send the reports together
    new world was sent to its members          hold Resumed of each    all have reported: send the reports together

No report delays a decision. A report is held only while the same report of another member of the host is missing, for
which the driver waits as well, and for at most HOLD_S seconds. All other messages are forwarded immediately, and after
the held report of the same worker, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from elastic.driver.agents.messages import Heard, HeardTogether
from elastic.driver.events import WorkersReady, WorkersResumed
from elastic.protocol.messages import Broken, Proceed, Ready, Resumed, StopAt, Worker, World

HOLD_S = 0.005  # maximum number of seconds for which a report is held

Report = Ready | Resumed
Relayed = Heard | HeardTogether


class ReportMerger:
    """Merger of the reports of one host's workers.

    Args:
        hold_s: maximum number of seconds for which a report is held.

    Attributes:
        flush_at: time at which `flush` must be called if no other call has returned the held reports, or None.
    """

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self.flush_at: float | None = None
        self._job = ""  # ID of the job that the agent serves
        self._generation = 0  # generation of the newest world that was sent to workers of this host
        self._members: set[Worker] = set()  # live members of this world on this host
        self._ready: set[Worker] = (
            set()
        )  # members that have reported Ready since this world was sent
        # Kind of the reports to merge, and the members whose report is missing. None while no report is expected.
        self._kind: type[Report] | None = None
        self._missing: set[Worker] = set()
        self._held: dict[Worker, Report] = {}  # reports of kind `_kind`

    def serves(self, job: str) -> None:
        """Record the ID of the job that the agent serves. The generations of each job begin at 1."""
        if job != self._job:
            self.reset()
            self._job, self._generation = job, 0
            self._members, self._ready = set(), set()

    def sent(self, workers: Iterable[Worker], message: Any) -> list[Relayed]:
        """Record a message of the driver to workers of this host. Return the messages to send to the driver now."""
        match message:
            case World(generation) if generation > self._generation:
                flushed = self.flush()
                self._generation, self._members, self._ready = generation, set(workers), set()
                self._kind, self._missing = Resumed, set(workers)
                return flushed
            case World(generation) if generation == self._generation:
                # The world is sent again to a worker that has reconnected.
                self._members.update(workers)
            case Broken(generation) | StopAt(generation) if generation == self._generation:
                flushed = self.flush()
                missing = self._members.intersection(workers) - self._ready
                self._kind, self._missing = Ready, missing
                return flushed
            case Proceed(generation) if generation == self._generation and self._kind is Ready:
                self._expect_nothing()
                return self.flush()
        return []

    def received(self, worker: Worker, message: Any, now: float) -> list[Relayed]:
        """Handle a message of a worker. Return the messages to send to the driver now, in order.

        Args:
            worker: the worker.
            message: its message.
            now: current time, in seconds.
        """
        if isinstance(message, Ready):
            self._ready.add(worker)
        if type(message) is not self._kind or worker not in self._missing:
            return [*(self.flush() if worker in self._held else []), Heard(worker, message)]
        self._missing.discard(worker)
        if not self._may_hold(message):
            return [*([] if self._missing else self.flush()), Heard(worker, message)]
        self._held[worker] = message
        if not self._missing:
            return self.flush()
        if self.flush_at is None:
            self.flush_at = now + self._hold_s
        return []

    def gone(self, worker: Worker) -> list[Relayed]:
        """Record that a worker has exited or lost its connection. Return the messages to send to the driver now."""
        self._members.discard(worker)
        self._missing.discard(worker)
        return self.flush() if worker in self._held or not self._missing else []

    def observed(self, worker: Worker) -> list[Relayed]:
        """Return the messages to send to the driver before the agent reports an observation about a worker."""
        return self.flush() if worker in self._held else []

    def flush(self) -> list[Relayed]:
        """Return all held reports as messages to the driver."""
        self.flush_at = None
        if not self._held:
            return []
        held, self._held = self._held, {}
        return [*_merged(held)]

    def reset(self) -> None:
        """Discard the held reports, because the driver was lost. Workers report their state to the next driver."""
        self._held.clear()
        self.flush_at = None
        self._expect_nothing()

    def _expect_nothing(self) -> None:
        self._kind, self._missing = None, set()

    def _may_hold(self, report: Report) -> bool:
        # The parts of a sharded state, and metadata, differ between workers.
        separate = report.shards is not None or (isinstance(report, Ready) and report.metadata)
        return report.generation == self._generation and not separate


def _merged(held: dict[Worker, Report]) -> Iterator[Relayed]:
    alike: dict[Any, dict[Worker, Report]] = {}
    for worker, report in held.items():
        alike.setdefault(_shared(report), {})[worker] = report
    for reports in alike.values():
        if len(reports) == 1:
            yield from (Heard(worker, report) for worker, report in reports.items())
        else:
            yield HeardTogether(_event([*reports], [*reports.values()]))


def _shared(report: Report) -> tuple[Any, ...]:
    """Return the values that are equal in all reports of one event."""
    match report:
        case Ready():
            return (
                *(report.commit, report.store.host, report.layout, report.running),
                *(report.number, report.kept, report.step, report.own_pace),
            )
        case Resumed():
            return (report.from_checkpoint, *report.phases_ms)


def _event(workers: list[Worker], reports: Sequence[Any]) -> WorkersReady | WorkersResumed:
    match first := reports[0]:
        case Ready():
            return WorkersReady(
                workers,
                [each.store.port for each in reports],
                first.generation,
                first.commit,
                first.store.host,
                first.layout,
                first.running,
                first.number,
                first.kept,
                first.step,
                first.own_pace,
            )
        case _:
            copied = [each.copied_bytes for each in reports]
            return WorkersResumed(
                workers,
                first.generation,
                {phase: [each.phases_ms[phase] for each in reports] for phase in first.phases_ms},
                copied if any(copied) else [],
                first.from_checkpoint,
            )
