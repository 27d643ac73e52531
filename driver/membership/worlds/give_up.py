"""Rules for ending a job without success: reset limits, lack of progress, and too few workers. Pure: no I/O, no clock.

Each rule returns the reason to end the job, or None to continue.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.driver.membership.records.actions import ActionList
from elastic.driver.membership.records.roster import AT_STAKE, WorkerRecord, WorkerStage
from elastic.driver.membership.scheduling.worker_pool import WorkerPool
from elastic.driver.membership.worlds.gathering import NAMED, Gathering, Kind
from elastic.driver.membership.worlds.script_failures import ScriptFailures
from elastic.driver.membership.worlds.world import World
from elastic.driver.reasons import Reason, ReasonKind, because, counted
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit


class GiveUpRules:
    """Rules for ending a job without success, and the history that they need."""

    def __init__(self, settings: Settings, staff: WorkerPool, actions: ActionList) -> None:
        self._settings = settings
        self._staff = staff
        self._actions = actions
        self._failures = 0  # number of failed worlds, not counting planned changes
        # generations in which the driver fenced a stuck worker, since the last new commit
        self._stuck_in: set[int] = set()
        # generations with hung GPUs and no identified culprit, since the last new commit
        self._hung_in: set[int] = set()
        self._restarts = 0  # number of restarts from a checkpoint since the last new checkpoint
        self._barren = 0  # number of consecutive recoveries without a lost worker or a new commit
        self.script_failures = ScriptFailures()

    def needed(self) -> int:
        """Return the minimum size of the next world.

        After the first worker of an elastic job has finished, the minimum is 1.
        """
        if not self._settings.elastic:
            return self._settings.np
        return 1 if self._staff.roster.at(WorkerStage.FINISHED) else self._settings.workers_min

    def failed_again(self, reason: Reason) -> Reason | None:
        """Count a failed world. Return the reason to end the job if --reset-limit is exceeded, otherwise None."""
        self._failures += 1
        limit = self._settings.reset_limit
        reached = limit is not None and self._failures > limit
        return because(ReasonKind.RESET_LIMIT, cause=reason, limit=limit) if reached else None

    def all_lost(self, world: World, gathering: Gathering) -> Reason | None:
        """Return the reason to end the job if all members are lost and no checkpoint can be restored.

        New workers hold no state, so they would silently restart training from the beginning.
        """
        here = self._staff.roster.first_at(*AT_STAKE)
        if not world.trained or any(s.worker in world.places for s in here):
            return None
        lost = because(
            ReasonKind.ALL_LOST,
            members=len(world.members),
            generation=world.generation,
            cause=gathering.reason,
            wrote=self._staff.last_output,
        )
        return self._unless_restarted(gathering, lost)

    def nothing_held(self, world: World, gathering: Gathering) -> Reason | None:
        """Return the reason to end the job if no survivor holds the state."""
        if world.running and (world.trained or world.commit is not None):
            return self._unless_restarted(
                gathering, because(ReasonKind.NO_COMMIT, cause=gathering.reason)
            )
        return None

    def _unless_restarted(self, gathering: Gathering, end: Reason) -> Reason | None:
        limit = self._settings.restarts
        if limit is None or gathering.anew:
            return None if gathering.anew else end
        if self._restarts >= limit:
            return because(ReasonKind.RESTARTS_SPENT, cause=end, limit=limit) if limit else end
        self._restarts += 1
        gathering.anew = True
        cause, restart = gathering.reason, self._restarts
        gathering.reason = because(
            ReasonKind.FROM_CHECKPOINT, cause=cause, restart=restart, limit=limit
        )
        self._actions.log("warning", str(gathering.reason))
        return None

    def checkpoint_made(self) -> None:
        """Record that a new checkpoint is durable. This counts as progress."""
        self._restarts = 0

    def turned_away(self, world: World, record: WorkerRecord) -> Reason | None:
        """Record that a worker was rejected because its state differs from that of the world.

        Return the reason to end the job if the previous member in its slot had the same difference, because every later
        worker would also be rejected.
        """
        worker = record.worker
        lost = because(ReasonKind.LOST_REJECTED, worker=str(worker))
        self.script_failures.failed(record.slot, lost)
        member_of = world.generation if worker in world.places else None
        first = self.script_failures.repeats(worker, record.layout, member_of=member_of)
        if first is None or not self._settings.judge_scripts:
            return None
        rank_0 = str(world.members[0])
        return because(
            ReasonKind.LAYOUTS_DIFFER, first=str(first), worker=str(worker), rank_0=rank_0
        )

    def shards_lost(self, world: World, text: str) -> Reason:
        """Return the reason to end the job because some shards of the state are lost on all workers.

        If a member was rejected when the last world was formed, the reason is the difference in its state.

        Args:
            world: the last world.
            text: description of the missing shards.
        """
        away = self.script_failures.turned_away_before(world.generation)
        if away is None:
            return because(ReasonKind.SHARDS_LOST, text=text)
        rank_0 = str(world.members[0])
        return because(ReasonKind.LAYOUTS_DIFFER, first=None, worker=str(away), rank_0=rank_0)

    def was_stuck(self, generation: int) -> None:
        """Record that a stuck member was fenced."""
        self._stuck_in.add(generation)

    def hung(self, generation: int) -> None:
        """Record that a world failed because all ranks waited for their GPUs and no worker was blamed."""
        self._hung_in.add(generation)

    @property
    def worlds_hung(self) -> int:
        """Number of worlds that have hung since the last new commit."""
        return len(self._hung_in)

    def in_circles(
        self, world: World, gathering: Gathering, commit: Commit | None
    ) -> Reason | None:
        """Return the reason to end the job if too many consecutive worlds made no progress, or None.

        Args:
            world: the last world.
            gathering: the current gathering, which follows that world.
            commit: commit from which the next world begins.
        """
        if commit is not None and commit.generation == world.generation and commit.number > 0:
            self._staff.slots.cooldown.clear((w.host, w.slot) for w in world.members)
            self._barren = 0
            self._stuck_in.clear()
            self._hung_in.clear()
        elif len(self._stuck_in) >= self._settings.stranded_failures:
            worlds = len(self._stuck_in)
            return because(ReasonKind.STUCK_AGAIN, worlds=worlds, cause=gathering.reason)
        elif gathering.had_loss:
            self._barren = 0
        elif gathering.kind is Kind.RECOVERY:
            self._barren += 1
            if self._barren >= self._settings.stranded_failures:
                return because(ReasonKind.IN_CIRCLES, worlds=self._barren, cause=gathering.reason)
        return None

    def short(self, gathering: Gathering, have: int) -> Reason | None:
        """Handle a shortage of workers. It is logged whenever the number of ready workers has changed.

        Returns:
            The reason to end the job, or None.
        """
        slots, need = self._staff.slots, self.needed()
        if not slots.known:
            return None
        if not self._settings.elastic and slots.completed:
            return because(ReasonKind.OTHERS_EXITED, exited=len(slots.completed), waiting=have)
        coming = any(s.stage is not WorkerStage.READY for s in self._staff.roster.in_plans())
        if not coming and slots.spent():
            return self.spent()
        if slots.fixed and (end := self._too_few_slots(need)) is not None:
            return end
        if slots.queued:
            gathering.short_by = None
        elif gathering.short_by is None:
            gathering.short_by = self._actions.now + self._settings.elastic_timeout_s
        if gathering.said != (have, need, slots.queued):
            gathering.said = (have, need, slots.queued)
            more = counted(max(1, need - have), "more worker")
            if gathering.short_by is None:
                then = f"{counted(slots.queued, 'host')} waiting for admission to the queue"
            else:
                then = f"giving up in {gathering.short_by - self._actions.now:.0f} s"
            text = f"{have} ready, {need} needed; {then}"
            if named := self._unhealthy():
                text = f"{text}; health checks fail on {named}"
            if slots.quarantined:
                text = f"{text}; quarantined: {named_slots([*slots.quarantined])}"
            self._actions.log("warning", f"waiting for {more}: {text}")
        return None

    def _too_few_slots(self, need: int) -> Reason | None:
        slots = self._staff.slots
        usable = slots.usable({record.slot for record in self._staff.roster.in_plans()})
        given_up = slots.given_up()
        if usable >= need or not given_up:
            return None
        named = ", ".join(f"{host}:{slot}" for host, slot in given_up[:NAMED])
        return self._of_healthy(
            because(
                ReasonKind.TOO_FEW_SLOTS,
                usable=usable,
                needed=need,
                given_up=named,
                more=max(0, len(given_up) - NAMED),
                attempts=self._settings.slot_attempts,
                wrote=self._staff.last_output,
            )
        )

    def too_few(self) -> Reason:
        """Return the reason to end the job after too few workers were ready for too long."""
        ready = len(self._staff.roster.at(WorkerStage.READY))
        within_s = self._settings.elastic_timeout_s
        return self._of_healthy(
            because(ReasonKind.TOO_FEW, ready=ready, needed=self.needed(), within_s=within_s)
        )

    def spent(self) -> Reason:
        """Return the reason to end the job after all slots have become unusable."""
        attempts, wrote = self._settings.slot_attempts, self._staff.last_output
        return self._of_healthy(
            because(ReasonKind.SLOTS_SPENT, attempts=attempts, needed=self.needed(), wrote=wrote)
        )

    def _of_healthy(self, end: Reason) -> Reason:
        named = self._unhealthy()
        return because(ReasonKind.TOO_FEW_HEALTHY, cause=end, slots=named) if named else end

    def _unhealthy(self) -> str:
        return named_slots(self._staff.slots.listed_unhealthy())


def named_slots(slots: Sequence[tuple[str, int]]) -> str:
    """Format a list of slots: the names of the first slots, and the number of slots that are not named."""
    more = f" and {len(slots) - NAMED} more" if len(slots) > NAMED else ""
    return ", ".join(f"{host}:{slot}" for host, slot in slots[:NAMED]) + more
