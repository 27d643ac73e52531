"""Decides who trains together. Deterministic: no clock, no network, no logger. See docs/architecture.md.

    GATHERING --all expected are ready--> TRAINING --worker lost / collective broke--> GATHERING
        ^                                  |  ^
        |                          newcomer ready, or a member leaves
        |                                  v  |  called off
        +--all stopped-- STOPPING <--all answered-- PREPARING
    TRAINING --a member returned--> ENDING --all returned--> DONE         any phase --> DONE (failed)

Every world has a generation, and every event about a world carries it: what belongs to an older one is dropped by one
line at the top of each handler. A worker that is lost is dead before the world shrinks: exits are reported by the
agent that reaped the process, and whoever cannot be reached is killed first.

Here is what each event means; `worlds` has the transitions that follow from it, `failures` says what broken worlds and
dead workers mean, `stuck` who holds the others up, `worker_pool` decides which processes run, `root_cause` whose fault
it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from elastic.driver.events import (
    Action,
    DriverRestarted,
    Event,
    HostLost,
    HostReported,
    HostsChanged,
    LetGo,
    StopRequested,
    TimePassed,
    WorkerChecked,
    WorkerConnected,
    WorkerDigested,
    WorkerDisconnected,
    WorkerExited,
    WorkerFailed,
    WorkerFrozen,
    WorkerLeaving,
    WorkerPaced,
    WorkerProbed,
    WorkerProgressed,
    WorkerQuit,
    WorkerRaised,
    WorkerReady,
    WorkerReconnected,
    WorkerResumed,
    WorkerReturned,
    WorkerStranded,
    WorkerThawed,
)
from elastic.driver.membership.failure_detection.stuck import Stuck
from elastic.driver.membership.failures import Failures
from elastic.driver.membership.gathering import Kind
from elastic.driver.membership.reconnect import Reconnections
from elastic.driver.membership.root_cause import describe_exit
from elastic.driver.membership.roster import Stage, Standing
from elastic.driver.membership.worlds import Over, Phase
from elastic.driver.reasons import Why, because, in_words
from elastic.driver.settings import Settings

__all__ = ["IllegalEvent", "Membership", "Phase", "describe_exit"]


class IllegalEvent(AssertionError):
    """An event that is neither stale nor legal: a bug. Carries the events that led here."""


class Membership(Failures, Reconnections, Stuck):
    """One job's membership. Feed it events with their time, perform the actions it returns, in order."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.story: deque[Event] = deque(maxlen=30)

    def next_deadline(self) -> float | None:
        """When to send TimePassed, if nothing else happens before. Always later than the last event."""
        return None if self.over else min(self._deadlines(), default=None)

    # ---- one event -------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about an event, in order. Raises IllegalEvent on one that can't be."""
        self.story.append(event)
        self._orders.begin(now)
        if self.over:
            self._after_the_end(event)
            return self._orders.actions
        try:
            self._dispatch(event)
            self._overdue()
            self._advance()
            self._watch()
        except Over:
            pass
        return self._orders.actions

    def _dispatch(self, event: Event) -> None:
        match event:
            case HostsChanged(hosts):
                self._staff.announce(hosts, self._world.places)
            case WorkerConnected():
                self._connected(event)
            case WorkerReconnected():
                self._reconnected(event)
            case WorkerReady():
                self._ready(event)
            case WorkerFailed():
                self._failed(event)
            case WorkerStranded():
                self._stranded(event)
            case WorkerChecked():
                self._checked(event)
            case WorkerLeaving():
                self._leaving(event)
            case WorkerResumed():
                self._has_resumed(event)
            case WorkerDigested():
                self._digested(event)
            case WorkerProgressed():
                self._progressed(event)
            case WorkerPaced():
                self._paced(event)
            case WorkerFrozen():
                self._has_frozen(event)
            case WorkerThawed():
                self._thawed(event)
            case WorkerProbed():
                self._probed(event)
            case WorkerRaised():
                self._has_raised(event)
            case WorkerQuit():
                self._has_quit(event)
            case WorkerReturned():
                self._returned(event)
            case WorkerDisconnected():
                self._disconnected(event)
            case WorkerExited():
                self._exited(event)
            case HostLost():
                self._host_lost(event)
            case HostReported():
                self._host_is_back(event.host)
                for gone in self._not_there(event):
                    self._exited(gone)
            case DriverRestarted():
                self._restarted()
                self._watch_anew()
            case StopRequested():
                self._end(1, in_words(event.reason))
            case TimePassed():
                pass  # deadlines are looked at after every event
            case _:
                raise self._illegal(event, "no handler for it")

    def _connected(self, event: WorkerConnected) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or standing.stage is not Stage.STARTING:
            return  # a connection that outlived its process
        standing.pid = event.pid
        self._speaks(standing)
        self._staff.welcome(standing, self.members)

    def _ready(self, event: WorkerReady) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or standing.stage is Stage.DISMISSED:
            if standing is not None and standing.killed_for:
                self._part_again(standing)  # given up, and it has woken: the kill did not reach it
            return
        if event.worker in self._world.places and event.generation != self.generation:
            return  # it has not yet seen the world that it was published in
        if 0 < event.number < standing.readies:
            return  # of a wait that is over
        standing.readies = event.number
        self._speaks(standing)
        if standing.stage is Stage.STARTING:
            raise self._illegal(event, "ready before it connected")
        if standing.stage is Stage.FINISHED:
            self._staff.let_go(standing, because(Why.RETURNED_BEFORE))
            return
        was_at_work = standing.stage in (Stage.MEMBER, Stage.RETURNED)
        standing.commit, standing.store = event.commit, event.store
        standing.layout, standing.running = event.layout, event.running
        self._trained = self._trained or event.running
        standing.moved(self._now)
        standing.waits_since = self._now
        self._staff.somebody_waits()
        if event.worker not in self._world.places:
            self._newcomer_ready(standing)
            return
        standing.stage = Stage.READY
        if was_at_work and self.phase in (Phase.TRAINING, Phase.PREPARING, Phase.ENDING):
            if self._world.running:
                fell_out = because(Why.FELL_OUT, worker=str(event.worker))
                self._break(fell_out, failure=False)
            else:
                # The first of all to come back, from user code outside elastic.run. Nobody is interrupted.
                why = Why.ENTERING if event.running else Why.INIT_AGAIN
                self._gather(Kind.START, because(why))

    def _newcomer_ready(self, standing: Standing) -> None:
        if self.generation and not standing.running:
            self._staff.welcome(standing, self.members)  # too late for the world of init()
        elif standing.layout and self._world.layout and standing.layout != self._world.layout:
            self._staff.reject(standing, self._world.layout)
        else:
            standing.stage = Stage.READY

    def _checked(self, event: WorkerChecked) -> None:
        current = event.generation == self.generation and event.change == self._change.number
        if event.worker in self.roster and current and self.phase is Phase.PREPARING:
            self._change.answer(event.worker, event.check)

    def _leaving(self, event: WorkerLeaving) -> None:
        standing = self.roster.get(event.worker)
        if standing is not None:
            self._staff.leave(standing, in_words(event.reason), self._world.places)

    def _has_resumed(self, event: WorkerResumed) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or event.generation != self.generation:
            return
        if standing.resumed_at is None:
            standing.resumed_at = self._now
        standing.moved_at = self._now
        report = self._world.resumed(event, self._now)
        if report is not None:
            self._orders.do(report)

    def _digested(self, event: WorkerDigested) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or standing.killed_for or event.generation != self.generation:
            return
        found = self._world.digested(event, self.roster)
        if found is not None:
            wrong, right = found
            differs = because(Why.OTHER_DIGEST, right=str(right), commit=str(event.commit))
            self._staff.fence(self.roster[wrong], differs)

    def _returned(self, event: WorkerReturned) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or event.generation != self.generation:
            return
        if standing.stage is not Stage.MEMBER or self.phase is Phase.GATHERING:
            return
        standing.stage = Stage.RETURNED
        standing.moved(self._now)
        standing.waits_since = self._now
        if self.phase is Phase.STOPPING and any(s.stage is Stage.READY for s in self._live()):
            # It ended where others have stopped: only a new world brings them together.
            returned = because(Why.RETURNED_MEANWHILE, worker=str(event.worker))
            self._break(returned, failure=False)
            return
        if self.phase in (Phase.PREPARING, Phase.STOPPING):
            self._call_off(because(Why.RETURNED, worker=str(event.worker)))
        if self.phase is Phase.TRAINING or (
            self.phase is Phase.ENDING and self._ending_by is None  # the first have been let go
        ):
            self.phase = Phase.ENDING
            self._ending_by = self._now + self.settings.elastic_timeout_s

    def _disconnected(self, event: WorkerDisconnected) -> None:
        standing = self.roster.get(event.worker)
        if standing is not None:
            self._staff.disconnected(standing, silent=event.silent)

    def _after_the_end(self, event: Event) -> None:
        """The outcome is decided: who comes late is let go."""
        match event:
            case WorkerExited():
                self.roster.remove(event.worker)
            case WorkerConnected() | WorkerReady() if event.worker in self.roster:
                self._staff.let_go(self.roster[event.worker], because(Why.JOB_ENDED))
            case WorkerReconnected():
                self._orders.do(LetGo(event.worker, because(Why.JOB_ENDED)))
            case HostReported():
                for gone in self._not_there(event):
                    self.roster.remove(gone.worker)
            case DriverRestarted() if self._verdict is not None:
                self._orders.do(self._verdict)
            case WorkerFrozen() if event.worker in self.roster:
                standing = self.roster[event.worker]
                if not standing.frozen:
                    named = f"{self._named(standing)}, process {standing.pid},"
                    text = "the job's outcome is known, and it ends when this process has: continue it, or kill it"
                    self._orders.say("warning", f"{named} is frozen ({event.how}); {text}")
                standing.frozen = event.how or "not able to run"
            case WorkerThawed() if event.worker in self.roster:
                self.roster[event.worker].frozen = ""
            case _:
                pass

    # ---- deadlines -------------------------------------------------------------------------------------------------

    def _deadlines(self) -> Iterator[float]:
        starting = self.phase is not Phase.ENDING and self._inquest is None
        yield from self._staff.deadlines(starting=starting, first=not self.generation)
        if self._inquest is not None:
            yield self._inquest.by
        by: list[float | None] = []
        match self.phase:
            case Phase.GATHERING:
                late = self._gathering.late or not self.generation
                by = [None if late else self._gathering.late_at, self._gathering.short_by]
                if not late:
                    by.append(self._gathering.remind_at)
            case Phase.TRAINING:
                by = [self._look_again_at]
            case Phase.PREPARING | Phase.STOPPING:
                by = [self._change.by]
            case Phase.ENDING:
                by = [self._ending_by]
        by += self._watch_deadlines()
        yield from (at for at in by if at is not None)

    def _overdue(self) -> None:
        """Whatever should have happened by now and has not."""
        for standing in self._staff.overdue():
            if standing.stage is not Stage.DISMISSED:
                standing.stage = Stage.DISMISSED
                alive = because(
                    Why.LOST_ALIVE, worker=str(standing.worker), killed_for=standing.killed_for
                )
                self._given_up(standing, alive)
        self._give_up_hosts()
        self._fence_frozen()
        if self._inquest is not None and self._orders.due(self._inquest.by):
            suspects = (s.worker for s in self.roster.in_plans())
            if not self._inquest.wait_longer(suspects):
                assert self._inquest.verdict is not None
                self._end(1, self._inquest.verdict)
        match self.phase:
            case Phase.PREPARING if self._orders.due(self._change.by):
                silent = ", ".join(map(str, sorted(self._change.silent)))
                self._call_off(because(Why.NO_ANSWER, workers=silent))
                self._change.put_off(self._now)
            case Phase.STOPPING if self._orders.due(self._change.by):
                late = [str(s.worker) for s in self._live() if s.stage is not Stage.READY]
                missed = because(
                    Why.NOT_STOPPED,
                    workers=", ".join(late),
                    check=self._change.check,
                    within_s=self.settings.elastic_timeout_s,
                )
                self._break(missed)
            case Phase.ENDING if self._orders.due(self._ending_by):
                self._ending_by = None
                self._finish(
                    f"waited {self.settings.elastic_timeout_s:g} s for the others to return, and go on"
                )
            case Phase.GATHERING:
                if self.generation and not self._gathering.late:
                    self._remind()
                    self._gathering_late()
                if self._orders.due(self._gathering.short_by):
                    self._end(1, self._patience.too_few())
            case _:
                pass

    def _remind(self) -> None:
        """Nobody should have to guess why nothing happens."""
        if self._orders.due(self._gathering.remind_at):
            self._gathering.remind_after_s *= 2
            awaited = list(self._gathering.awaited(self.roster))
            if awaited:
                self._orders.say("warning", self._gathering.reminder(awaited, self._now))

    def _gathering_late(self) -> None:
        if not self._orders.due(self._gathering.late_at):
            return
        self._gathering.late = True
        for standing in list(self._gathering.missing(self.roster)):
            if standing.running:
                late = because(Why.NOT_READY, within_s=self.settings.elastic_timeout_s)
                self._staff.fence(standing, late)
            elif not self.settings.elastic:
                waited_s, who = self.settings.elastic_timeout_s, self._named(standing)
                self._end(1, because(Why.NOT_ENTERED, who=who, for_s=waited_s))

    def _illegal(self, event: Event, why: str) -> IllegalEvent:
        story = "\n  ".join(map(str, self.story))
        return IllegalEvent(f"{event}: {why}, in phase {self.phase.value}; the story:\n  {story}")

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        super().check()
        slots = [s.slot for s in self.roster.values()]
        assert len(set(slots)) == len(slots), "two live processes in one slot"
        assert len(set(self.members)) == len(self.members)
        leaving = any(s.leaving for s in self._live())
        assert len(self._live()) <= self.settings.workers_max + leaving
        deadline = self.next_deadline()
        assert deadline is None or deadline > self._now, "a deadline that would be met for ever"
        if self.phase in (Phase.TRAINING, Phase.PREPARING):
            assert all(s.stage is Stage.MEMBER for s in self._live()), self._live()
