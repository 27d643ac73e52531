"""Check that the exit code and reason of a job's end are consistent with the previous events.

Pure: no I/O, no clock. See `invariants`.

A job succeeds in one of two ways: each live member of its world has returned from elastic.run and was notified, or,
if the program never calls elastic.run, each worker has exited with code 0. Any other end is a failure. Its exit code
is 1 or that of the worker whose exit caused the failure.
"""

from __future__ import annotations

import signal

from elastic.chaos.invariants.observed_job import LiveWorker, ObservedJob
from elastic.driver.events import (
    EndJob,
    FinishWorld,
    HostReported,
    StopRequested,
    WorkerExited,
    WorkerRaised,
)
from elastic.driver.membership.worlds.root_cause import exit_code
from elastic.driver.reasons import Reason, ReasonKind
from elastic.protocol.messages import Worker

# exit code that the driver records for a worker unknown to its host's agent
VANISHED = exit_code(-9)


class JobEnd:
    """Checker of the last entries in a job's journal, which end the job."""

    def __init__(self, job: ObservedJob) -> None:
        self.job = job
        # whether the actions for the current event contain FinishWorld, which releases members
        self.finishes = False

    def have_returned(self, action: FinishWorld) -> None:
        """Check that all released members have returned from elastic.run, and that their world had not failed."""
        self.job.finished = True
        broken = f"generation {action.generation} is finished, but was interrupted before"
        self.job.must(self.job.broken_at is None, "THE END", broken)
        for worker in action.members:
            known = self.job.workers.get(worker)
            if known is None:
                continue
            what = f"{worker} is released from generation {action.generation}, but has not returned"
            self.job.must(known.returned == action.generation, "THE END", what)
            known.finished = True

    def ends(self, action: EndJob) -> None:
        self.job.end = action
        self.job.waits.end_all()
        match action.reason:
            case Reason(ReasonKind.ALL_RETURNED | ReasonKind.ALL_EXITED) if action.code != 0:
                what = f"exit code {action.code} for a success: {action.reason}"
                self.job.broken("THE END", what)
            case Reason() if action.code != 0:
                self._fails(action)
            case Reason(
                ReasonKind.ALL_RETURNED, {"members": int(number), "generation": int(generation)}
            ):
                self._all_returned(number, generation)
            case Reason(ReasonKind.ALL_EXITED, {"workers": int(number)}):
                self._all_ran_to_their_end(number)
            case _:
                self.job.broken("THE END", f"success, for an invalid reason: {action.reason}")

    # ---- success ---------------------------------------------------------------------------------------------------

    def _all_returned(self, number: int, generation: int) -> None:
        what = f"the members of generation {generation} returned, but generation {self.job.generation} is active"
        self.job.must(generation == self.job.generation, "THE END", what)
        live = self._live_members()
        for worker, known in live:
            what = f"the job succeeds, but {worker} has not returned"
            self.job.must(known.finished, "THE END", what)
        what = f"{number} members are reported to have returned, expected {len(live)}"
        self.job.must(number == len(live) > 0, "THE END", what)

    def _all_ran_to_their_end(self, number: int) -> None:
        for worker, known in self.job.workers.items():
            what = f"all workers are reported to have ended, but {worker} has not"
            self.job.must(bool(known.going), "THE END", what)
        # Workers that are about to leave do not count: only the driver knows whether their departure was withdrawn.
        sure = [s for s, k in self.job.ended_well.items() if self._ran(s, k)]
        what = f"{number} workers are reported to have ended with exit code 0, expected {len(self.job.ended_well)}"
        self.job.must(max(1, len(sure)) <= number <= len(self.job.ended_well), "THE END", what)

    def _ran(self, slot: tuple[str, int], known: LiveWorker) -> bool:
        listed = slot[1] < self.job.hosts.get(slot[0], 0)
        placed = known.placed == self.job.generation
        return listed and placed and not (known.running or known.asked_to_leave)

    # ---- failure ---------------------------------------------------------------------------------------------------

    def _fails(self, action: EndJob) -> None:
        event, code = self.job.event, action.code
        match event:
            case WorkerExited():
                codes = {1, exit_code(event.code)}
            case HostReported():
                codes = {1, VANISHED}
            case WorkerRaised(final=True):
                codes = {event.code}
            case _ if action.reason.kind in (ReasonKind.MACHINE_LEAVES, ReasonKind.STOPPED):
                codes = {128 + signal.SIGTERM}
            case _:
                codes = {1}
        expected = " or ".join(map(str, sorted(codes)))
        self.job.must(code in codes, "THE END", f"exit code {code}, expected {expected}")
        live = self._live_members()
        if self.finishes and live and all(known.finished for _, known in live):
            what = f"all {len(live)} members have returned, but the job fails: {action.reason}"
            self.job.must(isinstance(event, StopRequested), "THE END", what)
        if action.reason.kind in (ReasonKind.ALL_LOST, ReasonKind.NO_COMMIT):
            self._no_worker_remains()

    def _no_worker_remains(self) -> None:
        for worker in self.job.members:
            known = self.job.workers.get(worker)
            if known is None or known.going or known.stranded or known.holds is None:
                continue
            what = (
                f"the job ends because no worker holds its state, but {worker} holds {known.holds}"
            )
            self.job.broken("RANK 0 IS NO OTHER", what)

    def _live_members(self) -> list[tuple[Worker, LiveWorker]]:
        # A member that is being fenced counts if it had returned before, because its training is complete.
        return [(w, known) for w, known in self.job.here() if known.finished or not known.dismissed]
