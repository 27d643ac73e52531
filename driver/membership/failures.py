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
    describe_exit,
    exit_code,
)
from elastic.driver.membership.roster import AT_STAKE, Stage, Standing
from elastic.driver.membership.worlds import Phase, Worlds
from elastic.driver.reasons import Reason, Why, because


class Failures(Worlds):
    """One method per event; what they need below."""

    def _failed(self, event: WorkerFailed) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or event.generation != self.generation:
            return
        if not self.settings.elastic:
            who, text = self._named(standing), event.reason
            self._complain(standing, because(Why.LOST_PEER, who=who, text=text))
        elif self.phase is not Phase.GATHERING:
            # Many workers report one failure; only the first of a generation comes this far.
            worker, text = str(event.worker), event.reason
            self._break(because(Why.COLLECTIVE_BROKE, worker=worker, text=text))

    def _stranded(self, event: WorkerStranded) -> None:
        standing = self.roster.get(event.worker)
        if standing is None or event.generation != self.generation:
            return
        verdict = because(Why.LOST_PEER_OUTSIDE, who=self._named(standing), text=event.reason)
        if not self.settings.elastic:
            who, text = self._named(standing), event.reason
            self._complain(standing, because(Why.LOST_PEER, who=who, text=text))
        elif any(s.running for s in self._live()):
            # Others are inside elastic.run: they go on, and it starts anew.
            self._staff.dismiss(standing, because(Why.STRANDED), self.settings.disconnect_s)
            self._lose(standing, because(Why.LOST_STRANDED, worker=str(event.worker)))
        elif self.phase is Phase.GATHERING and self._gathering.somebody_lost:
            self._end(1, because(Why.SEVERAL, causes=[self._gathering.reason, verdict]))
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
                self._inquest = Inquest(by, by, None)
            who, summary = self._named(standing), event.summary
            verdict = because(Why.SCRIPT_RAISED, who=who, summary=summary, trace=trace)
            self._inquest.accuse(event.worker, verdict)
            return
        if event.worker in self._world.places and not event.hardware:
            earlier = self._exceptions.repeats(event)
            if earlier is not None:
                same = because(
                    Why.SAME_EXCEPTION,
                    first=str(earlier),
                    worker=str(event.worker),
                    commit=str(event.commit or "none"),
                    trace=trace,
                )
                self._end(1, same)
        self._staff.last_output = trace
        blamed = ": its GPU failed, or NCCL, and not the script" if event.hardware else ""
        self._orders.say("error", f"{raised}{blamed}")
        self._staff.dismiss(standing, because(Why.RAISED), self.settings.leave_s)
        worker, summary = str(event.worker), event.summary
        self._lose(standing, because(Why.LOST_RAISED, worker=worker, summary=summary))

    def _has_quit(self, event: WorkerQuit) -> None:
        """Its interpreter, with torch in it, takes seconds to end. The others, cut off from it, go on at once."""
        standing = self.roster.get(event.worker)
        if standing is None or standing.killed_for or not self.settings.elastic:
            return
        if event.generation != self.generation or standing.stage not in AT_STAKE:
            return
        if not any(s.stage in AT_STAKE for s in self._live() if s is not standing):
            return  # nobody waits for it, so that it may take its time: its exit brings the end
        self._staff.dismiss(standing, because(Why.NOT_EXITED), self.settings.leave_s)
        worker, ended = str(event.worker), describe_exit(event.code)
        self._lose(standing, because(Why.LOST_EXITED, worker=worker, exit=ended))

    def _exited(self, event: WorkerExited) -> None:
        standing = self.roster.remove(event.worker)
        if standing is None:
            return
        exit_text = ended = event.reason or describe_exit(event.code)
        worker = str(event.worker)
        lost = because(Why.LOST_EXITED, worker=worker, exit=exit_text)
        if standing.killed_for is not None:
            # The reason was given when it was killed. Only where its exit ends the job it is given again.
            ended = f"{ended}, as ordered"
            lost = because(Why.LOST_KILLED, worker=worker, killed_for=standing.killed_for)
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
            self._exit_ends_the_job(standing, event, exit_text)
        elif standing.leaving and standing.stage is Stage.DISMISSED:
            self._orders.say("info", f"{event.worker} has left with {ended}: {standing.leaving}")
        else:
            self._end_if_the_script_is_wrong(standing, event, exit_text)
            self._staff.punish(standing, ended)
            if standing.stage is not Stage.DISMISSED:
                self._lose(standing, lost)

    # ---- the verdict -----------------------------------------------------------------------------------------------

    def _complain(self, standing: Standing, verdict: Reason) -> None:
        """It can't go on because of another. Whose exit comes next explains it; if none does, this is the reason."""
        if self._inquest is None:
            if self._completed:
                early = ", ".join(self._completed[:8])
                verdict = because(Why.ENDED_EARLY, workers=early, cause=verdict)
            moment = self.settings.disconnect_s
            self._inquest = Inquest(self._now + moment, self._now + 5 * moment, verdict)
        if self._inquest.culprit != standing.worker:
            self._inquest.witnesses.add(standing.worker)

    def _exit_ends_the_job(self, standing: Standing, event: WorkerExited, exit_text: str) -> None:
        inquest, early = self._inquest, not event.code
        if inquest is not None and not inquest.settles(event.worker):
            if next(self.roster.in_plans(), None) is None:
                ended = self._ended(standing, exit_text, early=early)
                self._end(exit_code(event.code), inquest.verdict or ended)
            return
        if inquest is not None and inquest.culprit == event.worker and inquest.verdict:
            self._end(exit_code(event.code), inquest.verdict)
        wrote = event.output.rstrip() if "\n" in event.output.strip() else ""
        outside = self.settings.elastic
        ended = self._ended(standing, exit_text, early=early, outside=outside, wrote=wrote)
        self._end(exit_code(event.code), ended)

    def _ended(self, standing: Standing, exit_text: str, **facts: bool | str) -> Reason:
        who, killed_for = self._named(standing), standing.killed_for
        return because(Why.ENDED, who=who, exit=exit_text, killed_for=killed_for, **facts)

    def _end_if_the_script_is_wrong(
        self, standing: Standing, event: WorkerExited, exit_text: str
    ) -> None:
        outside = not standing.running and not self._world.running
        if outside and self._slots.completed:
            self._end(exit_code(event.code), self._ended(standing, exit_text))
        self._slots.ended(standing.slot, -1 if standing.killed_for else event.code)
        if not self._trained and self._staff.all_fail():
            fails = because(
                Why.SCRIPT_FAILS,
                exit=exit_text,
                killed_for=standing.killed_for,
                wrote=self._staff.last_output,
            )
            self._end(1, fails)

    def _ran_to_its_end(self, standing: Standing) -> bool:
        """A program without elastic.run, or without init() even, that came to its end."""
        outside = not standing.running and standing.stage is not Stage.DISMISSED
        here = not self.generation or standing.worker in self._world.places
        return outside and here and not standing.leaving and self._inquest is None
