"""Decisions between a job's outcome and the driver's exit: waits, kills and the exit code. Pure: no I/O, no clock.

Outcome 0 (success): members run until they exit, without a time limit. The job ends when all workers have exited.

- The exit code is 0, or 1 if a member fails. With --strict, it is also 1 if fewer workers returned than started.
- Workers that are not members are asked to leave, and are killed after ``leave_s``.
- Members that train again after the outcome is known wait for each other. A frozen member is killed after ``idle_s``.
  If a member fails, the other members are killed after ``leave_s``.

Any other outcome: all workers are notified, and killed after GRACE_S. The job ends with the outcome's code when all
workers have exited, or DEATH_S after the kill.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic.driver import events
from elastic.driver.membership.membership import describe_exit
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.protocol.messages import Place, Worker

GRACE_S = 1.0  # seconds from the notification that the job has ended to the kill
DEATH_S = 15.0  # seconds within which killed processes must exit
REMIND_S = 30.0  # seconds between log lines about workers that have not exited


class Shutdown:
    """Decisions from the outcome of a job to the driver's exit.

    Args:
        outcome: the decision of membership to end the job.
        members: places of the last world's members.
        alive: all workers with a running process.
        leave_s: seconds within which workers that were asked to leave must exit.
        idle_s: seconds after which a frozen member that trains again is killed. 0 means never.
        failed: members whose training function raised an exception or called sys.exit.
        now: current time on the caller's clock, in seconds.
    """

    def __init__(
        self,
        outcome: events.EndJob,
        *,
        members: Mapping[Worker, Place],
        alive: Collection[Worker],
        leave_s: float,
        idle_s: float = 0.0,
        failed: Mapping[Worker, Reason] | None = None,
        now: float,
    ) -> None:
        lacking = outcome.code == 0 and bool(outcome.reason.facts.get("strict"))
        self.code = 1 if lacking else outcome.code
        self.begun: list[events.Action] = []
        if lacking:
            short = because(ReasonKind.FEWER_RETURNED)
            self.begun.append(events.Report("error", str(short), short))
        self._failed = {} if failed is None else failed
        self._leave_s = leave_s
        self._idle_s = idle_s
        self._again = False
        # (time, cause) for each frozen worker
        self._frozen: dict[Worker, tuple[float, str]] = {}
        self._members = dict(members)
        self._alive = set(alive)
        self._remind_at: float | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        if outcome.code == 0:
            self._remind_at = now + REMIND_S
            self._kill_at = now + leave_s
        else:
            self._kill_at = now + GRACE_S

    @property
    def over(self) -> bool:
        return not self._alive

    def next_deadline(self) -> float | None:
        """Return the time at which `overdue` must be called next, or None."""
        if self.over:
            return None
        times = [self._remind_at, self._kill_at, self._give_up_at]
        times += [since + self._idle_s for since, _ in self._frozen.values() if self._fences]
        return min((at for at in times if at is not None), default=None)

    @property
    def _fences(self) -> bool:
        return self._again and self.code == 0 and self._idle_s > 0

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Return the actions for an event about a worker."""
        match event:
            case events.WorkerExited():
                return self._exited(event, now)
            case events.WorkerSpent(worker, doing="training" | "data" | "committing") if (
                worker in self._members and not self._again
            ):
                self._again = True
                failed_before = self.code != 0 and self._remind_at is not None
                if failed_before:
                    self._fail(now)
            case events.WorkerFrozen(worker, how) if (
                worker in self._members and worker in self._alive
            ):
                self._frozen.setdefault(worker, (now, how))
            case events.WorkerThawed(worker):
                self._frozen.pop(worker, None)
            case _:
                pass
        return []

    def _exited(self, event: events.WorkerExited, now: float) -> list[events.Action]:
        self._alive.discard(event.worker)
        self._frozen.pop(event.worker, None)
        place = self._members.get(event.worker)
        if self.code != 0 or event.code == 0 or place is None:
            return []
        self._fail(now)
        name = f"rank {place.rank} ({event.worker} on {event.worker.host})"
        why = because(
            ReasonKind.FAILED_AFTER_TRAINING,
            who=name,
            exit=event.reason or describe_exit(event.code),
        )
        if (cause := self._failed.get(event.worker)) is not None:
            why = because(ReasonKind.FAILED_IN_TRAINING, cause=cause)
        return [events.Report("error", str(why), why)]

    def _fail(self, now: float) -> None:
        self.code = 1
        if self._again:  # Other members may wait for this member in a collective.
            self._remind_at, self._kill_at = None, now + self._leave_s

    def lost(self, workers: Collection[Worker], now: float) -> list[events.Action]:
        """Return the actions for the loss of a host. The exits of its workers cannot be observed."""
        members = sorted(self._alive & self._members.keys() & set(workers), key=self._rank)
        self._alive -= set(workers)
        if self.code != 0 or not members:
            return []
        self._fail(now)
        named = ", ".join(f"rank {self._rank(w)} ({w})" for w in members)
        lost = "was lost with its host" if len(members) == 1 else "were lost with their host"
        text = "after training had succeeded: no exit code was received, so the job fails with exit code 1"
        return [events.Report("error", f"{named} {lost} {text}")]

    def stopped(self, code: int, now: float) -> None:
        """Record a stop request, after which the job fails with exit code ``code``.

        The remaining workers are killed after GRACE_S seconds.
        """
        self.code = code
        self._remind_at = None
        if self._give_up_at is None:
            self._kill_at = now + GRACE_S

    def hurried(self, now: float) -> list[events.Action]:
        """Return the actions for a second stop request, which kills all workers immediately."""
        self._remind_at = None
        self._kill_at = now
        return self.overdue(now)

    def overdue(self, now: float) -> list[events.Action]:
        """Return the actions for expired deadlines."""
        actions: list[events.Action] = []
        for worker, (since, how) in sorted(self._frozen.items()) if self._fences else ():
            if now >= since + self._idle_s:
                del self._frozen[worker]
                actions.append(events.KillWorker(worker, because(ReasonKind.FROZEN, how=how)))
        if self._remind_at is not None and now >= self._remind_at:
            self._remind_at = now + REMIND_S
            awaited = sorted(self._alive & self._members.keys(), key=self._rank)
            if awaited:
                named = ", ".join(f"rank {self._rank(w)} ({w})" for w in awaited[:8])
                more = f" and {len(awaited) - 8} more" if len(awaited) > 8 else ""
                text = f"training ended; waiting for {named}{more} to exit: their code after training is still running"
                actions.append(events.Report("info", text))
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            ending = self._remind_at is None
            if ending:
                self._give_up_at = now + DEATH_S
            reason = because(ReasonKind.NOT_LEFT, within_s=self._leave_s)
            if ending:
                reason = because(ReasonKind.JOB_OVER)
            to_kill = self._alive if ending else self._alive - self._members.keys()
            actions += [events.KillWorker(worker, reason) for worker in sorted(to_kill)]
        if self._give_up_at is not None and now >= self._give_up_at:
            left = ", ".join(str(worker) for worker in sorted(self._alive))
            actions.append(
                events.Report("error", f"{left} could not be killed; exiting without them")
            )
            self._alive.clear()
        return actions

    def _rank(self, worker: Worker) -> int:
        return self._members[worker].rank
