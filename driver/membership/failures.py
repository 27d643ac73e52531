"""Decides what it means that a collective broke, an exception came up, or a process ended. Deterministic.

In elastic.run a failure is everybody's occasion to go on from the last commit; outside it, and in a job that is not
elastic, it ends the job, and the question is only who is to blame: see `root_cause`.
"""

from __future__ import annotations

from elastic.driver.events import (
    WorkerExited,
    WorkerFailed,
    WorkerQuit,
    WorkerRaised,
    WorkerStranded,
)
from elastic.driver.membership.root_cause import (
    Inquest,
    brief,
    describe_exit,
    exit_code,
)
from elastic.driver.membership.roster import AT_STAKE, Stage, Standing
from elastic.driver.membership.worlds import Phase, Worlds

ADVICE = "Put the training loop into a function decorated with @elastic.run to survive lost workers"


class Failures(Worlds):
    """One method per event; what they need below."""

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
        if event.worker in self._world.places and not event.hardware:
            earlier = self._exceptions.repeats(event)
            if earlier is not None:
                both = f"{earlier} and {event.worker} raised the same exception"
                self._end(1, f"{both} at commit {event.commit or 'none'}:\n{trace}")
        self._staff.last_output = trace
        blamed = ": its GPU failed, or NCCL, and not the script" if event.hardware else ""
        self._orders.say("error", f"{raised}{blamed}")
        self._staff.dismiss(standing, "it raised an exception", self.settings.leave_s)
        self._lose(standing, f"{event.worker} raised {event.summary}")

    def _has_quit(self, event: WorkerQuit) -> None:
        """Its interpreter, with torch in it, takes seconds to end. The others, cut off from it, go on at once."""
        standing = self.roster.get(event.worker)
        if standing is None or standing.killed_for or not self.settings.elastic:
            return
        if event.generation != self.generation or standing.stage not in AT_STAKE:
            return
        if not any(s.stage in AT_STAKE for s in self._live() if s is not standing):
            return  # nobody waits for it, so that it may take its time: its exit brings the end
        self._staff.dismiss(standing, "it did not exit in time", self.settings.leave_s)
        self._lose(standing, f"lost {event.worker} ({describe_exit(event.code)})")

    def _exited(self, event: WorkerExited) -> None:
        standing = self.roster.remove(event.worker)
        if standing is None:
            return
        what = ended = lost = event.reason or describe_exit(event.code)
        if standing.killed_for:
            # The reason was given when it was killed. Only where its exit ends the job it is given again.
            what = f"{what}, killed because {standing.killed_for}"
            ended, lost = f"{ended}, as ordered", f"killed: {brief(standing.killed_for)}"
        if event.output:
            self._staff.last_output = event.output.rstrip()
        if standing.stage is Stage.FINISHED:
            if event.code:
                self._orders.say(
                    "error", f"{self._named(standing)} ended with {ended} after training"
                )
        elif event.code == 0 and self._ran_to_its_end(standing):
            self._slots.complete(standing.slot)
            self._completed.append(self._named(standing))
        elif not self.settings.elastic or self._inquest is not None:
            self._exit_ends_the_job(standing, event, what)
        elif standing.leaving and standing.stage is Stage.DISMISSED:
            self._orders.say("info", f"{event.worker} has left with {ended}: {standing.leaving}")
        else:
            self._end_if_the_script_is_wrong(standing, event, what)
            self._staff.punish(standing, ended)
            if standing.stage is not Stage.DISMISSED:
                self._lose(standing, f"lost {event.worker} ({lost})")

    # ---- the verdict -----------------------------------------------------------------------------------------------

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
        self._slots.ended(standing.slot, -1 if standing.killed_for else event.code)
        if not self._trained and self._staff.all_fail():
            ended = "every worker ended before training began"
            self._end(1, f"{ended}, the last with {what}{self._staff.quoted()}")

    def _ran_to_its_end(self, standing: Standing) -> bool:
        """A program without elastic.run, or without init() even, that came to its end."""
        outside = not standing.running and standing.stage is not Stage.DISMISSED
        here = not self.generation or standing.worker in self._world.places
        return outside and here and not standing.leaving and self._inquest is None
