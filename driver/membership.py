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

Here is what each event means; `worlds` has the transitions that follow from it, `workforce` decides which processes
run, `blame` whose fault it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from elastic.driver.blame import Inquest, describe_exit, exit_code
from elastic.driver.events import (
    Action,
    Event,
    HostsChanged,
    StopRequested,
    TimePassed,
    WorkerChecked,
    WorkerConnected,
    WorkerDigested,
    WorkerDisconnected,
    WorkerExited,
    WorkerFailed,
    WorkerLeaving,
    WorkerRaised,
    WorkerReady,
    WorkerResumed,
    WorkerReturned,
    WorkerStranded,
)
from elastic.driver.gathering import Kind
from elastic.driver.roster import Stage, Standing
from elastic.driver.settings import Settings
from elastic.driver.worlds import Over, Phase, Worlds

__all__ = ["IllegalEvent", "Membership", "Phase", "describe_exit"]

ADVICE = "Put the training loop into a function decorated with @elastic.run to survive lost workers"


class IllegalEvent(AssertionError):
    """An event that is neither stale nor legal: a bug. Carries the events that led here."""


class Membership(Worlds):
    """One job's membership. Feed it events with their time, perform the actions it returns, in order."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.story: deque[Event] = deque(maxlen=30)
        self._completed: list[str] = []  # who ended with exit code 0 outside elastic.run

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
        except Over:
            pass
        return self._orders.actions

    def _dispatch(self, event: Event) -> None:
        match event:
            case HostsChanged(hosts):
                self._staff.announce(hosts, self._world.places)
            case WorkerConnected():
                self._connected(event)
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
            case WorkerRaised():
                self._has_raised(event)
            case WorkerReturned():
                self._returned(event)
            case WorkerDisconnected():
                self._disconnected(event)
            case WorkerExited():
                self._exited(event)
            case StopRequested():
                self._end(1, event.reason)
            case TimePassed():
                pass  # deadlines are looked at after every event
            case _:
                raise self._illegal(event, "no handler for it")

    def _connected(self, event: WorkerConnected) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or standing.stage is not Stage.STARTING:
            return  # a connection that outlived its process
        standing.pid = event.pid
        self._staff.welcome(standing, self.members)

    def _ready(self, event: WorkerReady) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or standing.stage is Stage.DISMISSED:
            return
        if event.worker in self._world.places and event.generation != self.generation:
            return  # it has not yet seen the world that it was published in
        if standing.stage is Stage.STARTING:
            raise self._illegal(event, "ready before it connected")
        if standing.stage is Stage.FINISHED:
            self._staff.let_go(
                standing, "it has returned from elastic.run, which a job enters once"
            )
            return
        was_at_work = standing.stage in (Stage.MEMBER, Stage.RETURNED)
        standing.commit, standing.store = event.commit, event.store
        standing.layout, standing.running = event.layout, event.running
        self._staff.somebody_waits()
        if event.worker not in self._world.places:
            self._newcomer_ready(standing)
            return
        standing.stage = Stage.READY
        if was_at_work and self.phase in (Phase.TRAINING, Phase.PREPARING, Phase.ENDING):
            if self._world.running:
                self._break(f"{event.worker} fell out of the world", failure=False)
            else:
                # The first of all to come back, from user code outside elastic.run. Nobody is interrupted.
                entering = "entering elastic.run" if event.running else "init() was called again"
                self._gather(Kind.START, entering)

    def _newcomer_ready(self, standing: Standing) -> None:
        if self.generation and not standing.running:
            self._staff.welcome(standing, self.members)  # too late for the world of init()
        elif standing.layout and self._world.layout and standing.layout != self._world.layout:
            self._staff.reject(standing, self._world.layout)
        else:
            standing.stage = Stage.READY

    def _failed(self, event: WorkerFailed) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or event.generation != self.generation:
            return
        if not self.settings.elastic:
            self._complain(standing, f"{self._named(standing)} lost a peer: {event.reason}")
        elif self.phase is not Phase.GATHERING:
            # Many workers report one failure; only the first of a generation comes this far.
            self._break(f"a collective broke at {event.worker}: {event.reason}")

    def _stranded(self, event: WorkerStranded) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or event.generation != self.generation:
            return
        verdict = (
            f"{self._named(standing)} lost a peer outside elastic.run and can't recover"
            f" ({event.reason}). {ADVICE}"
        )
        if not self.settings.elastic:
            self._complain(standing, f"{self._named(standing)} lost a peer: {event.reason}")
        elif any(s.running for s in self._live()):
            # Others are inside elastic.run: they go on, and it starts anew.
            self._staff.dismiss(
                standing, "it lost a peer outside elastic.run", self.settings.disconnect_s
            )
            self._lose(standing, f"{event.worker} lost a peer outside elastic.run")
        elif self.phase is Phase.GATHERING and self._gathering.somebody_lost:
            self._end(1, f"{self._gathering.reason}; {verdict}")
        else:
            self._complain(standing, verdict)

    def _checked(self, event: WorkerChecked) -> None:
        current = event.generation == self.generation and event.change == self._change.number
        if event.worker in self.roster and current and self.phase is Phase.PREPARING:
            self._change.answer(event.worker, event.check)

    def _leaving(self, event: WorkerLeaving) -> None:
        standing = self.roster.get(event.worker)
        if standing is not None:
            self._staff.leave(standing, event.reason, self._world.places)

    def _has_resumed(self, event: WorkerResumed) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or event.generation != self.generation:
            return
        if standing.resumed_at is None:
            standing.resumed_at = self._now
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
            reason = f"its parameters differ from {right}'s under commit {event.commit}"
            self._staff.fence(self.roster[wrong], reason)

    def _has_raised(self, event: WorkerRaised) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or standing.stage is Stage.DISMISSED:
            return
        raised = f"{self._named(standing)} raised {event.summary}"
        trace = event.traceback.rstrip()
        if not self.settings.elastic:
            if self._inquest is None:
                by = self._now + self.settings.leave_s  # its exit brings the exit code
                self._inquest = Inquest(by, by, "")
            self._inquest.accuse(event.worker, f"{raised}:\n{trace}")
            return
        if event.worker in self._world.places:
            earlier = self._exceptions.repeats(event)
            if earlier is not None:
                both = f"{earlier} and {event.worker} raised the same exception"
                self._end(1, f"{both} at commit {event.commit or 'none'}:\n{trace}")
        self._staff.last_output = trace
        self._orders.say("error", raised)
        self._staff.dismiss(standing, "it raised an exception", self.settings.leave_s)
        self._lose(standing, f"{event.worker} raised {event.summary}")

    def _returned(self, event: WorkerReturned) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or event.generation != self.generation:
            return
        if standing.stage is not Stage.MEMBER or self.phase is Phase.GATHERING:
            return
        standing.stage = Stage.RETURNED
        if self.phase is Phase.STOPPING and any(s.stage is Stage.READY for s in self._live()):
            # It ended where others have stopped: only a new world brings them together.
            self._break(f"{event.worker} returned during a planned change", failure=False)
            return
        if self.phase in (Phase.PREPARING, Phase.STOPPING):
            self._call_off(f"{event.worker} returned")
        if self.phase is Phase.TRAINING:
            self.phase = Phase.ENDING
            self._ending_by = self._now + self.settings.elastic_timeout_s

    def _disconnected(self, event: WorkerDisconnected) -> None:
        standing = self.roster.get(event.worker)
        if standing is not None:
            self._staff.disconnected(standing)

    def _exited(self, event: WorkerExited) -> None:
        standing = self.roster.remove(event.worker)
        if standing is None:
            return
        what = event.reason or describe_exit(event.code)
        if standing.killed_for:
            what = f"{what}, killed because {standing.killed_for}"
        if event.output:
            self._staff.last_output = event.output.rstrip()
        if standing.stage is Stage.FINISHED:
            if event.code:
                self._orders.say(
                    "error", f"{self._named(standing)} ended with {what} after training"
                )
        elif event.code == 0 and self._ran_to_its_end(standing):
            self._slots.complete(standing.slot)
            self._completed.append(self._named(standing))
        elif not self.settings.elastic or self._inquest is not None:
            self._exit_ends_the_job(standing, event, what)
        elif standing.leaving and standing.stage is Stage.DISMISSED:
            self._orders.say("info", f"{event.worker} has left with {what}: {standing.leaving}")
        else:
            self._end_if_the_script_is_wrong(standing, event, what)
            self._staff.punish(standing, what)
            if standing.stage is not Stage.DISMISSED:
                self._lose(standing, f"lost {event.worker} ({what})")

    def _after_the_end(self, event: Event) -> None:
        """The outcome is decided: who comes late is let go."""
        match event:
            case WorkerExited():
                self.roster.remove(event.worker)
            case WorkerConnected() | WorkerReady() if event.worker in self.roster:
                self._staff.let_go(self.roster[event.worker], "the job has ended")
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
        yield from (at for at in by if at is not None)

    def _overdue(self) -> None:
        """Whatever should have happened by now and has not."""
        for standing in self._staff.overdue():
            if standing.stage is not Stage.DISMISSED:
                standing.stage = Stage.DISMISSED
                self._lose(standing, f"lost {standing.worker}, which can't be killed")
        if self._inquest is not None and self._orders.due(self._inquest.by):
            suspects = (s.worker for s in self.roster.in_plans())
            if not self._inquest.wait_longer(suspects):
                self._end(1, self._inquest.verdict)
        match self.phase:
            case Phase.PREPARING if self._orders.due(self._change.by):
                silent = ", ".join(map(str, sorted(self._change.silent)))
                self._call_off(f"no answer from {silent}")
                self._change.put_off(self._now)
            case Phase.STOPPING if self._orders.due(self._change.by):
                late = [str(s.worker) for s in self._live() if s.stage is not Stage.READY]
                within = f"within {self.settings.elastic_timeout_s:g} s"
                missed = f"did not reach check {self._change.check} {within}"
                self._break(f"{', '.join(late)} {missed}")
            case Phase.ENDING if self._orders.due(self._ending_by):
                self._ending_by = None
                self._finish(
                    f"returned {self.settings.elastic_timeout_s:g} s ago and go on without the rest"
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
                within = f"{self.settings.elastic_timeout_s:g} s"
                self._staff.fence(standing, f"it did not become ready within {within}")
            elif not self.settings.elastic:
                waited = f"has not called init() again for {self.settings.elastic_timeout_s:g} s"
                self._end(1, f"{self._named(standing)} {waited}, while others wait for it")

    # ---- one worker ------------------------------------------------------------------------------------------------

    def _complain(self, standing: Standing, verdict: str) -> None:
        """It can't go on because of another. Whose exit comes next explains it; if none does, this is the reason."""
        if self._inquest is None:
            if self._completed:
                early = f"{', '.join(self._completed[:8])} ended with exit code 0 too early"
                verdict = f"{early}: {verdict}"
            moment = self.settings.disconnect_s
            self._inquest = Inquest(self._now + moment, self._now + 5 * moment, verdict)
        if self._inquest.culprit != standing.worker:
            self._inquest.witnesses.add(standing.worker)

    def _exit_ends_the_job(self, standing: Standing, event: WorkerExited, what: str) -> None:
        inquest = self._inquest
        ended = f"{self._named(standing)} ended with {what}" + ("" if event.code else " too early")
        if inquest is not None and not inquest.settles(event.worker):
            if next(self.roster.in_plans(), None) is None:
                self._end(exit_code(event.code), f"{inquest.verdict or ended}")
            return
        if inquest is not None and inquest.culprit == event.worker:
            self._end(exit_code(event.code), inquest.verdict)
        if self.settings.elastic:
            ended += f" while others were outside elastic.run. {ADVICE}"
        wrote = f"; it wrote:\n{event.output.rstrip()}" if "\n" in event.output.strip() else ""
        self._end(exit_code(event.code), f"{ended}{wrote}")

    def _end_if_the_script_is_wrong(
        self, standing: Standing, event: WorkerExited, what: str
    ) -> None:
        outside = not standing.running and not self._world.running
        if outside and self._slots.completed:
            self._end(exit_code(event.code), f"{self._named(standing)} ended with {what}")
        if not self.generation and self._staff.all_failed_at_once(event):
            ended = "every worker ended before training began"
            self._end(1, f"{ended}, the last with {what}{self._staff.quoted()}")

    def _ran_to_its_end(self, standing: Standing) -> bool:
        """A program without elastic.run, or without init() even, that came to its end."""
        outside = not standing.running and standing.stage is not Stage.DISMISSED
        here = not self.generation or standing.worker in self._world.places
        return outside and here and not standing.leaving and self._inquest is None

    def _illegal(self, event: Event, why: str) -> IllegalEvent:
        story = "\n  ".join(map(str, self.story))
        return IllegalEvent(f"{event}: {why}, in phase {self.phase.value}; the story:\n  {story}")

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        slots = [s.slot for s in self.roster.values()]
        assert len(set(slots)) == len(slots), "two live processes in one slot"
        assert len(set(self.members)) == len(self.members)
        leaving = any(s.leaving for s in self._live())
        assert len(self._live()) <= self.settings.workers_max + leaving
        deadline = self.next_deadline()
        assert deadline is None or deadline > self._now, "a deadline that would be met for ever"
        if self.phase in (Phase.TRAINING, Phase.PREPARING):
            assert all(s.stage is Stage.MEMBER for s in self._live()), self._live()
