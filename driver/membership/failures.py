"""Handling of failed collectives, exceptions and exits of workers. Deterministic.

Inside elastic.run, a failure makes all workers resume from the last commit. Outside it, or in a job that is not
elastic, a failure ends the job; `root_cause` then determines the cause.
"""

from __future__ import annotations

import signal

from elastic.driver.events import (
    Event,
    WorkerExited,
    WorkerFailed,
    WorkerQuit,
    WorkerRaised,
    WorkerStranded,
)
from elastic.driver.membership.records.roster import AT_STAKE, WorkerRecord, WorkerStage
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.root_cause import RootCauseSearch, describe_exit, exit_code
from elastic.driver.membership.worlds.worlds import Phase
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.driver.tracebacks import exception_line

UNCAUGHT = 1  # exit code of Python after an uncaught exception


class Failures(Part):
    """Handler of failed collectives, exceptions and exits, with one method per event."""

    def handle(self, event: Event) -> bool:
        """Handle a failure or an exit of a worker. Return False for other events."""
        match event:
            case WorkerFailed():
                self.failed(event)
            case WorkerStranded():
                self.stranded(event)
            case WorkerRaised():
                self.raised(event)
            case WorkerQuit():
                self.quit(event)
            case WorkerExited():
                self.exited(event)
            case _:
                return False
        return True

    def failed(self, event: WorkerFailed) -> None:
        record = self.roster.get(event.worker)
        if record is None or event.generation != self.worlds.generation:
            return
        if not (self.settings.elastic or self.worlds.stopping or self.worlds.all_go):
            self._record_complaint(record, self._broken(record, event))
        elif self.worlds.phase is not Phase.GATHERING:
            # Many workers report the same failure. Only the first report in each generation is handled.
            worker, text = str(event.worker), event.reason
            broke = because(ReasonKind.COLLECTIVE_BROKE, worker=worker, text=text)
            if event.calls:
                broke = because(ReasonKind.CALLS_DIFFER, text=text)
                if self.worlds.mismatches.repeats(event.generation, event.calls):
                    self.worlds.end(1, because(ReasonKind.SAME_CALLS, cause=broke))
            self.worlds.break_up(broke)

    def stranded(self, event: WorkerStranded) -> None:
        record = self.roster.get(event.worker)
        if record is None or event.generation != self.worlds.generation:
            return
        name, text = self.worlds.named(record), event.reason
        began = self.worlds.trained
        verdict = because(ReasonKind.LOST_PEER_OUTSIDE, who=name, text=text, began=began)
        if event.differs:
            verdict = because(ReasonKind.CALLS_DIFFER, text=text)
        if self.settings.elastic and record.stage is WorkerStage.DISMISSED:
            return  # The worker was asked to leave, or is about to exit.
        if not self.settings.elastic:
            self._record_complaint(record, self._broken(record, event))
        elif any(s.running for s in self.worlds.live()):
            # Workers inside elastic.run continue. Only this worker is restarted.
            self.staff.dismiss(record, because(ReasonKind.STRANDED), self.settings.disconnect_s)
            self.worlds.lose(record, because(ReasonKind.LOST_STRANDED, worker=str(event.worker)))
        elif self.worlds.phase is Phase.GATHERING and self.worlds.gathering.had_loss:
            if self._nothing_to_lose():
                self._restart_all(verdict)
                return
            self.worlds.end(
                1, because(ReasonKind.SEVERAL, causes=[self.worlds.gathering.reason, verdict])
            )
        else:
            self._record_complaint(record, verdict)

    def _broken(self, record: WorkerRecord, event: WorkerFailed | WorkerStranded) -> Reason:
        """Return the reason for ending a fixed-size job after a failed collective."""
        if event.differs:
            return because(ReasonKind.CALLS_DIFFER, text=event.reason)
        return because(ReasonKind.LOST_PEER, who=self.worlds.named(record), text=event.reason)

    def raised(self, event: WorkerRaised) -> None:
        record = self.roster.get(event.worker)
        if record is None or record.stage is WorkerStage.DISMISSED:
            return
        if event.final:
            refused = ReasonKind.NO_RESUME if event.code == 1 else ReasonKind.SCRIPT_REFUSED
            end = because(refused, text=event.summary)
            if event.shards_lost:
                end = self.worlds.give_up.shards_lost(self.worlds.world, event.summary)
            self.worlds.end(event.code, end)
        raised = f"{self.worlds.named(record)} raised {event.summary}"
        trace = event.traceback.rstrip()
        if not self.settings.elastic:
            if self.worlds.root_cause_search is None:
                # The driver waits for the exit event, which contains the exit code for the job.
                by = self.actions.now + self.settings.leave_s
                self.worlds.root_cause_search = RootCauseSearch(by, by, None)
            name, summary = self.worlds.named(record), event.summary
            verdict = because(ReasonKind.SCRIPT_RAISED, who=name, summary=summary, trace=trace)
            self.worlds.root_cause_search.name_root_cause(event.worker, verdict)
            return
        if event.worker in self.worlds.world.places and event.calls:
            # All ranks reported the same mismatched calls, which a retry would repeat.
            self.worlds.end(1, because(ReasonKind.TENSORS_DIFFER, summary=event.summary))
        if event.worker in self.worlds.world.places and not event.hardware:
            earlier = self.worlds.exceptions.repeats(event)
            if earlier is not None:
                same = because(
                    ReasonKind.SAME_EXCEPTION,
                    first=str(earlier),
                    worker=str(event.worker),
                    commit=event.commit.dotted if event.commit else "none",
                    trace=trace,
                )
                self.worlds.end(1, same)
        self.staff.last_output = trace
        blamed = ": the GPU or NCCL failed, not the script" if event.hardware else ""
        self.actions.log("error", f"{raised}{blamed}")
        self.staff.dismiss(record, because(ReasonKind.RAISED), self.settings.leave_s)
        worker, summary = str(event.worker), event.summary
        lost = because(ReasonKind.LOST_RAISED, worker=worker, summary=summary)
        if not event.hardware:
            self.worlds.give_up.script_failures.failed(record.slot, lost)
        self.worlds.lose(record, lost)

    def quit(self, event: WorkerQuit) -> None:
        """Handle a worker that is about to exit.

        The other workers have already lost their connections to it. They continue without waiting for its exit, because
        a Python process that has loaded torch needs seconds to exit.
        """
        record = self.roster.get(event.worker)
        if record is None or record.killed_for or not self.settings.elastic:
            return
        if event.generation != self.worlds.generation or record.stage not in AT_STAKE:
            return
        if not any(s.stage in AT_STAKE for s in self.worlds.live() if s is not record):
            return  # No other worker is affected. The job ends when this worker exits.
        self.staff.dismiss(record, because(ReasonKind.NOT_EXITED), self.settings.leave_s)
        worker, ended = str(event.worker), describe_exit(event.code)
        lost = because(ReasonKind.LOST_EXITED, worker=worker, exit=ended)
        if event.call:
            lost = because(ReasonKind.LOST_QUIT, worker=worker, call=event.call)
        if event.code:
            self.worlds.give_up.script_failures.failed(record.slot, lost)
        self.worlds.lose(record, lost)

    def exited(self, event: WorkerExited) -> None:
        # Do not wait any longer for this worker's answer to a liveness probe.
        self.worlds.signs.answered(event.worker)
        record = self.roster.remove(event.worker)
        if record is None:
            return
        exit_text = ended = event.reason or describe_exit(event.code)
        worker = str(event.worker)
        lost = because(ReasonKind.LOST_EXITED, worker=worker, exit=exit_text)
        if record.killed_for is not None:
            # The reason was logged when the worker was killed. Log it again only if the exit ends the job.
            ended = f"{ended}, killed by the driver"
            lost = because(ReasonKind.LOST_KILLED, worker=worker, killed_for=record.killed_for)
        # A worker killed by SIGKILL cannot print the reason, and the output of an earlier worker does not explain this
        # exit.
        if event.output and event.code != -signal.SIGKILL:
            self.staff.last_output = event.output.rstrip()
        elif record.stage is not WorkerStage.DISMISSED:
            self.staff.last_output = ""
        if record.stage is not WorkerStage.DISMISSED:
            failures = self.worlds.give_up.script_failures
            if event.code > 0 and record.killed_for is None:
                failures.exited(record.slot, event.code, event.cause, lost)
            else:
                failures.lost(record.slot)
        if record.stage is WorkerStage.FINISHED:
            if event.code:
                self.actions.log(
                    "error", f"{self.worlds.named(record)} ended with {ended} after training"
                )
        elif event.code == 0 and self._ran_to_its_end(record):
            self.staff.slots.complete(record.slot)
            self.worlds.completed.append(self.worlds.named(record))
        elif self._explains_a_complaint(record, event):
            assert self.worlds.root_cause_search is not None
            verdict, self.worlds.root_cause_search = self.worlds.root_cause_search.verdict, None
            self.staff.slots.ended(record.slot, -1)
            self.staff.record_failure(record, ended)
            self.worlds.lose(record, lost)
            self._restart_all(verdict or lost)
        elif self.settings.elastic and record.leaving and record.stage is WorkerStage.DISMISSED:
            # The failed health check was already logged.
            level = "debug" if record.unchecked else "info"
            text = f"{event.worker} left with {ended}: {record.leaving}"
            if record.killed_for is not None and record.killed_for.kind is ReasonKind.NOT_LEFT:
                within = (
                    f"it did not exit within {self.settings.leave_s:g} s, so the driver killed it"
                )
                text = f"removed {event.worker} ({record.leaving}): {within}"
            self.actions.log(level, text)
        elif not self.settings.elastic or self.worlds.root_cause_search is not None:
            self._exit_ends_the_job(record, event, exit_text)
        else:
            self._end_if_the_script_is_wrong(record, event, exit_text)
            self.staff.record_failure(record, ended)
            if record.stage is not WorkerStage.DISMISSED:
                self.worlds.lose(record, lost)

    # ---- restart from the beginning ----------------------------------------------------------------------------------

    def _nothing_to_lose(self) -> bool:
        """Return whether all workers may restart from the beginning without losing progress.

        This is the case if --reset-limit bounds the number of restarts, no worker has entered elastic.run, and no
        worker's script has failed. A script that has failed would fail again.
        """
        if self.settings.reset_limit is None:
            return False  # A script without elastic.run is restarted only if the user requested it.
        failed = self.staff.slots.any_failed() or self.roster.any_at(WorkerStage.DISMISSED)
        return not (self.worlds.trained or self.worlds.completed or failed)

    def _explains_a_complaint(self, record: WorkerRecord, event: WorkerExited) -> bool:
        """Return whether this exit caused a failure that other members reported, so that all workers may restart.

        This occurs only in elastic jobs, if a member was killed and other members reported the failure before the exit.
        """
        search = self.worlds.root_cause_search
        killed = event.code < 0 or record.killed_for is not None
        if search is None or not self.settings.elastic or not search.settles(event.worker):
            return False
        member = record.worker in self.worlds.world.places and not record.leaving
        return killed and member and self._nothing_to_lose()

    def _restart_all(self, why: Reason) -> None:
        """Restart all workers from the beginning.

        This is necessary before any worker has entered elastic.run, because workers outside of it cannot recover from
        the loss of a peer.
        """
        text = "no worker had entered elastic.run, so all start from the beginning"
        self.actions.log("warning", f"{why}; {text}")
        self.worlds.gathering.anew = self.worlds.gathering.whole = True
        stranded = because(ReasonKind.STRANDED)
        for record in [*self.roster.in_plans()]:
            if record.stage is not WorkerStage.STARTING:
                self.staff.discard(record, stranded)

    # ---- the cause -------------------------------------------------------------------------------------------------

    def _record_complaint(self, record: WorkerRecord, verdict: Reason) -> None:
        if self.worlds.root_cause_search is None:
            if self.worlds.completed:
                early = ", ".join(self.worlds.completed[:8])
                verdict = because(ReasonKind.ENDED_EARLY, workers=early, cause=verdict)
            moment = self.settings.disconnect_s
            self.worlds.root_cause_search = RootCauseSearch(
                self.actions.now + moment, self.actions.now + 5 * moment, verdict
            )
        if self.worlds.root_cause_search.root_cause != record.worker:
            self.worlds.root_cause_search.reporters.add(record.worker)

    def _exit_ends_the_job(self, record: WorkerRecord, event: WorkerExited, exit_text: str) -> None:
        search, early = self.worlds.root_cause_search, not event.code
        if search is not None and not search.settles(event.worker):
            if next(self.roster.in_plans(), None) is None:
                ended = self._ended(record, exit_text, early=early)
                self.worlds.end(exit_code(event.code), search.verdict or ended)
            return
        if search is not None and search.root_cause == event.worker and search.verdict:
            self.worlds.end(exit_code(event.code), search.verdict)
        # A worker killed by SIGKILL cannot print the reason.
        explains = "\n" in event.output.strip() and event.code != -signal.SIGKILL
        wrote = event.output.rstrip() if explains else ""
        outside = self.settings.elastic
        facts: dict[str, bool | str] = {"early": early, "outside": outside, "wrote": wrote}
        if outside:
            facts["began"] = self.worlds.trained
        if event.code != UNCAUGHT and exception_line(wrote):
            facts["caught"] = True
        ended = self._ended(record, exit_text, **facts)
        self.worlds.end(exit_code(event.code), ended)

    def _ended(self, record: WorkerRecord, exit_text: str, **facts: bool | str) -> Reason:
        name, killed_for = self.worlds.named(record), record.killed_for
        return because(ReasonKind.ENDED, who=name, exit=exit_text, killed_for=killed_for, **facts)

    def _end_if_the_script_is_wrong(
        self, record: WorkerRecord, event: WorkerExited, exit_text: str
    ) -> None:
        outside = not record.running and not self.worlds.world.running
        if outside and self.staff.slots.completed:
            self.worlds.end(exit_code(event.code), self._ended(record, exit_text))
        self.staff.slots.ended(record.slot, -1 if record.killed_for else event.code)
        if not self.worlds.trained and self.staff.all_fail():
            fails = because(
                ReasonKind.SCRIPT_FAILS,
                worker=str(record.worker),
                exit=exit_text,
                killed_for=record.killed_for,
                wrote=self.staff.last_output,
            )
            self.worlds.end(1, fails)

    def _ran_to_its_end(self, record: WorkerRecord) -> bool:
        """Return whether a worker completed a program that does not call elastic.run, and possibly not init()."""
        outside = not record.running and record.stage is not WorkerStage.DISMISSED
        here = not self.worlds.generation or record.worker in self.worlds.world.places
        return outside and here and not record.leaving and self.worlds.root_cause_search is None
