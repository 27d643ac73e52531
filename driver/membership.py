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

The questions are answered next door: `gathering` whom to wait for, `composition` who is in the next world, `change`
when and where to interrupt a healthy one, `workforce` which processes run, `blame` whose fault it was.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from typing import NoReturn

from elastic.driver.blame import Exceptions, Inquest, describe_exit, exit_code
from elastic.driver.change import Change
from elastic.driver.composition import Composition, compose
from elastic.driver.events import (
    Action,
    BreakWorld,
    CallOffChange,
    EndJob,
    Event,
    FinishWorld,
    HostsChanged,
    PrepareChange,
    PublishWorld,
    StopMembersAt,
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
from elastic.driver.gathering import Gathering, Kind, candidates
from elastic.driver.orders import Orders
from elastic.driver.patience import Patience, counted
from elastic.driver.roster import Roster, Stage, Standing
from elastic.driver.settings import Settings
from elastic.driver.slots import Slots
from elastic.driver.workforce import Workforce
from elastic.driver.world import World
from elastic.protocol import Commit, Place, Worker

__all__ = ["IllegalEvent", "Membership", "Phase", "describe_exit"]

ADVICE = "Put the training loop into a function decorated with @elastic.run to survive lost workers"


class Phase(enum.Enum):
    GATHERING = "gathering"  # waiting for those expected, and for enough; a world of init() may still be in use
    TRAINING = "training"
    PREPARING = "preparing"  # a planned change: waiting for every member's number of checks
    STOPPING = "stopping"  # told where to stop: waiting for all to arrive
    ENDING = "ending"  # some have returned
    DONE = "done"


class IllegalEvent(AssertionError):
    """An event that is neither stale nor legal: a bug. Carries the events that led here."""


class _Over(Exception):
    """The outcome is decided: unwinds to `handle`, so that nothing can follow EndJob."""


class Membership:
    """One job's membership. Feed it events with their time, perform the actions it returns, in order."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING
        self.story: deque[Event] = deque(maxlen=30)
        self._orders = Orders()
        self._staff = Workforce(settings, self._orders)
        self._patience = Patience(settings, self._staff, self._orders)
        self._world = World()
        self._gathering = Gathering(Kind.START, "first start", 0.0, settings)
        self._change = Change(settings)
        self._change_reason = ""
        self._exceptions = Exceptions()
        self._inquest: Inquest | None = None
        self._cause_at = 0.0  # when what led to the present gathering was noticed
        self._look_again_at: float | None = None  # at a planned change that is not due yet
        self._ending_by: float | None = None

    # ---- what others may ask ---------------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """Every live process."""
        return self._staff.roster

    @property
    def generation(self) -> int:
        return self._world.generation

    @property
    def members(self) -> list[Worker]:
        """Of the last world, in rank order, dead ones included."""
        return self._world.members

    @property
    def over(self) -> bool:
        """Whether the outcome is decided."""
        return self.phase is Phase.DONE

    def place_of(self, worker: Worker) -> Place | None:
        """The worker's place in the last published world; None if it has none."""
        return self._world.places.get(worker)

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
        except _Over:
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
                self._inquest = Inquest(by, "")
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
            self._end(self._inquest.code, self._inquest.verdict)
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
                    self._gathering_late()
                if self._orders.due(self._gathering.short_by):
                    self._end(1, self._patience.too_few())
            case _:
                pass

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

    # ---- after each event ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Does what the present state asks for, whatever event led to it."""
        if self.phase is not Phase.ENDING and self._inquest is None:
            self._staff.start(self.members)
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
                    if not self.roster.any_at(Stage.MEMBER, Stage.RETURNED):
                        self._gather(Kind.CHANGE, self._change_reason)
                case Phase.ENDING:
                    self._try_to_finish()

    def _end_with_the_last_process(self) -> None:
        """Programs that never enter elastic.run end one by one."""
        if not self._slots.completed or next(self.roster.in_plans(), None) is not None:
            return
        if self._staff.next_slot_at() is not None:
            return  # one that failed is started again
        if self._slots.any_given_up():
            self._end(1, self._patience.spent())
        self._end(0, f"{counted(len(self._slots.completed), 'worker')} ended with exit code 0")

    def _try_to_publish(self) -> None:
        awaited = self._staff.starting()
        if self.generation:
            awaited = self._gathering.awaited(self.roster)
        if next(awaited, None) is not None:
            return
        old, new, others = candidates(self.roster.at(Stage.READY), self.members)
        composition = self._compose(old, new, {s.worker: s.commit for s in [*old, *new]})
        for standing in composition.leaving:
            self._staff.let_go(standing, standing.leaving)
        for standing in composition.rejected:
            self._staff.reject(standing, composition.layout)
        if composition.arrangement.commit is None:
            self._end_if(self._patience.nothing_held(self._world, self._gathering))
        have = len(composition.arrangement.order)
        if have < self._patience.needed():
            self._end_if(self._patience.short(self._gathering, have))
            return
        commit = composition.arrangement.commit
        self._end_if(self._patience.in_circles(self._world, self._gathering, commit))
        self._publish(composition, others, survivors=have - len(composition.joining))

    def _publish(self, composition: Composition, others: list[Standing], *, survivors: int) -> None:
        before, gathering, arranged = self._world, self._gathering, composition.arrangement
        source = self.roster[arranged.order[0]]
        assert source.store is not None
        if before.generation:
            old = f"{survivors} of {counted(len(before.members), 'old member')} ready"
            new = f", {len(composition.joining)} new" if composition.joining else ""
            reason = f"{gathering.reason}; {old}{new}"
        else:
            reason = f"first world: {counted(len(arranged.order), 'worker')} ready"
        self.phase = Phase.TRAINING
        self._world = World(
            generation=before.generation + 1,
            members=arranged.order,
            running=source.running,
            commit=arranged.commit,
            layout=composition.layout,
            kind=gathering.kind,
            reason=gathering.reason,
            cause_at=self._cause_at,
            published_at=self._now,
            trained=before.trained,
        )
        self._exceptions.world_began(self.generation, arranged.commit)
        if gathering.kind is Kind.CHANGE and set(before.members) == set(arranged.order):
            self._change.put_off(self._now)  # an interruption for nothing: not at once again
        # Who is too late for this world joins as a newcomer: from init(), or when it enters elastic.run.
        for standing in self.roster.at(Stage.MEMBER, Stage.RETURNED):
            standing.stage = Stage.CONNECTED
        for standing in others:
            if not standing.running:
                self._staff.welcome(standing, self.members)
        for worker in arranged.order:
            self.roster[worker].stage = Stage.MEMBER
        self._orders.do(
            PublishWorld(
                generation=self.generation,
                members=self._world.placed(),
                store=source.store,
                holders=arranged.holders,
                commit=arranged.commit,
                reason=reason,
            )
        )

    def _consider_change(self) -> None:
        """A planned change, if somebody waits to join or has to leave."""
        self._look_again_at = None
        if not self.settings.elastic or not self._world.running:
            return  # a world of init() regroups by itself when elastic.run is entered
        wish, urgent = self._wish()
        if not wish:
            self._change.unwanted()
            return
        coming = any(
            not s.leaving and s.worker not in self._world.places
            for s in self.roster.first_at(Stage.STARTING, Stage.CONNECTED)
        )
        self._look_again_at = self._change.wanted(self._now, more_coming=coming and not urgent)
        if self._look_again_at is not None:
            return
        self.phase = Phase.PREPARING
        members = [s.worker for s in self._live()]
        self._change.prepare(self._now, members)
        self._change_reason, self._cause_at = wish, self._now
        self._orders.do(PrepareChange(self.generation, self._change.number, members, wish))

    def _wish(self) -> tuple[str, bool]:
        """What would be different in a world of those who are here now, and whether somebody leaves. Empty: nothing."""
        places = self._world.places
        joining = [
            s
            for s in self.roster.first_at(Stage.READY)
            if s.running and not s.leaving and s.worker not in places
        ]
        if not joining and not any(w in places for w in self.roster.leavers):
            return "", False
        live = self._live()
        same = Commit(self.generation, 1)  # where all stop together, all hold the same
        composition = self._compose(live, joining, {s.worker: same for s in live})
        joined = ", ".join(str(s.worker) for s in composition.joining)
        parts = [f"{joined} joined"] if joined else []
        parts += [f"{s.worker} leaves ({s.leaving})" for s in composition.leaving]
        return "; ".join(parts), bool(composition.leaving)

    def _try_to_stop(self) -> None:
        if not self._wish()[0]:
            self._call_off("nobody wants to join or leave any more")
        elif not self._change.silent:
            self.phase = Phase.STOPPING
            check = self._change.stop(self._now)
            live = [s.worker for s in self._live()]
            self._orders.do(StopMembersAt(self.generation, self._change.number, check, live))

    def _call_off(self, reason: str) -> None:
        self.phase = Phase.TRAINING
        live = [s.worker for s in self._live()]
        self._orders.do(CallOffChange(self.generation, self._change.number, live, reason))

    def _try_to_finish(self) -> None:
        if not self.roster.any_at(Stage.MEMBER):
            members = counted(len(self._live()), "member")
            self._finish("")
            self._end(0, f"all {members} of generation {self.generation} returned")

    def _finish(self, because: str) -> None:
        """Returned workers need not be there for the others any more."""
        returned = [s for s in self._live() if s.stage is Stage.RETURNED]
        if because:
            self._orders.say("warning", f"{', '.join(str(s.worker) for s in returned)} {because}")
        for standing in returned:
            standing.stage = Stage.FINISHED
        self._orders.do(FinishWorld(self.generation, [s.worker for s in returned]))

    # ---- losing members ------------------------------------------------------------------------------

    def _lose(self, standing: Standing, reason: str) -> None:
        """A member is gone, or as good as gone: the world is over for the others."""
        if standing.worker not in self._world.places:
            return
        live = self._live()
        if self.phase is Phase.GATHERING:
            self._gathering.lost(reason)
            at_work = [s.worker for s in live if s.stage is Stage.MEMBER]
            if self._gathering.kind is Kind.START and at_work:
                self._orders.do(BreakWorld(self.generation, at_work, reason))
            self._end_if(self._patience.all_lost(self._world, self._gathering))
            return
        returned = bool(live) and all(s.stage in (Stage.RETURNED, Stage.FINISHED) for s in live)
        if self.phase is Phase.ENDING and returned and live[0].worker == self.members[0]:
            self._orders.say("warning", f"{reason}, after all others had returned")
            return
        self._break(reason, lost=True)

    def _break(self, reason: str, *, lost: bool = False, failure: bool = True) -> None:
        limit = self._patience.failed_again() if failure else ""
        if limit:
            self._end(1, f"{reason}; {limit}")
        at_work = [s for s in self._live() if s.stage in (Stage.MEMBER, Stage.RETURNED)]
        for standing in at_work:
            standing.stage = Stage.MEMBER
        self._gather(Kind.RECOVERY, reason)
        self._gathering.somebody_lost = lost
        self._orders.do(BreakWorld(self.generation, [s.worker for s in at_work], reason))
        if lost:
            self._end_if(self._patience.all_lost(self._world, self._gathering))

    def _gather(self, kind: Kind, reason: str) -> None:
        if kind is not Kind.CHANGE:
            self._cause_at = self._now
        self.phase = Phase.GATHERING
        self._gathering = Gathering(kind, reason, self._now, self.settings)

    # ---- one worker ------------------------------------------------------------------------------------------------

    def _complain(self, standing: Standing, verdict: str) -> None:
        """It can't go on because of another. Whose exit comes next explains it; if none does, this is the reason."""
        if self._inquest is None:
            self._inquest = Inquest(self._now + self.settings.disconnect_s, verdict)
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

    def _end_if(self, reason: str) -> None:
        if reason:
            self._end(1, reason)

    def _end(self, code: int, reason: str) -> NoReturn:
        """Decides the outcome. Members that have finished go on by themselves; on success all others are let go."""
        self.phase = Phase.DONE
        if code == 0:
            self._staff.let_all_go("the job has ended")
        self._orders.do(EndJob(code, reason))
        raise _Over

    # ---- small questions -------------------------------------------------------------------------------------------

    def _live(self) -> list[Standing]:
        """Members that live and were not dismissed, in rank order."""
        return self.roster.live(self.members)

    def _compose(
        self,
        old: list[Standing],
        new: list[Standing],
        commits: dict[Worker, Commit | None] | dict[Worker, Commit],
    ) -> Composition:
        return compose(
            old,
            sorted(new, key=lambda s: self._slots.order(s.worker)),
            commits,
            workers_min=self._patience.needed(),
            workers_max=self.settings.workers_max,
            layout=self._world.layout,
        )

    @property
    def _slots(self) -> Slots:
        return self._staff.slots

    @property
    def _now(self) -> float:
        return self._orders.now

    def _named(self, standing: Standing) -> str:
        worker = standing.worker
        place = self._world.places.get(worker)
        if place is None and not self.generation:
            place = standing.first_place
        who = "worker" if place is None else f"rank {place.rank}"
        return f"{who} ({worker} on {worker.host})"

    def _illegal(self, event: Event, why: str) -> IllegalEvent:
        story = "\n  ".join(map(str, self.story))
        return IllegalEvent(f"{event}: {why}, in phase {self.phase.value}; the story:\n  {story}")

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        slots = [s.slot for s in self.roster.values()]
        assert len(set(slots)) == len(slots), "two live processes in one slot"
        assert len(set(self.members)) == len(self.members)
        leaving = any(s.leaving for s in self._live())
        assert len(self.members) <= self.settings.workers_max + leaving
        deadline = self.next_deadline()
        assert deadline is None or deadline > self._now, "a deadline that would be met for ever"
        if self.phase in (Phase.TRAINING, Phase.PREPARING):
            assert all(s.stage is Stage.MEMBER for s in self._live()), self._live()
