"""Transitions between phases: beginning, interruption, failure and end of worlds, and the end of the job.

Deterministic.

`membership` maps events to these transitions, and its docstring contains the diagram. Larger decisions are in separate
modules: `gathering` decides which workers to wait for, `composition` which workers form the next world,
`planned_change` when and where to interrupt a healthy world, and `give_up` whether to end the job.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NoReturn

from elastic.driver import events
from elastic.driver.membership.records.actions import ActionList
from elastic.driver.membership.records.garbage_collection import uncollected
from elastic.driver.membership.records.roster import Roster, WorkerRecord, WorkerStage
from elastic.driver.membership.scheduling.worker_pool import WorkerPool
from elastic.driver.membership.worlds.composition import Composition, compose
from elastic.driver.membership.worlds.gathering import NAMED, Gathering, Kind, candidates
from elastic.driver.membership.worlds.give_up import GiveUpRules
from elastic.driver.membership.worlds.liveness_probes import LivenessProbes
from elastic.driver.membership.worlds.planned_change import PlannedChange
from elastic.driver.membership.worlds.root_cause import Exceptions, Mismatches, RootCauseSearch
from elastic.driver.membership.worlds.spoilt_commits import Beginning, SpoiltCommits
from elastic.driver.membership.worlds.world import World
from elastic.driver.reasons import Fact, Reason, ReasonKind, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import MEMBERS_WITH_METADATA, Commit, Place, Worker

NO_INIT = (
    "no worker called init(), so no training took place: check that the script calls init(), and that it ran at all"
    " (workers have no standard input)"
)


class Phase(enum.Enum):
    # waiting until the expected workers, and enough of them, are ready; a world of init() may still be in use
    GATHERING = "gathering"
    TRAINING = "training"
    PREPARING = "preparing"  # planned change: waiting for each member's safepoint number
    STOPPING = (
        "stopping"  # all members know the safepoint at which to stop; not all have stopped yet
    )
    ENDING = "ending"  # some members have returned from elastic.run
    DONE = "done"


class JobFinished(Exception):
    """Exception raised when the outcome of the job is decided.

    `Membership.handle` catches it, so EndJob is the last action.
    """


class Worlds:
    """Sequence of the worlds of one job. Its methods append to the list of actions of the current event."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING
        self.actions = ActionList()
        self.staff = WorkerPool(settings, self.actions)
        self.give_up = GiveUpRules(settings, self.staff, self.actions)
        self.world = World()
        self.published: events.PublishWorld | None = None  # the last published world
        self.verdict: events.EndJob | None = None  # the outcome of the job, once decided
        self._wished: tuple[tuple[int, int, int], tuple[Reason | None, bool]] | None = None
        self.gathering = Gathering(Kind.START, because(ReasonKind.FIRST_START), 0.0, settings)
        self.change = PlannedChange(settings)
        # reason for the last planned change
        self.change_reason = because(ReasonKind.NOT_WANTED)
        self.exceptions = Exceptions()
        self.mismatches = Mismatches()
        self.spoilt = SpoiltCommits()
        self.signs = LivenessProbes()
        self.trained = False  # whether a worker has entered elastic.run
        self.stopping = False  # whether a stop was requested and its last checkpoint is pending
        self.all_go = False  # whether the machines of all members will be reclaimed
        self.root_cause_search: RootCauseSearch | None = None
        self.completed: list[str] = []  # workers that exited with code 0 outside elastic.run
        self._cause_at = 0.0  # time at which the cause of the current gathering was detected
        self.look_again_at: float | None = None  # time of the next decision on a planned change
        self.ending_by: float | None = None

    # ---- public state ----------------------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """Return the records of all live worker processes."""
        return self.staff.roster

    @property
    def generation(self) -> int:
        return self.world.generation

    @property
    def members(self) -> list[Worker]:
        """Return the members of the last world in rank order, including dead ones."""
        return self.world.members

    @property
    def over(self) -> bool:
        """Return whether the outcome of the job is decided."""
        return self.phase is Phase.DONE

    def place_of(self, worker: Worker) -> Place | None:
        """Return the place of a worker in the last published world, or None if the worker is not in it."""
        return self.world.places.get(worker)

    # ---- after each event ------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Perform the transitions that are due in the current state."""
        # Start no standbys before the first world, because they would slow down the start of the other workers.
        self.staff.spare = self.settings.standbys if self.world.running else 0
        settled = self.phase is not Phase.ENDING and self.root_cause_search is None
        if settled and not self.stopping:
            self.staff.start(self.members)
        self._end_with_the_last_process()
        before = None
        while before is not self.phase:
            before = self.phase
            match self.phase:
                case Phase.GATHERING:
                    self._try_to_publish()
                case Phase.TRAINING:
                    self._consider_change()
                case Phase.PREPARING:
                    self._try_to_stop()
                case Phase.STOPPING:
                    if not self.roster.any_at(WorkerStage.MEMBER, WorkerStage.RETURNED):
                        self.gather(Kind.CHANGE, self.change_reason)
                case Phase.ENDING:
                    self._try_to_finish()

    def welcome(self, record: WorkerRecord) -> None:
        """Answer the init() call of a new worker, possibly after the health check of its slot."""
        if record.unchecked:
            self.staff.hold(record)
            return
        if self.members and not self.trained and not self.live():
            # All members were lost before any of them entered elastic.run. In the old world, this worker would train
            # alone, so the next world is treated as the first one.
            self.world = World(self.generation)
        self.staff.welcome(record, self.members)

    def _end_with_the_last_process(self) -> None:
        if not self.staff.slots.completed or next(self.roster.in_plans(), None) is not None:
            return
        if self.staff.next_slot_at() is not None:
            return  # A failed program will be restarted.
        if self.staff.slots.any_given_up():
            self.end(1, self.give_up.spent())
        if self.staff.settings.elastic and not self.generation:
            self.actions.log("warning", NO_INIT)
            if self.settings.strict:
                workers = len(self.staff.slots.completed)
                self.end(1, because(ReasonKind.NO_TRAINING, workers=workers))
        self.end(0, because(ReasonKind.ALL_EXITED, workers=len(self.staff.slots.completed)))

    def _try_to_publish(self) -> None:
        awaited = self.staff.starting()
        if self.members and not self.gathering.anew:
            awaited = self.gathering.awaited(self.roster)
        if next(awaited, None) is not None or (self.gathering.whole and self.staff.some_return()):
            self.signs.wait_for_others()
            return
        if self.signs.awaited(self.now):
            return
        with uncollected():
            self._compose_next()

    def _compose_next(self) -> None:
        ready, silent = self.roster.at(WorkerStage.READY), self.signs.silent
        ready = [s for s in ready if not s.killed_for and not (silent and s.worker in silent)]
        old, new, others = candidates(ready, self.members)
        beginning = self.spoilt.begin([*old, *new])
        composition = self._compose(old, new, beginning.commits)
        for record in composition.leaving:
            assert record.leaving is not None
            self.staff.release(record, record.leaving)
        for record in composition.rejected:
            self.staff.reject(record, composition.layout)
            self.end_if(self.give_up.turned_away(self.world, record))
        if composition.arrangement.commit is None:
            self.end_if(self.give_up.nothing_held(self.world, self.gathering))
        have = len(composition.arrangement.order)
        if have < self.give_up.needed():
            self.end_if(self.give_up.short(self.gathering, have))
            return
        commit = composition.arrangement.commit
        self.end_if(self.give_up.in_circles(self.world, self.gathering, commit))
        survivors = have - len(composition.joining)
        self._publish(composition, others, beginning, survivors=survivors)

    def _publish(
        self,
        composition: Composition,
        others: list[WorkerRecord],
        beginning: Beginning,
        *,
        survivors: int,
    ) -> None:
        before, gathering, arranged = self.world, self.gathering, composition.arrangement
        source = self.roster[arranged.order[0]]
        assert source.store is not None
        if before.members:
            reason = because(
                ReasonKind.NEXT_WORLD,
                cause=gathering.reason,
                ready=survivors,
                members=len(before.members),
                new=len(composition.joining),
            )
        else:
            reason = because(ReasonKind.FIRST_WORLD, members=len(arranged.order))
        self.phase = Phase.TRAINING
        self.world = World(
            generation=before.generation + 1,
            members=arranged.order,
            running=source.running,
            commit=arranged.commit,
            layout=composition.layout,
            kind=gathering.kind,
            reason=gathering.reason,
            cause_at=self._cause_at,
            published_at=self.now,
            trained=before.trained,
            back_to=beginning.older.step if beginning.older is not None else None,
        )
        self._report_doubts(beginning)
        self.exceptions.world_began(self.generation, arranged.commit)
        self.give_up.script_failures.world_began(arranged.order)
        if self.root_cause_search is not None and self.root_cause_search.settled(arranged.order):
            self.root_cause_search = None
        if gathering.kind is Kind.CHANGE and set(before.members) == set(arranged.order):
            # The interruption was unnecessary, so postpone the next attempt.
            self.change.put_off(self.now)
        # Members that were not ready in time can join a later world, by calling init() again or entering elastic.run.
        for record in self.roster.at(WorkerStage.MEMBER, WorkerStage.RETURNED):
            record.stage = WorkerStage.CONNECTED
        for record in others:
            if not record.running:
                self.staff.welcome(record, self.members)
        roster, now, generation = self.roster, self.now, self.world.generation
        began = [roster[worker] for worker in arranged.order]
        roster.move(began, WorkerStage.MEMBER)
        for record in began:
            record.stands_by = False
            if source.running and not record.first_generation:
                record.first_generation = generation
            if record.inside:
                record.inside = ""
            record.moved_at, record.entered = now, 0
            record.phase = record.last_inside = ""
            if record.gpu:
                record.gpu = []
        newest = arranged.holders > 0 and beginning.older is None
        metadata = _metadata_of(began) if newest else []
        self.published = events.PublishWorld(
            generation=self.generation,
            members=self.world.placed(),
            store=source.store,
            holders=arranged.holders,
            commit=arranged.commit,
            reason=reason,
            # Request a checkpoint immediately, because the script may not reach another commit in time: data loader
            # workers start slowly.
            checkpoint=(
                self.settings.durable
                # Also replace the newest checkpoint if it contains steps that are now repeated.
                and (self.stopping or self.all_go or beginning.older is not None)
                and arranged.commit is not None
            ),
            metadata=metadata,
            source=source.source or {} if metadata else {},
        )
        for record in began:
            if record.source is not None:
                record.source = None
        self.actions.add(self.published)

    def _report_doubts(self, beginning: Beginning) -> None:
        """Log that the world begins from an older commit, and whether wrong gradients may remain in that commit."""
        culprit, older = self.spoilt.culprit, beginning.older
        if older is not None:
            back = because(
                ReasonKind.WENT_BACK,
                worker=culprit,
                step=older.step,
                commit=older.commit.dotted,
                whole=beginning.whole,
            )
            self.actions.log("warning", str(back), back)
        elif not beginning.whole:
            kept = because(ReasonKind.NOT_WENT_BACK, worker=culprit)
            self.actions.log("warning", str(kept), kept)

    def _consider_change(self) -> None:
        self.look_again_at = None
        if not self.settings.elastic or not self.world.running or self.stopping:
            return  # A world of init() changes only when its workers enter elastic.run.
        wish, urgent = self._wish()
        if wish is None:
            self.change.unwanted()
            if self.settings.standbys:
                self._make_standby()
            return
        coming = any(
            not s.leaving and s.worker not in self.world.places
            for s in self.roster.first_at(
                WorkerStage.STARTING, WorkerStage.HELD, WorkerStage.CONNECTED
            )
        )
        self.look_again_at = self.change.wanted(self.now, more_coming=coming and not urgent)
        if self.look_again_at is not None:
            return
        self.phase = Phase.PREPARING
        members = [s.worker for s in self.live()]
        self.change.prepare(self.now, members)
        self.change_reason, self._cause_at = wish, self.now
        self.actions.add(events.PrepareChange(self.generation, self.change.number, members, wish))

    def _make_standby(self) -> None:
        for record in self.joining():
            if not record.stands_by:
                record.stands_by = True
                self.actions.add(events.TellStandby(record.worker))

    def joining(self) -> list[WorkerRecord]:
        """Return the new workers that are ready to join."""
        places = self.world.places
        return [
            s
            for s in self.roster.first_at(WorkerStage.READY)
            if s.running
            and not s.leaving
            and not s.killed_for
            and s.worker not in places
            and s.worker not in self.signs.silent
        ]

    def _wish(self) -> tuple[Reason | None, bool]:
        joining = self.joining()
        if not joining and not any(w in self.world.places for w in self.roster.leavers):
            return None, False
        # Checking all members after each event would be slow, so the result is reused if nothing has changed.
        basis = (self.generation, self.roster.shifts, self.staff.slots.version)
        if self._wished is None or self._wished[0] != basis:
            self._wished = (basis, self._compose_wish(joining))
        return self._wished[1]

    def _compose_wish(self, joining: list[WorkerRecord]) -> tuple[Reason | None, bool]:
        live = self.live()
        # All members would stop at the same safepoint, so they would hold the same commit.
        same = Commit(self.generation, 1)
        composition = self._compose(live, joining, {s.worker: same for s in live})
        joined = ", ".join(str(s.worker) for s in composition.joining)
        causes = [because(ReasonKind.JOINED, workers=joined)] if joined else []
        causes += [
            because(ReasonKind.LEAVES, worker=str(s.worker), leaving=s.leaving)
            for s in composition.leaving
        ]
        wish = because(ReasonKind.SEVERAL, causes=[*causes]) if len(causes) > 1 else None
        return wish or next(iter(causes), None), bool(composition.leaving)

    def _try_to_stop(self) -> None:
        if self._wish()[0] is None:
            self.call_off(because(ReasonKind.NOT_WANTED))
        elif not self.change.silent:
            self.phase = Phase.STOPPING
            change, live = self.change, [record.worker for record in self.live()]
            for check, members in change.stop(self.now, live).items():
                stop = events.StopMembersAt(self.generation, change.number, check, members)
                self.actions.add(stop)

    def call_off(self, reason: Reason) -> None:
        self.phase = Phase.TRAINING
        live = [s.worker for s in self.live()]
        self.actions.add(events.CallOffChange(self.generation, self.change.number, live, reason))

    def _try_to_finish(self) -> None:
        if not self.roster.any_at(WorkerStage.MEMBER):
            members = len(self.live())
            self.finish("")
            facts: dict[str, Fact] = {"members": members, "generation": self.generation}
            script_failures = self.give_up.script_failures
            failed = script_failures.lacking(members)
            if failed and self.settings.judge_scripts:
                facts |= {"began": script_failures.began, "failed": [*failed[:NAMED]]}
                facts["strict"] = self.settings.strict
            self.end(0, because(ReasonKind.ALL_RETURNED, **facts))

    def finish(self, because: str) -> None:
        """Release the workers that have returned, without waiting for other workers.

        Args:
            because: reason to log if not all workers returned, otherwise empty.
        """
        returned = [s for s in self.live() if s.stage is WorkerStage.RETURNED]
        if because:
            self.actions.log("warning", f"{', '.join(str(s.worker) for s in returned)} {because}")
        for record in returned:
            record.stage = WorkerStage.FINISHED
        self.actions.add(events.FinishWorld(self.generation, [s.worker for s in returned]))

    def one_returned(self, record: WorkerRecord) -> None:
        """Handle the return of a member from elastic.run. The other members must return before a deadline."""
        returned = because(ReasonKind.RETURNED, worker=str(record.worker))
        if self.phase in (Phase.PREPARING, Phase.STOPPING):
            self.call_off(returned)
        if self.phase is Phase.TRAINING or (
            # Members that returned earlier were already released.
            self.phase is Phase.ENDING and self.ending_by is None
        ):
            self.phase = Phase.ENDING
            self.ending_by = self.now + self.settings.elastic_timeout_s

    # ---- losing members ------------------------------------------------------------------------------

    def lose(self, record: WorkerRecord, reason: Reason) -> None:
        """Handle the loss of a member, which ends the world."""
        if record.worker not in self.world.places:
            return
        if self.phase is Phase.GATHERING:
            self.gathering.lost(reason)
            if self.gathering.kind is Kind.START:
                at_work = [s.worker for s in self.live() if s.stage is WorkerStage.MEMBER]
                if at_work:
                    self.actions.add(events.BreakWorld(self.generation, at_work, reason))
            self.end_if(self.give_up.all_lost(self.world, self.gathering))
            return
        live = self.live()
        returned = bool(live) and all(
            s.stage in (WorkerStage.RETURNED, WorkerStage.FINISHED) for s in live
        )
        if self.phase is Phase.ENDING and returned and live[0].worker == self.members[0]:
            self.actions.log(
                "warning", f"{reason}, after all other workers had returned from training"
            )
            return
        self.break_up(reason, lost=True, live=live)

    def break_up(
        self,
        reason: Reason,
        *,
        lost: bool = False,
        failure: bool = True,
        live: Sequence[WorkerRecord] | None = None,
    ) -> None:
        """End the world. ``live``: the result of the method `live`, if the caller knows it."""
        failure = failure and not self.stopping
        announced = self.staff.slots.any_closed({w.host for w in self.members}, self.now)
        # the loss of a machine after a preemption notice is not a failure
        if failure and not announced:
            self.end_if(self.give_up.failed_again(reason))
        live = self.live() if live is None else live
        member, returned = WorkerStage.MEMBER, WorkerStage.RETURNED
        at_work = [s for s in live if s.stage is member or s.stage is returned]
        self.roster.move(at_work, WorkerStage.MEMBER)
        self.gather(Kind.RECOVERY, reason)
        self.gathering.had_loss = lost
        self.actions.add(events.BreakWorld(self.generation, [s.worker for s in at_work], reason))
        if lost:
            self.end_if(self.give_up.all_lost(self.world, self.gathering))

    def gather(self, kind: Kind, reason: Reason) -> None:
        if kind is not Kind.CHANGE:
            self._cause_at = self.now
        self.phase = Phase.GATHERING
        self.gathering = Gathering(kind, reason, self.now, self.settings)
        standbys = [s.worker for s in self.roster.first_at(WorkerStage.READY) if s.stands_by]
        self.signs.ask(standbys)
        if standbys:
            self.actions.add(events.ProbeWorkers(standbys))

    def end_if(self, reason: Reason | None) -> None:
        if reason is not None:
            self.end(1, reason)

    def end(self, code: int, reason: Reason) -> NoReturn:
        """End the job with an outcome. On success, release all workers that have not finished."""
        self.phase = Phase.DONE
        if code == 0:
            self.staff.release_all(because(ReasonKind.JOB_ENDED))
        self.verdict = events.EndJob(code, reason)
        self.actions.add(self.verdict)
        raise JobFinished

    # ---- queries ---------------------------------------------------------------------------------------------------

    def awaited(self, record: WorkerRecord) -> bool:
        """Return whether a worker must become ready before the next world can be formed."""
        if self.phase is not Phase.GATHERING or not self.members:
            return False
        at_work = record.stage is not WorkerStage.READY
        return at_work and (record.running or not self.gathering.late)

    def live(self) -> list[WorkerRecord]:
        """Return the live members that have not been dismissed, in rank order."""
        return self.roster.live(self.members)

    def _compose(
        self,
        old: list[WorkerRecord],
        new: list[WorkerRecord],
        commits: dict[Worker, Commit | None] | dict[Worker, Commit],
    ) -> Composition:
        return compose(
            old,
            sorted(new, key=lambda s: self.staff.slots.order(s.worker)),
            commits,
            workers_min=self.give_up.needed(),
            workers_max=self.staff.workers_max,
            layout=self.world.layout,
            all_stay=self.stopping,
        )

    @property
    def now(self) -> float:
        return self.actions.now

    def named(self, record: WorkerRecord) -> str:
        worker = record.worker
        place = self.world.places.get(worker)
        if place is None and not self.members:
            place = record.first_place
        role = "worker" if place is None else f"rank {place.rank}"
        return f"{role} ({worker} on {worker.host})"


def _metadata_of(members: list[WorkerRecord]) -> list[dict[str, str]]:
    """Return the metadata that each member of a world receives: see `protocol.messages.World.metadata`."""
    if len(members) > MEMBERS_WITH_METADATA or not any(record.metadata for record in members):
        return []
    return [record.metadata or {} for record in members]
