"""Handling of the states that workers report: connected, ready, resumed, leaving or returned. Deterministic.

Every event about a world carries its generation number. Each handler drops events of older generations. Failures are
handled in `failures`, and workers without progress in `failure_detection`.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.driver import events
from elastic.driver.membership.failure_detection.frozen import Frozen
from elastic.driver.membership.records.roster import AT_STAKE, WorkerRecord, WorkerStage
from elastic.driver.membership.worlds.gathering import Kind
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Phase, Worlds
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.protocol.messages import Address, Commit, Worker

BEFORE = "model before the gradients became infinite or NaN"


class IllegalEvent(AssertionError):
    """Error raised for an event that is impossible in the current state, which indicates a bug.

    The message lists the preceding events.
    """


class WorkerReports(Part):
    """Handler of the workers' reports about themselves, with one method per event."""

    def __init__(self, worlds: Worlds, frozen: Frozen) -> None:
        super().__init__(worlds)
        self.frozen = frozen

    def handle(self, event: events.Event) -> bool:
        """Handle a worker's report about itself. Return False for other events.

        Raises:
            IllegalEvent: the event is impossible in the current state, which indicates a bug.
        """
        match event:
            case events.WorkersReady():
                self.ready_together(event)
            case events.WorkersResumed():
                self.resumed_together(event)
            case events.WorkerReady():
                self.ready(event)
            case events.WorkerResumed():
                self.resumed(event)
            case events.WorkerConnected():
                self.connected(event)
            case events.WorkerChecked():
                self.checked(event)
            case events.WorkerLeaving():
                self.leaving(event)
            case events.WorkerDigested():
                self.digested(event)
            case events.WorkerDiffers():
                self.differs(event)
            case events.ReplicasSpoilt():
                self.spoilt(event)
            case events.WorkerMiscomputed():
                self.miscomputed(event)
            case events.WorkerReturned():
                self.returned(event)
            case events.WorkerDisconnected():
                self.disconnected(event)
            case _:
                return False
        return True

    def connected(self, event: events.WorkerConnected) -> None:
        record = self.roster.get(event.worker)
        if record is None or record.stage is not WorkerStage.STARTING:
            return  # The worker has exited, was dismissed, or has already connected.
        record.pid = event.pid
        self.frozen.speaks(record)
        self.worlds.welcome(record)

    def ready(self, event: events.WorkerReady) -> None:
        self._ready(event.worker, event, event.store)

    def ready_together(self, event: events.WorkersReady) -> None:
        """Handle merged reports as if each worker had sent its own."""
        worlds, now, number = self.worlds, self.actions.now, event.number
        usual = event.generation == worlds.generation and worlds.phase is Phase.GATHERING
        commit, kept = event.commit, event.kept.commits
        host, layout, running = event.address, event.layout, event.running
        moved: list[WorkerRecord] = []
        record_of, member, starting = self.roster.get, WorkerStage.MEMBER, WorkerStage.STARTING
        for worker, port in zip(event.workers, event.ports, strict=True):
            record = record_of(worker)
            if record is not None and record.stage is starting:
                continue  # The agent is faulty: all members of a world have connected.
            if (
                not usual
                or record is None
                or record.stage is not member  # of the last world
                or record.frozen
                or not record.readies < number
            ):
                # Move the preceding workers first, because workers are ordered by when they became ready.
                self._move_to_ready(moved)
                moved = []
                self._ready(worker, event, Address(host, port))
                continue
            record.readies, record.stands_by = number, False
            record.commit, record.kept, record.store = commit, kept, Address(host, port)
            record.layout, record.running = layout, running
            if record.metadata is not None:
                record.metadata = record.source = None
            if record.inside:
                record.inside = ""
            record.moved_at = record.waits_since = now
            moved.append(record)
        self._move_to_ready(moved)

    def _move_to_ready(self, members: Sequence[WorkerRecord]) -> None:
        """Change the stage of members whose records already contain their reports."""
        if members:
            self.roster.move(members, WorkerStage.READY)
            self.worlds.trained = self.worlds.trained or members[0].running
            self.staff.has_waiting_starts()

    def _ready(
        self, worker: Worker, event: events.WorkerReady | events.WorkersReady, store: Address
    ) -> None:
        record = self.roster.get(worker)
        if record is None or record.stage is WorkerStage.DISMISSED:
            if record is not None and record.killed_for:
                # The worker is alive. The driver had stopped waiting for its exit, because the kill could not reach it.
                self.staff.part_again(record)
            return
        if worker in self.worlds.world.places and event.generation != self.worlds.generation:
            return  # The worker has not received the message about the new world yet.
        if 0 < event.number < record.readies:
            return  # Ignore the message, because its wait has already ended.
        record.readies = event.number
        # The worker must be notified again, because the earlier message may have been lost.
        record.stands_by = False
        self.frozen.speaks(record)
        if record.stage is WorkerStage.STARTING:
            raise IllegalEvent("the worker reported ready before it connected")
        if record.stage is WorkerStage.FINISHED:
            self.staff.release(record, because(ReasonKind.RETURNED_BEFORE))
            return
        was_at_work = record.stage in (WorkerStage.MEMBER, WorkerStage.RETURNED)
        record.commit, record.kept, record.store = event.commit, event.kept.commits, store
        if isinstance(event, events.WorkerReady):
            record.metadata, record.source = event.metadata or None, event.source or None
        else:
            record.metadata = record.source = None
        record.layout, record.running = event.layout, event.running
        self.worlds.trained = self.worlds.trained or event.running
        record.moved(self.actions.now)
        record.waits_since = self.actions.now
        self.staff.has_waiting_starts()
        if worker not in self.worlds.world.places:
            self._newcomer_ready(record)
            return
        record.stage = WorkerStage.READY
        if was_at_work and self.worlds.phase in (Phase.TRAINING, Phase.PREPARING, Phase.ENDING):
            if self.worlds.world.running:
                fell_out = because(ReasonKind.FELL_OUT, worker=str(worker))
                self.worlds.break_up(fell_out, failure=False)
            else:
                # This is the first worker that has finished its user code outside elastic.run. The others are not
                # interrupted.
                why = ReasonKind.ENTERING if event.running else ReasonKind.INIT_AGAIN
                self.worlds.gather(Kind.START, because(why))

    def _newcomer_ready(self, record: WorkerRecord) -> None:
        if self.worlds.members and not record.running:
            # The worker connected too late to be included in the world of init().
            self.staff.welcome(record, self.worlds.members)
        elif (
            record.layout and self.worlds.world.layout and record.layout != self.worlds.world.layout
        ):
            self.staff.reject(record, self.worlds.world.layout)
            self.worlds.end_if(self.worlds.give_up.turned_away(self.worlds.world, record))
        else:
            record.stage = WorkerStage.READY

    def checked(self, event: events.WorkerChecked) -> None:
        current = (
            event.generation == self.worlds.generation and event.change == self.worlds.change.number
        )
        if event.worker in self.roster and current and self.worlds.phase is Phase.PREPARING:
            self.worlds.change.answer(event.worker, event.check, event.group)

    def leaving(self, event: events.WorkerLeaving) -> None:
        record = self.roster.get(event.worker)
        # The preemption notice for the machine already determines when this worker leaves.
        if record is not None and not record.noticed:
            self.staff.leave(record, as_sentence(event.reason), self.worlds.world.places)

    def resumed(self, event: events.WorkerResumed) -> None:
        record = self.roster.get(event.worker)
        if record is None or event.generation != self.worlds.generation:
            return
        if event.worker not in self.worlds.world.places:
            return  # The agent is faulty: only members resume.
        if record.resumed_at is None:
            record.resumed_at = self.actions.now
        record.moved_at = self.actions.now
        report = self.worlds.world.resumed(event, self.actions.now)
        if report is not None:
            self.actions.add(report)

    def resumed_together(self, event: events.WorkersResumed) -> None:
        """Handle merged reports as if each worker had sent its own."""
        now, roster = self.actions.now, self.roster
        if event.generation != self.worlds.generation:
            return
        world = self.worlds.world
        members = event.workers
        if not (
            all(map(roster.__contains__, members)) and all(map(world.places.__contains__, members))
        ):
            members = [worker for worker in members if worker in roster and worker in world.places]
        for record in map(roster.__getitem__, members):
            if record.resumed_at is None:
                record.resumed_at = now
            record.moved_at = now
        if members and len(members) == len(event.workers):
            reports = [world.resumed_together(event, now)]
        else:
            known = set(members)
            reports = [world.resumed(each, now) for each in event.each() if each.worker in known]
        for report in reports:
            if report is not None:
                self.actions.add(report)

    def digested(self, event: events.WorkerDigested) -> None:
        record = self.roster.get(event.worker)
        if record is None or record.killed_for or event.generation != self.worlds.generation:
            return
        found = self.worlds.world.digested(event, self.roster)
        if found is not None:
            wrong, right = found
            differs = because(ReasonKind.OTHER_DIGEST, right=str(right), commit=event.commit.dotted)
            self.staff.fence(self.roster[wrong], differs)

    def differs(self, event: events.WorkerDiffers) -> None:
        if event.generation == self.worlds.generation:
            self._damaged(event.worker, " and ".join(event.parts), event.commit, event.equal)

    def _damaged(self, worker: Worker, parts: str, commit: Commit, equal: int) -> None:
        record = self.roster.get(worker)
        if record is not None and not record.killed_for:
            damaged = because(ReasonKind.DAMAGED, parts=parts, commit=commit.dotted, equal=equal)
            self.staff.fence(record, damaged)

    def spoilt(self, event: events.ReplicasSpoilt) -> None:
        """Replace all workers and resume from the newest checkpoint, because every worker's state may be corrupted."""
        here = [s for s in self.worlds.live() if s.stage in AT_STAKE]
        if event.generation != self.worlds.generation or not here:
            return
        for worker in event.damaged:
            self._damaged(worker, BEFORE, event.commit, event.equal)
        reason = because(ReasonKind.SPOILT, commit=event.commit.dotted)
        for record in here:
            if record.killed_for:
                record.stage = WorkerStage.DISMISSED  # The fault of this worker was already logged.
            else:
                self.staff.discard(record, reason)
        self.worlds.lose(here[0], reason)

    def miscomputed(self, event: events.WorkerMiscomputed) -> None:
        """Fence a worker that computed wrong gradients, and quarantine its slot.

        Every rank reports the worker. Reports after the first are ignored.
        """
        members = self.worlds.members
        if event.generation != self.worlds.generation or not 0 <= event.rank < len(members):
            return
        record = self.roster.get(members[event.rank])
        if record is None or record.killed_for:
            return
        why = because(
            ReasonKind.MISCOMPUTED,
            step=event.step,
            shard=event.shard,
            digest=event.digest,
            right=event.right,
            witnesses=", ".join(
                str(members[rank]) for rank in event.witnesses if 0 <= rank < len(members)
            ),
            agreed=event.agreed,
            quarantine=self.settings.quarantine,
        )
        if not event.complete and self.settings.elastic:
            self.worlds.spoilt.found(record, self.worlds.generation)
        self.staff.fence(record, why)
        self.staff.quarantine(record, why, self.worlds.world.places)
        if self.settings.elastic:
            worker = str(record.worker)
            lost = because(ReasonKind.LOST_KILLED, worker=worker, killed_for=why)
            self.worlds.lose(record, lost)

    def returned(self, event: events.WorkerReturned) -> None:
        record = self.roster.get(event.worker)
        if record is None or event.generation != self.worlds.generation:
            return
        if record.stage is not WorkerStage.MEMBER or self.worlds.phase is Phase.GATHERING:
            return
        record.stage = WorkerStage.RETURNED
        record.moved(self.actions.now)
        record.waits_since = self.actions.now
        if self.worlds.phase is Phase.STOPPING and any(
            s.stage is WorkerStage.READY for s in self.worlds.live()
        ):
            # The worker returned while the other members stopped for a planned change. They can only continue together
            # in a new world.
            returned = because(ReasonKind.RETURNED_MEANWHILE, worker=str(event.worker))
            self.worlds.break_up(returned, failure=False)
            return
        self.worlds.one_returned(record)

    def disconnected(self, event: events.WorkerDisconnected) -> None:
        record = self.roster.get(event.worker)
        if record is not None:
            self.staff.disconnected(record, silent=event.silent)
