"""Decisions about which messages to repeat after a reconnection or a driver failover. Pure: no I/O, no clock.

When a connection fails, in-flight messages in both directions are lost. The worker reconnects, reports its state and
repeats unanswered messages (see `recovery`). This module implements the driver's side: it repeats the decisions that
currently apply to that worker. A worker can recognize and ignore repeated messages: each carries a generation or the
number of a planned change, or ends an operation that is already complete.

The same applies after a driver failover: the new driver reads the journal and assumes that none of the last decisions
was carried out. The agents report running processes, the workers reconnect, and the driver repeats its current
decisions.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic.driver.events import (
    BreakWorld,
    CallOffChange,
    FinishWorld,
    HostReported,
    KillWorker,
    LetGo,
    Member,
    PrepareChange,
    StopMembersAt,
    TellWorld,
    WorkerExited,
    WorkerReconnected,
)
from elastic.driver.membership.records.roster import WorkerRecord, WorkerStage
from elastic.driver.membership.scheduling.rank_order import copy_groups
from elastic.driver.membership.worlds.gathering import Kind
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Phase
from elastic.driver.reasons import ReasonKind, because

# reasons for a kill that are withdrawn when the worker reconnects
UNTIL_IT_IS_BACK = (ReasonKind.CONNECTION_LOST, ReasonKind.NOT_BACK)


class Reconnects(Part):
    """Handler of reconnected workers. It sends them the current decisions again."""

    def reconnected(self, event: WorkerReconnected) -> None:
        record = self.roster.get(event.worker)
        if record is None:
            # The worker was reported dead but is alive. The world has already continued without it.
            self.actions.add(LetGo(event.worker, because(ReasonKind.GONE_ON_WITHOUT), True))
            return
        if event.generation > self.worlds.generation:
            worker, generation = str(event.worker), event.generation
            unknown = because(ReasonKind.JOURNAL_INCOMPLETE, worker=worker, generation=generation)
            self.worlds.end(1, unknown)
        why = record.exit_why
        if why is not None and why.kind in UNTIL_IT_IS_BACK and record.killed_for is None:
            record.exit_by, record.exit_why = None, None
        if record.killed_for or record.stage is WorkerStage.DISMISSED:
            self.staff.part_again(record)
        elif record.stage is WorkerStage.STARTING and record.unchecked:
            self.staff.hold(record)
        elif record.stage is WorkerStage.STARTING or (
            record.stage is WorkerStage.CONNECTED and not event.welcomed
        ):
            self.staff.welcome(record, self.worlds.members)
        elif record.stage is WorkerStage.FINISHED:
            self.actions.add(FinishWorld(event.generation, [event.worker]))
        elif record.worker in self.worlds.world.places:
            self._repeat_to_member(record, event)

    def _repeat_to_member(self, record: WorkerRecord, event: WorkerReconnected) -> None:
        worker, generation, change = record.worker, self.worlds.generation, self.worlds.change
        published = self.worlds.published
        assert published is not None
        if event.generation < generation:
            self.actions.add(
                TellWorld(
                    generation,
                    Member(worker, self.worlds.world.places[worker]),
                    published.store,
                    published.holders,
                    published.commit,
                    published.reason,
                    published.checkpoint,
                    copy_groups([each.worker for each in published.members], published.holders),
                    published.metadata,
                    published.source,
                )
            )
        at_work = record.stage in (WorkerStage.MEMBER, WorkerStage.RETURNED)
        match self.worlds.phase:
            case Phase.GATHERING if at_work:
                planned = self.worlds.gathering.kind is not Kind.RECOVERY
                if not planned or self.worlds.gathering.had_loss:
                    self.actions.add(BreakWorld(generation, [worker], self.worlds.gathering.reason))
            case Phase.PREPARING:
                wish = self.worlds.change_reason
                self.actions.add(PrepareChange(generation, change.number, [worker], wish))
            case Phase.STOPPING if at_work:
                check = change.checks[worker]
                self.actions.add(StopMembersAt(generation, change.number, check, [worker]))
            case Phase.TRAINING | Phase.ENDING:
                # The worker may be waiting at a planned change that was canceled while it was disconnected.
                self.actions.add(
                    CallOffChange(
                        generation, change.number, [worker], because(ReasonKind.RECONNECTED)
                    )
                )

    # ---- a whole host, or all hosts --------------------------------------------------------------------------------

    def not_there(self, event: HostReported) -> Iterator[WorkerExited]:
        """Yield an exit event for each worker that is missing from a host's report of its running processes.

        Unexpected workers on the host are killed. The kill is repeated if necessary.
        """
        running = set(event.running)
        here = self.roster.hosts.get(event.host, {})
        for worker in event.running:
            record = here.get(worker)
            if record is None:
                self.actions.add(KillWorker(worker, because(ReasonKind.GONE_ON_WITHOUT)))
            elif record.killed_for:
                self.actions.add(KillWorker(worker, record.killed_for))
        ordered = here.keys() if event.ordered is None else set(event.ordered)
        for worker in [w for w in here if w not in running and w in ordered]:
            yield WorkerExited(
                worker, -9, "an exit that was not reported: its host's agent does not run it"
            )

    def restarted(self) -> None:
        """Extend all deadlines after a driver failover, because the delay was not caused by the workers."""
        now, settings = self.actions.now, self.settings
        for record in self.roster.values():
            if record.killed_for or record.stage is WorkerStage.DISMISSED:
                if record.exit_by is not None:
                    record.exit_by = now + settings.leave_s
            elif record.stage is WorkerStage.HELD:
                self.staff.hold(record)
            elif record.stage in (
                WorkerStage.CONNECTED,
                WorkerStage.READY,
                WorkerStage.MEMBER,
                WorkerStage.RETURNED,
            ):
                record.exit_by = now + settings.reconnect_s
                record.exit_why = because(ReasonKind.NOT_BACK)
