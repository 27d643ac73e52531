"""Decisions about one job. `Membership` decides during training, and `Shutdown` after the outcome is known.

Pure: no I/O, no clock.

    answer = decisions.answer(event, now)            the actions of membership, which are written to the journal
    actions = decisions.follow(event, answer, now)   all actions to perform

If `Membership` raises an exception, it is not called again, and the job ends. An operator's first stop request sets the
exit code and starts the grace period. The second request kills all workers immediately.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from elastic.driver.events import (
    Action,
    EndJob,
    Event,
    HostLost,
    HostReported,
    LetGo,
    PublishWorld,
    RejectWorker,
    StartWorker,
    StopRequested,
    WorkerExited,
    WorkerQuit,
    WorkerRaised,
)
from elastic.driver.job.shutdown import Shutdown
from elastic.driver.reasons import Reason, ReasonKind, as_sentence, because
from elastic.protocol.messages import Place, Worker

# Events that `JobDecisions.follow` handles even if they cause no action.
NOTED = (WorkerExited, WorkerRaised, WorkerQuit, HostLost, HostReported, StopRequested)


class Decider(Protocol):
    """Interface of `Membership`. Tests provide other implementations."""

    def handle(self, event: Event, now: float, *, more: bool = False) -> list[Action]: ...

    def next_deadline(self) -> float | None: ...


class JobDecisions:
    """Decisions about one job.

    Args:
        running: workers that were running under the previous driver. Empty unless this driver resumes a job.
        members: members of the world under the previous driver.
    """

    def __init__(
        self,
        membership: Decider,
        *,
        leave_s: float,
        idle_s: float = 0.0,
        running: Collection[Worker] = (),
        members: Mapping[Worker, Place] | None = None,
    ) -> None:
        self.running = set(running)  # started workers whose exit has not been reported
        self._on_host: dict[str, set[Worker]] = {}  # `running`, grouped by host
        for worker in self.running:
            self._on_host.setdefault(worker.host, set()).add(worker)
        self.members = dict(members or {})  # members of the last world
        self.stop_code: int | None = None  # exit code from the first stop request
        # decisions during shutdown; set once the outcome is known
        self.ending: Shutdown | None = None
        self.raised = False  # whether membership raised an exception and is no longer called
        self._membership = membership
        self._leave_s = leave_s
        self._idle_s = idle_s  # see the argument `idle_s` of `Shutdown`
        self._failed: dict[Worker, Reason] = {}  # see the argument `failed` of `Shutdown`
        # released workers whose exit has not been handled yet
        self._let_go: set[Worker] = set()

    @property
    def over(self) -> bool:
        """Return whether no worker is left and the driver may exit."""
        return self.ending is not None and self.ending.over

    def next_deadline(self) -> float | None:
        """Return the time at which the next TimePassed is due, or None."""
        ending = None if self.ending is None else self.ending.next_deadline()
        decision = None if self.raised else self._membership.next_deadline()
        return min((at for at in (ending, decision) if at is not None), default=None)

    def answer(self, event: Event, now: float, *, more: bool = False) -> list[Action]:
        """Return the actions of `Membership` for an event. ``more``: see `Membership.handle`.

        An exception raised by `Membership` propagates, and `Membership` is not called again.
        """
        if self.raised:
            return []
        try:
            return self._membership.handle(event, now, more=more)
        except Exception:
            self.raised = True  # the state of membership may now be inconsistent
            raise

    def follow(self, event: Event, answer: Sequence[Action], now: float) -> list[Action]:
        """Return the actions of ``answer``, followed by those that the shutdown adds."""
        if not answer and self.ending is None and not isinstance(event, NOTED):
            return []  # The usual case.
        # If this event ends the job, membership has already handled it, and only later events go to `Shutdown`.
        begun = self.ending is not None
        stopped = isinstance(event, StopRequested) and event.code is not None
        again = stopped and self.stop_code is not None
        if isinstance(event, StopRequested) and self.stop_code is None:
            self.stop_code = event.code
        match event:
            case WorkerExited(worker):
                self._remove({worker})
            case WorkerRaised(worker, summary=summary):
                self._failed[worker] = because(
                    ReasonKind.LOST_RAISED, worker=str(worker), summary=summary
                )
            case WorkerQuit(worker, call=call) if event.code:
                lost = because(ReasonKind.LOST_QUIT, worker=str(worker), call=call)
                if not call:
                    lost = because(ReasonKind.LOST_REJECTED, worker=str(worker))
                self._failed[worker] = lost
        unseen = self._unseen(event)
        actions = [self._record_action(action, now) for action in answer]
        self._remove(unseen)
        if self.ending is not None:
            if not begun:
                actions += self.ending.begun
            if begun:
                actions += self.ending.handle(event, now)
            if isinstance(event, StopRequested) and stopped and (begun or again):
                actions += self._stopped(event, again=again, now=now)
            actions += self.ending.lost(unseen, now)
            actions += self.ending.overdue(now)
        if isinstance(event, WorkerExited):
            self._let_go.discard(event.worker)
        return actions

    def _remove(self, workers: Collection[Worker]) -> None:
        self.running.difference_update(workers)
        for worker in workers:
            self._on_host.get(worker.host, set()).discard(worker)

    def _record_action(self, action: Action, now: float) -> Action:
        match action:
            case StartWorker(worker):
                self.running.add(worker)
                self._on_host.setdefault(worker.host, set()).add(worker)
            case PublishWorld(_, members):
                self.members = {member.worker: member.place for member in members}
            case LetGo(worker) | RejectWorker(worker):
                self._let_go.add(worker)
            case EndJob() if self.ending is None:
                return self._end(action, now)
        return action

    def _end(self, outcome: EndJob, now: float) -> EndJob:
        if self.stop_code is not None and outcome.code != 0:
            outcome = EndJob(self.stop_code, outcome.reason)
        members = {w: place for w, place in self.members.items() if w not in self._let_go}
        self.ending = Shutdown(
            outcome,
            members=members,
            alive=self.running,
            leave_s=self._leave_s,
            idle_s=self._idle_s,
            failed=self._failed,
            now=now,
        )
        return outcome

    def _stopped(self, event: StopRequested, *, again: bool, now: float) -> list[Action]:
        """Handle a stop request that arrives after the outcome of the job is known."""
        assert self.ending is not None and self.stop_code is not None
        actions: list[Action] = []
        if not again or self.ending.code == 0:
            # Ignore a repeated request, unless the job succeeded before the earlier one took effect.
            self.ending.stopped(self.stop_code, now)
            actions.append(EndJob(self.stop_code, as_sentence(event.reason)))
        return actions + self.ending.hurried(now) if again else actions

    def _unseen(self, event: Event) -> set[Worker]:
        match event:
            case HostLost(host):
                return set(self._on_host.get(host, ()))
            case HostReported(_, running, ordered) if ordered is not None:
                return self.running & (set(ordered) - set(running))
            case _:
                return set()
