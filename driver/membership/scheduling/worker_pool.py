"""Decisions about worker processes: when to start, release or kill them.

Pure: no I/O, no clock. The pool has no notion of phases or worlds. `membership` decides when workers may start and
which must leave. The pool carries out these decisions and sets deadlines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import inf

from elastic.driver.events import KillWorker, LetGo, RejectWorker, StartWorker, WelcomeWorker
from elastic.driver.membership.records.actions import ActionList
from elastic.driver.membership.records.garbage_collection import uncollected
from elastic.driver.membership.records.roster import AT_STAKE, Roster, WorkerRecord, WorkerStage
from elastic.driver.membership.scheduling import rank_order
from elastic.driver.membership.scheduling.slots import Slots
from elastic.driver.reasons import Fact, Reason, ReasonKind, because
from elastic.driver.settings import Settings
from elastic.driver.tracebacks import exception_line
from elastic.protocol.messages import Worker

# seconds that the first world waits for a worker's health check after the worker has called init()
HELD_S = 5.0
# seconds beyond the time limit of a health check for its result to arrive
CHECK_SLACK_S = 10.0


class WorkerPool:
    """Pool of the live worker processes and the slots of a job."""

    def __init__(self, settings: Settings, actions: ActionList) -> None:
        self.settings = settings
        self.actions = actions
        self.roster = Roster()
        self.slots = Slots(settings)
        self.last_output = ""
        self.spare = 0  # number of standbys to start
        self.asked: int | None = None  # size requested by an operator, which replaces workers_max
        # Time at which the first worker was ready, and the timeout for starting workers began.
        self._first_ready_at: float | None = None
        # State at the last check for free slots, and the earliest time at which a slot can become free while this state
        # is unchanged.
        self._looked_at: tuple[int, ...] | None = None
        self._look_again_at = 0.0
        self._cooling: tuple[tuple[int, int, bool] | None, float] = (None, 0.0)

    @property
    def workers_max(self) -> int:
        """Return the size of the largest world, as last requested."""
        return self.settings.workers_max if self.asked is None else self.asked

    # ---- starting --------------------------------------------------------------------------------------------------

    def start(self, members: Sequence[Worker]) -> None:
        """Start workers in free slots, up to the size of the largest world plus the standbys.

        In a fixed-size job, each worker is started once.

        While members train, the number of workers that start at the same time may be limited, because many concurrent
        imports compete with training for CPU time.
        """
        wanted = self._wanted()
        if wanted <= 0 or (not self.settings.elastic and self.slots.started):
            return
        room = wanted
        if members and self.settings.starting_max is not None and not self._short():
            room = self.settings.starting_max - self.roster.count(WorkerStage.STARTING)
            if room <= 0:
                # The next check takes place when a starting worker calls init() or exits.
                return
        # Checking every slot after each event would take too long. If the state has not changed since the last check,
        # no slot is free: had that check found one, it would have started a worker, which changes the roster's version.
        state = (self.roster.version, self.slots.version, self._short())
        if state == self._looked_at and self.actions.now < self._look_again_at:
            return
        self._looked_at, self._look_again_at = state, self.next_slot_at() or inf
        with uncollected():
            self._start(members, min(wanted, room), needed=max(0, wanted - self.spare))

    def _start(self, members: Sequence[Worker], most: int, *, needed: int) -> None:
        """Start up to ``most`` workers in free slots. Those after the first ``needed`` are standbys."""
        free = self.slots.free(self.roster.hosts, self.actions.now, short=self._short())
        started = [self.slots.start(slot) for slot in free[:most]]
        # New workers never get rank 0 while members are training.
        order, first = [*members, *started], len(members)
        if not members:
            order, first = sorted([*self.roster, *started], key=self.slots.order), 0
        found = rank_order.places(order, first) if started else []
        places = dict(zip(order[first:], found, strict=True)) if started else {}
        for number, worker in enumerate(started):
            record = WorkerRecord(worker, self.actions.now, places[worker])
            record.unchecked = bool(self.settings.health_check)
            self.roster[worker] = record
            why = ReasonKind.FIRST_START if worker.incarnation == 1 else ReasonKind.SLOT_IS_FREE
            if number >= needed and worker.incarnation == 1:
                why = ReasonKind.TO_STAND_BY
            self.actions.add(StartWorker(worker, places[worker], because(why)))

    def hold(self, record: WorkerRecord) -> None:
        """Delay the answer to init() until the slot has passed its health check, and set a deadline for the check."""
        record.stage = WorkerStage.HELD
        record.held_until = self.actions.now + HELD_S
        record.check_by = self.actions.now + self.settings.health_check_s + CHECK_SLACK_S

    def welcome(self, record: WorkerRecord, members: Sequence[Worker]) -> None:
        """Answer the init() call of a worker.

        A worker that is not in the current world receives a provisional place, never rank 0.
        """
        record.stage = WorkerStage.CONNECTED
        place = record.first_place
        if members:
            place = rank_order.next_place(members, record.worker)
        elastic = self.settings.elastic
        self.actions.add(WelcomeWorker(record.worker, place, bool(members), elastic))

    def has_waiting_starts(self) -> None:
        """Start the timeout for starting workers to become ready, because one worker is ready and waits for them."""
        if self._first_ready_at is None:
            self._first_ready_at = self.actions.now

    def starting(self) -> Iterator[WorkerRecord]:
        """Yield the workers that may still become ready for the first world.

        Their timeout starts when the first worker is ready and waits for the others.
        """
        for record in self.roster.first_at(WorkerStage.STARTING, WorkerStage.CONNECTED):
            start_by = self._start_by(record)
            if start_by is None or self.actions.now < start_by:
                yield record
        for record in self.roster.first_at(WorkerStage.HELD):
            if self.actions.now < record.held_until:
                yield record

    def _start_by(self, record: WorkerRecord) -> float | None:
        if self._first_ready_at is None:
            return None
        return max(record.started_at, self._first_ready_at) + self.settings.start_timeout_s

    def _short(self) -> bool:
        return self.roster.staying() < self.settings.workers_min

    def _wanted(self) -> int:
        if not self.slots.known:
            return 0
        most = self.workers_max + self.spare
        return most - self.roster.staying() - len(self.slots.completed)

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def announce(
        self, hosts: dict[str, int], members: Collection[Worker], *, fixed: bool = False
    ) -> None:
        """Apply a new list from discovery.

        Workers on hosts that are no longer listed are asked to leave. Such a request is withdrawn if the host is listed
        again.
        """
        self.slots.announce(hosts, fixed=fixed)
        for record in self.roster.values():
            worker = record.worker
            listed = worker.slot < hosts.get(worker.host, 0)
            if listed and record.unlisted and record.in_plans:
                record.leaving, record.unlisted = None, False
            elif not listed and not record.leaving and record.in_plans:
                record.unlisted = True
                left = because(ReasonKind.HOST_NOT_LISTED, host=record.worker.host)
                self.ask_to_leave(record, left, members)

    def leave(self, record: WorkerRecord, reason: Reason, members: Collection[Worker]) -> None:
        """Ask a worker to leave. Its slot then stays empty."""
        if record.in_plans and not record.hurried:
            record.unlisted = record.noticed = False
            self.slots.leave(record.slot)
            self.ask_to_leave(record, reason, members)

    def ask_to_leave(
        self, record: WorkerRecord, reason: Reason, members: Collection[Worker]
    ) -> None:
        """Ask a worker to leave. A member leaves at a planned change, any other worker immediately."""
        record.leaving = reason
        if record.stage in (WorkerStage.STARTING, WorkerStage.HELD):
            self.dismiss(record, reason, self.settings.leave_s)
            self.kill(record, reason)
        elif record.worker not in members:
            # Members are released later, when the planned change takes place.
            self.release(record, reason)

    def release(self, record: WorkerRecord, reason: Reason) -> None:
        if record.stage is not WorkerStage.DISMISSED:
            record.leaving = reason
            within_s = self.settings.leave_s
            self.dismiss(record, because(ReasonKind.NOT_LEFT, within_s=within_s), within_s)
            self.actions.add(LetGo(record.worker, reason))

    def release_all(self, reason: Reason) -> None:
        """Ask all workers to exit, except those that have finished."""
        for record in [*self.roster.in_plans()]:
            if record.stage in (WorkerStage.STARTING, WorkerStage.HELD):
                self.kill(record, reason)
            else:
                self.release(record, reason)

    def part_again(self, record: WorkerRecord) -> None:
        """Repeat the request to leave, or the kill, for a worker that should have exited but still sends messages."""
        worker = record.worker
        if record.killed_for:
            self.actions.add(KillWorker(worker, record.killed_for))
            self.actions.add(LetGo(worker, record.killed_for, True))
        elif record.rejected:
            self.actions.add(RejectWorker(worker, record.layout, record.rejected))
        else:
            reason = record.leaving or record.exit_why
            assert reason is not None
            self.actions.add(LetGo(worker, reason))

    def reject(self, record: WorkerRecord, expected: str) -> None:
        text = f"rejected {record.worker}: its state differs from that of the world"
        self.actions.log("error", text)
        record.rejected = expected
        self.dismiss(record, because(ReasonKind.REJECTED), self.settings.leave_s)
        self.actions.add(RejectWorker(record.worker, record.layout, expected))

    def dismiss(self, record: WorkerRecord, why: Reason, within_s: float) -> None:
        """Exclude a worker from all plans, and kill it if it has not exited after ``within_s`` seconds."""
        record.stage = WorkerStage.DISMISSED
        record.exit_by = self.actions.now + within_s
        record.exit_why = why

    def discard(self, record: WorkerRecord, reason: Reason) -> None:
        """Kill and replace a worker that cannot continue although it did not fail."""
        record.leaving = reason
        self.dismiss(record, reason, self.settings.disconnect_s)
        self.kill(record, reason)

    def disconnected(self, record: WorkerRecord, *, silent: bool) -> None:
        """Handle the loss of a worker's connection.

        The worker usually exits immediately afterwards. If ``silent``, its host is unreachable, and no exit will be
        reported.
        """
        if record.in_plans and silent and not record.killed_for:
            self.fence(record, because(ReasonKind.CUT_OFF))
        elif record.in_plans and record.exit_by is None:
            record.exit_by = self.actions.now + self.settings.disconnect_s
            record.exit_why = because(ReasonKind.CONNECTION_LOST)

    def fence(self, record: WorkerRecord, reason: Reason) -> None:
        self.actions.log("error", f"fencing {record.worker}: {reason}", reason)
        self.kill(record, reason)

    def quarantine(self, record: WorkerRecord, why: Reason, members: Collection[Worker]) -> None:
        """Quarantine the slot, or the host, of a worker that computes wrong gradients. See `Settings.quarantine`.

        In a job with health checks, the slot's next health check determines whether it is used again.
        """
        host, which = record.worker.host, self.settings.quarantine
        if which == "off" or not self.settings.elastic:
            return
        place = host if which == "host" else f"{host}:{record.worker.slot}"
        reason = because(ReasonKind.QUARANTINED, place=place, worker=str(record.worker))
        if which == "host":
            for other in [*self.roster.hosts.get(host, {}).values()]:
                if other is not record and other.in_plans and other.leaving is None:
                    other.noticed = True
                    self.ask_to_leave(other, reason, members)
        if self.settings.health_check:
            self.slots.failed_check(record.slot, self.actions.now, why)
            then = "used again once a health check has passed"
        else:
            self.slots.quarantine(record.slot, reason)
            then = f"undo with: elasticrun drain {host} --off"
        self.actions.log("warning", f"{reason}; {then}", reason)

    def kill(self, record: WorkerRecord, reason: Reason) -> None:
        if not record.killed_for:
            record.killed_for = reason
            record.exit_by = self.actions.now + self._dies_within_s(record)
            self.actions.add(KillWorker(record.worker, reason))

    def _dies_within_s(self, record: WorkerRecord) -> float:
        return self.settings.kill_s if record.stage in AT_STAKE else self.settings.leave_s

    # ---- exited ----------------------------------------------------------------------------------------------------

    def record_failure(self, record: WorkerRecord, what: str) -> None:
        """Record an unexpected exit of a worker, and start the cooldown of its slot."""
        worker, now, settings = record.worker, self.actions.now, self.settings
        killed_for = record.killed_for
        if killed_for is not None and killed_for.facts.get("quarantine", "off") != "off":
            return  # A quarantined slot does not become free when its cooldown ends.
        if not self.slots.lists(worker):
            self.actions.log("info", f"{worker} ended with {what}; its slot is no longer listed")
            return
        if self.slots.closed(worker.host, now):
            text = f"{worker} ended with {what}; its machine is being reclaimed"
            self.actions.log("info", text)
            return
        since = record.resumed_at
        fruitful = since is not None and now - since >= settings.cooldown_max_s
        wait = self.slots.failed(record.slot, now, fruitful=fruitful)
        if wait is not None:
            early: dict[str, Fact] = {}
            if not record.first_generation and killed_for is None:
                early = {"what": exception_line(self.last_output)}
            facts: dict[str, Fact] = {"worker": str(worker), "exit": what, "wait_s": wait}
            cools = because(ReasonKind.SLOT_COOLS, **facts, **early)
            self.actions.log("warning", str(cools), cools)
            return
        given_up = because(
            ReasonKind.SLOT_GIVEN_UP,
            slot=f"{worker.host}:{worker.slot}",
            attempts=settings.slot_attempts,
            exit=what,
            wrote=self.last_output,
        )
        self.actions.log("error", str(given_up), given_up)

    def all_fail(self) -> bool:
        """Return whether all workers fail before training. If so, the script is at fault and retries are pointless."""
        hopeful = any(each.stage is not WorkerStage.STARTING for each in self.roster.in_plans())
        return self.slots.all_fail() and not hopeful

    # ---- time ------------------------------------------------------------------------------------------------------

    def deadlines(self, *, starting: bool, first: bool) -> Iterator[float]:
        """Yield the times at which `overdue` must be called.

        Args:
            starting: whether workers may be started now.
            first: whether the first world has not been formed yet and connected workers wait for it.
        """
        exit_by = self.roster.first_exit_by()
        if exit_by is not None:
            yield exit_by
        for stage in (
            (WorkerStage.STARTING, WorkerStage.CONNECTED) if first else (WorkerStage.STARTING,)
        ):
            # Workers are sorted by start time.
            for record in self.roster.first_at(stage):
                start_by = self._start_by(record)
                if start_by is None:
                    break
                if start_by > self.actions.now:
                    yield start_by
                    break
        if first:
            held = (record.held_until for record in self.roster.first_at(WorkerStage.HELD))
            yield from (until for until in held if until > self.actions.now)
        if starting and self._wanted() > 0:
            next_at = self.next_slot_at()
            if next_at is not None:
                yield next_at

    def some_return(self) -> bool:
        """Return whether an empty slot will soon run a worker again.

        Slots on machines that will be reclaimed are not considered.
        """
        at, soon = self.next_slot_at(), self.actions.now + self.settings.cooldown_max_s
        later = self.roster.any_at(WorkerStage.DISMISSED) or (at is not None and at <= soon)
        return self._wanted() > 0 and later

    def next_slot_at(self) -> float | None:
        """Return the time at which a cooling slot becomes usable, in seconds, or None if no slot is cooling."""
        state = (self.roster.version, self.slots.version, self._short())
        if state != self._cooling[0] or self._cooling[1] <= self.actions.now:
            at = None
            if self.settings.elastic:
                at = self.slots.next_at(self.roster.hosts, self.actions.now, short=self._short())
            self._cooling = (state, inf if at is None else at)
        return None if self._cooling[1] == inf else self._cooling[1]

    def overdue(self) -> list[WorkerRecord]:
        """Kill the workers that have missed a deadline. Return those that cannot be killed."""
        for record in self.roster.first_at(WorkerStage.STARTING):
            if not self.actions.expired(self._start_by(record)):
                break  # Workers are sorted by start time, so all others were started later.
            if not record.killed_for:
                late = because(ReasonKind.NO_INIT, within_s=self.settings.start_timeout_s)
                self.fence(record, late)
        unkillable = []
        for record in self.roster.overdue(self.actions.now):
            if record.killed_for:
                record.exit_by = None
                worker, within_s = str(record.worker), self._dies_within_s(record)
                undead = because(ReasonKind.CANT_BE_KILLED, worker=worker, within_s=within_s)
                self.actions.log("error", str(undead), undead)
                unkillable.append(record)
            else:
                assert record.exit_why is not None
                self.kill(record, record.exit_why)
        return unkillable
