"""Decides when a job is not worth going on: limits, circles, and waits without hope. Pure.

Every question is answered with the reason to end the job, or with nothing: then it goes on.
"""

from __future__ import annotations

from elastic.driver.membership.actions import ActionList
from elastic.driver.membership.roster import AT_STAKE, WorkerRecord, WorkerStage
from elastic.driver.membership.scheduling.worker_pool import Workforce
from elastic.driver.membership.worlds.gathering import Gathering, Kind
from elastic.driver.membership.worlds.script_failures import ScriptFailures
from elastic.driver.membership.worlds.world import World
from elastic.driver.reasons import Reason, Why, because, counted
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit


class GiveUpRules:
    """Rules for ending a job, with the history that they need."""

    def __init__(self, settings: Settings, staff: Workforce, actions: ActionList) -> None:
        self._settings = settings
        self._staff = staff
        self._actions = actions
        self._failures = 0  # of worlds; planned changes do not count
        self._stuck_in: set[int] = set()  # generations since the last new commit
        self._hung_in: set[int] = set()  # the same, where GPUs hung and nobody was to blame
        self._restarts = 0  # from a checkpoint, since the last one was made
        self._barren = 0  # recoveries in a row with nobody lost and no new commit
        self.script_failures = ScriptFailures()

    def needed(self) -> int:
        """The smallest world allowed now. Once some have finished, the rest need not find more."""
        if not self._settings.elastic:
            return self._settings.np
        return 1 if self._staff.roster.at(WorkerStage.FINISHED) else self._settings.workers_min

    def failed_again(self, reason: Reason) -> Reason | None:
        """A world broke."""
        self._failures += 1
        limit = self._settings.reset_limit
        reached = limit is not None and self._failures > limit
        return because(Why.RESET_LIMIT, cause=reason, limit=limit) if reached else None

    def all_lost(self, world: World, gathering: Gathering) -> Reason | None:
        """Newcomers know nothing of what was learned: going on with them would be starting over, unasked; but for a
        checkpoint.
        """
        here = self._staff.roster.first_at(*AT_STAKE)
        if not world.trained or any(s.worker in world.places for s in here):
            return None
        lost = because(
            Why.ALL_LOST,
            members=len(world.members),
            generation=world.generation,
            cause=gathering.reason,
            wrote=self._staff.last_output,
        )
        return self._unless_anew(gathering, lost)

    def nothing_held(self, world: World, gathering: Gathering) -> Reason | None:
        """The same with survivors that had joined, but were not given the state yet. They hold no commit."""
        if world.running and (world.trained or world.commit is not None):
            return self._unless_anew(gathering, because(Why.NO_COMMIT, cause=gathering.reason))
        return None

    def _unless_anew(self, gathering: Gathering, end: Reason) -> Reason | None:
        """The end of the job, unless it may begin anew from a checkpoint."""
        limit = self._settings.restarts
        if limit is None or gathering.anew:
            return None if gathering.anew else end
        if self._restarts >= limit:
            return because(Why.RESTARTS_SPENT, cause=end, limit=limit) if limit else end
        self._restarts += 1
        gathering.anew = True
        cause, restart = gathering.reason, self._restarts
        gathering.reason = because(Why.FROM_CHECKPOINT, cause=cause, restart=restart, limit=limit)
        self._actions.log("warning", str(gathering.reason))
        return None

    def checkpoint_made(self) -> None:
        """There is progress that lasts."""
        self._restarts = 0

    def turned_away(self, world: World, record: WorkerRecord) -> Reason | None:
        """Its state differs from the world's. If that of a member before it in its slot did in the same way, it will
        for ever.
        """
        worker = record.worker
        lost = because(Why.LOST_REJECTED, worker=str(worker))
        self.script_failures.failed(record.slot, lost)
        member = worker in world.places
        first = self.script_failures.repeats(worker, record.layout, member=member)
        if first is None or not self._settings.judge_scripts:
            return None
        rank_0 = str(world.members[0])
        return because(Why.LAYOUTS_DIFFER, first=str(first), worker=str(worker), rank_0=rank_0)

    def was_stuck(self, generation: int) -> None:
        """A member was fenced because it was stuck."""
        self._stuck_in.add(generation)

    def hung(self, generation: int) -> None:
        """All GPUs waited for each other, and the world was given up for that."""
        self._hung_in.add(generation)

    @property
    def worlds_hung(self) -> int:
        """With no new commit between."""
        return len(self._hung_in)

    def in_circles(
        self, world: World, gathering: Gathering, commit: Commit | None
    ) -> Reason | None:
        """The next world is about to begin with ``commit``: was there any progress in the last one?"""
        if commit is not None and commit.generation == world.generation and commit.number > 0:
            self._staff.slots.cooldown.clear((w.host, w.slot) for w in world.members)
            self._barren = 0
            self._stuck_in.clear()
            self._hung_in.clear()
        elif len(self._stuck_in) >= self._settings.stranded_failures:
            worlds = len(self._stuck_in)
            return because(Why.STUCK_AGAIN, worlds=worlds, cause=gathering.reason)
        elif gathering.had_loss:
            self._barren = 0
        elif gathering.kind is Kind.RECOVERY:
            self._barren += 1
            if self._barren >= self._settings.stranded_failures:
                return because(Why.IN_CIRCLES, worlds=self._barren, cause=gathering.reason)
        return None

    def short(self, gathering: Gathering, have: int) -> Reason | None:
        """Too few are ready, and nobody is awaited. Says what is awaited, once for each number."""
        slots, need = self._staff.slots, self.needed()
        if not slots.known:
            return None
        if not self._settings.elastic and slots.completed:
            return because(Why.OTHERS_EXITED, exited=len(slots.completed), waiting=have)
        coming = any(s.stage is not WorkerStage.READY for s in self._staff.roster.in_plans())
        if not coming and slots.spent():
            return self.spent()
        if gathering.short_by is None:
            gathering.short_by = self._actions.now + self._settings.elastic_timeout_s
        if gathering.said != (have, need):
            gathering.said = (have, need)
            left = gathering.short_by - self._actions.now
            more = counted(max(1, need - have), "more worker")
            said = f"{have} ready, {need} needed; giving up in {left:.0f} s"
            self._actions.log("warning", f"waiting for {more}: {said}")
        return None

    def too_few(self) -> Reason:
        """The reason for giving up: the wait was too long."""
        ready = len(self._staff.roster.at(WorkerStage.READY))
        within_s = self._settings.elastic_timeout_s
        return because(Why.TOO_FEW, ready=ready, needed=self.needed(), within_s=within_s)

    def spent(self) -> Reason:
        """No slot can give a worker any more."""
        attempts, wrote = self._settings.slot_attempts, self._staff.last_output
        return because(Why.SLOTS_SPENT, attempts=attempts, needed=self.needed(), wrote=wrote)
