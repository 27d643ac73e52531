"""Decides what a worker is told again when its connection is replaced, and what a restarted driver relies on. Pure.

A connection that breaks loses what was under way in it, in both directions. The worker opens another, says where it
stands and repeats what has had no answer (see `recovery`); here is the other half: whatever holds for that worker now
is said again. Everything that is repeated is harmless to who has heard it: it carries its generation, its change, or
ends what is over anyway.

The same serves a driver that was restarted: it reads its journal, and takes nothing of what it decided last for done.
The agents tell which processes run, these connect again, and all is said to them that holds.
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
from elastic.driver.membership.part import Part
from elastic.driver.membership.roster import WorkerRecord, WorkerStage
from elastic.driver.membership.worlds.gathering import Kind
from elastic.driver.membership.worlds.worlds import Phase
from elastic.driver.reasons import Why, because

UNTIL_IT_IS_BACK = (Why.CONNECTION_LOST, Why.NOT_BACK)  # why it is to be killed


class Reconnections(Part):
    """Repeat the current decisions to one worker."""

    def reconnected(self, event: WorkerReconnected) -> None:
        record = self.roster.get(event.worker)
        if record is None:
            # Given up and reported dead, and yet it lives: nobody trains with it.
            self.actions.add(LetGo(event.worker, because(Why.GONE_ON_WITHOUT), True))
            return
        if event.generation > self.worlds.generation:
            worker, generation = str(event.worker), event.generation
            unknown = because(Why.JOURNAL_INCOMPLETE, worker=worker, generation=generation)
            self.worlds.end(1, unknown)
        why = record.exit_why
        if why is not None and why.kind in UNTIL_IT_IS_BACK and record.killed_for is None:
            record.exit_by, record.exit_why = None, None
        if record.killed_for or record.stage is WorkerStage.DISMISSED:
            self.staff.part_again(record)
        elif record.stage is WorkerStage.STARTING or (
            record.stage is WorkerStage.CONNECTED and not event.welcomed
        ):
            self.staff.welcome(record, self.worlds.members)
        elif record.stage is WorkerStage.FINISHED:
            self.actions.add(FinishWorld(event.generation, [event.worker]))
        elif record.worker in self.worlds.world.places:
            self._tell_member(record, event)

    def _tell_member(self, record: WorkerRecord, event: WorkerReconnected) -> None:
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
                self.actions.add(StopMembersAt(generation, change.number, change.check, [worker]))
            case Phase.TRAINING | Phase.ENDING:
                # It may be held at a change that was called off while nobody could tell it so.
                self.actions.add(
                    CallOffChange(generation, change.number, [worker], because(Why.RECONNECTED))
                )

    # ---- a whole host, or everybody --------------------------------------------------------------------------------

    def not_there(self, event: HostReported) -> Iterator[WorkerExited]:
        """The workers that should run on the host and do not. Others that run there are killed, again if necessary."""
        running = set(event.running)
        here = self.roster.hosts.get(event.host, {})
        for worker in event.running:
            record = here.get(worker)
            if record is None:
                self.actions.add(KillWorker(worker, because(Why.GONE_ON_WITHOUT)))
            elif record.killed_for:
                self.actions.add(KillWorker(worker, record.killed_for))
        ordered = here.keys() if event.ordered is None else set(event.ordered)
        for worker in [w for w in here if w not in running and w in ordered]:
            yield WorkerExited(
                worker, -9, "an exit that was not reported: its host's agent does not run it"
            )

    def restarted(self) -> None:
        """Extend deadlines after a driver failover, which made no worker late."""
        now, settings = self.actions.now, self.settings
        for record in self.roster.values():
            if record.killed_for or record.stage is WorkerStage.DISMISSED:
                if record.exit_by is not None:
                    record.exit_by = now + settings.leave_s
            elif record.stage in (
                WorkerStage.CONNECTED,
                WorkerStage.READY,
                WorkerStage.MEMBER,
                WorkerStage.RETURNED,
            ):
                record.exit_by = now + settings.reconnect_s
                record.exit_why = because(Why.NOT_BACK)
