"""Rates of commits, optimizer steps and samples of a job, computed from its view. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.driver import events
from elastic.driver.monitoring.commit_rate import CommitRate
from elastic.driver.monitoring.job_view import ViewReader
from elastic.driver.monitoring.step_rate import StepRate
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.protocol.messages import Commit


class JobRates(ViewReader):
    """Rates of commits, steps and samples per second of one job."""

    def __init__(self, spent: TimeSpent) -> None:
        self.commits = CommitRate(spent.stalls)
        self.steps = StepRate(spent.stalls)  # computed from the reports of rank 0
        self.step: int | None = None  # step counter of the state at the newest commit of rank 0
        # Last measurement of the commit rate: start of its interval, and commits per second.
        self.measured: tuple[float, float] | None = None
        self._view = spent.view
        self._counted: Commit | None = None
        self._view.follow(self)

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        view = self._view
        if view.newest is not self._counted:
            self._counted = view.newest
            self.measured = self.commits.committed(view.commits, now) or self.measured
        if isinstance(event, events.WorkerSpent) and view.ranks.get(event.worker) == 0:
            self.steps.record(event.worker, event.steps, event.batch, now)
            self.step = event.step
