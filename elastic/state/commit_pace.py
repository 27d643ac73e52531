"""Measurement of the costs of commits, and their exchange between ranks for `commit_budget`."""

from __future__ import annotations

import sys
import time

import torch

from elastic.monitoring import step_count
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state.commit_budget import CommitBudget

COSTS = "costs of commits"


class CommitPace:
    """Costs of one state's commits. All methods must be called from the training thread."""

    def __init__(self) -> None:
        self._budget: CommitBudget | None = None
        self._generation = 0
        # time of the last commit() call, after its copy if it made one
        self._returned_at: float | None = None
        self._began_at = 0.0
        # seconds of training and number of commit() calls since the last copy
        self._trained_s, self._calls = 0.0, 0

    def of_world(self, rt: WorkerRuntime) -> CommitPace | None:
        """Return this object in a job with ``--commit-budget``, and None in other jobs.

        This method resets it in each new world.
        """
        if not rt.env.commit_budget or not rt.elastic:
            return None
        if self._budget is None or self._generation != rt.generation:
            self._budget = CommitBudget(rt.env.commit_budget)
            self._generation = rt.generation
            self._returned_at = None
            self._trained_s, self._calls = 0.0, 0
            step_count.commits_every = 1
        return self

    def due(self, now: float) -> bool:
        """Count a commit() call. Return whether it must make a copy."""
        assert self._budget is not None
        if self._returned_at is not None:
            self._trained_s += now - self._returned_at
            self._calls += 1
        self._returned_at = now
        return self._budget.due()

    def skipped(self, rt: WorkerRuntime) -> bool:
        """Return whether commit() was called after the last copy."""
        return self.of_world(rt) is not None and self._budget is not None and self._budget.skipped

    def begin(self, now: float) -> None:
        self._began_at = now

    def end(self, rt: WorkerRuntime, now: float) -> None:
        """Exchange the measured costs of a copy that was just made.

        All ranks must call this method.

        Raises:
            PeerLost: a rank was lost.
        """
        budget = self._budget
        assert budget is not None
        step_s = self._trained_s / self._calls if self._calls else 0.0
        mine = torch.tensor([now - self._began_at, step_s], dtype=torch.float64, device="cpu")
        with rt.guard(COSTS):
            group = rt.group(COSTS, torch.device("cpu"))
            parts = [torch.zeros_like(mine) for _ in range(group.size)]
            group.allgather(parts, mine).wait()
        copies_s, steps_s = zip(*(each.tolist() for each in parts), strict=True)
        if budget.copied(copies_s, steps_s):
            step_count.commits_every = budget.every
            if rt.place.rank == 0:
                print(
                    f"elastic: {_described(budget, max(copies_s), max(steps_s))}", file=sys.stderr
                )
        self._trained_s, self._calls = 0.0, 0
        self._returned_at = time.monotonic()


def _described(budget: CommitBudget, copy_s: float, step_s: float) -> str:
    return (
        f"commit budget {100 * budget.share:g} %: a copy takes {1000 * copy_s:.3g} ms and a step {1000 * step_s:.3g}"
        f" ms, so 1 in {budget.every} calls of commit() copies the state; a failure repeats at most {budget.every}"
        f" steps ({budget.every * step_s:.2g} s)"
    )
