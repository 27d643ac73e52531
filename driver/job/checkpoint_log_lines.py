"""Log lines about checkpoints: the first, the first after a failure, occasional others, and problems."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from elastic.driver.job.checkpoint_shares import (
    CheckpointCompleted,
    CheckpointFailed,
    ReplicasDiffer,
)
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.reasons import counted, start_checkpoint
from elastic.driver.settings import StartCheckpoint
from elastic.protocol.messages import at_step

QUIET_S = 30.0  # minimum number of seconds between lines about problems of one kind
MADE_S = 600.0  # minimum number of seconds between lines about successful checkpoints
NAMED = 4  # maximum number of workers to name per group


def kept_line(
    view: JobView, *, writes: bool, begins: StartCheckpoint | None, adopted: bool
) -> str | None:
    """Return the final log line of a failed or stopped job, which names the checkpoint to resume from.

    Return None if the job made no commit, or if this driver does not know whether an earlier driver wrote a checkpoint.

    Args:
        writes: whether the job has a checkpoint directory.
        begins: the checkpoint from which the job began.
        adopted: whether an earlier driver began the job.
    """
    if view.newest is None or (view.durable is None and (adopted or not view.commits)):
        return None
    lost = counted(view.unsaved, "commit")
    if view.durable is not None:
        later = (
            f"at least {counted(view.unsaved, 'later commit')} lost"
            if view.unsaved
            else "any later commit is lost"
        )
        return f"newest checkpoint: {view.durable}; {later}; rerun to resume"
    if not writes:
        return (
            f"no checkpoint, since --checkpoint-dir was not given; lost: at least {lost} in memory"
        )
    source = "the beginning" if begins is None else start_checkpoint(msgspec.structs.asdict(begins))
    return (
        f"no new checkpoint; lost: at least {lost} in memory. The same command starts from {source}"
    )


class CheckpointLines:
    """Logger of the checkpoints of one job."""

    def __init__(self, now: Callable[[], float], log: Callable[[str, str], None]) -> None:
        self._now = now
        self._log = log
        self._logged_at: dict[type, float] = {}
        self._unlogged: CheckpointCompleted | None = None
        self._made_at = 0.0
        # whether a failure was logged and no checkpoint was completed since
        self._failed = False
        self._over = False

    def made(self, made: CheckpointCompleted) -> None:
        self._made_at = self._now()
        if self._failed:  # log this checkpoint, to show that checkpoints work again
            self._failed = False
            self._logged_at.pop(CheckpointCompleted, None)
        may_log = self._over or self._may_log(CheckpointCompleted, MADE_S)
        self._unlogged = None if may_log else made
        self._log_made("info" if self._unlogged is None else "debug", made)

    def ended(self) -> None:
        """Log the last checkpoint at the end of the job, unless it was already logged."""
        self._over = True
        if self._unlogged is not None:
            self._log_made("info", self._unlogged)

    def _log_made(self, level: str, made: CheckpointCompleted) -> None:
        size = f"{made.size / 1e6:.1f} MB in {made.took_s:.1f} s"
        ago_s = self._now() - self._made_at
        since = f", written {ago_s:.0f} s ago" if ago_s >= 1 else ""
        text = f"{at_step(made.commit, made.step)} is durable{since}"
        folder = made.place.rstrip("/").rpartition("/")[2]
        self._log(level, f"{text}: {folder} ({size})")
        if level != "debug":
            self._log("debug", f"{text}: {made.place}")

    def failed(self, failed: CheckpointFailed) -> None:
        level = "warning" if failed.unusual and self._may_log(CheckpointFailed) else "debug"
        self._failed |= level == "warning"
        self._log(level, f"checkpoint skipped: {failed.worker} reports {failed.reason}")

    def not_equal(self, found: ReplicasDiffer) -> None:
        if not self._may_log(ReplicasDiffer):
            return
        groups = " and ".join(
            ", ".join(map(str, group[:NAMED])) + (" ..." if len(group) > NAMED else "")
            for group in found.groups[:NAMED]
        )
        parts = " and ".join(found.parts)
        what = f"commit {found.commit} is not written as a checkpoint: {parts} differs between {groups}"
        why = (
            "the replicas were equal before, so one worker's memory was corrupted. No majority "
            "identifies it: stop the job and restart it from its newest checkpoint"
            if found.ever_equal
            else "checkpoints need equal replicas: step all parameters with DistributedOptimizer, or remove"
            " values that differ between ranks from the state"
        )
        self._log("error", f"{what}; {why}")

    def _may_log(self, kind: type, quiet_s: float = QUIET_S) -> bool:
        last = self._logged_at.get(kind)
        if last is not None and self._now() - last <= quiet_s:
            return False
        self._logged_at[kind] = self._now()
        return True
