"""Selection of the older commit to resume from when commits may contain wrong gradients. Pure: no I/O, no clock.

A worker that computes wrong gradients may have done so since its first step. Every later commit may contain its
gradients, unless all gradients are compared before they are used. Workers keep copies of older commits (see
`elastic.exact.kept_commits`). The next world begins from the newest copy that precedes the worker's first step, or else
from the oldest copy. Commits of later worlds are trusted, because the worker does not contribute to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.driver.membership.records.roster import WorkerRecord
from elastic.driver.membership.scheduling.rank_order import newest_of
from elastic.protocol.messages import Commit, KeptCommit, Worker


@dataclass(frozen=True)
class Beginning:
    """Result of `SpoiltCommits.begin`: the commits from which the next world may begin.

    Attributes:
        commits: for each worker, the commit that it contributes, or None if it has no copy.
        older: the commit to begin from if it is not the newest one, otherwise None.
        whole: False if all commits are doubtful, so that wrong gradients may remain.
    """

    commits: dict[Worker, Commit | None]
    older: KeptCommit | None = None
    whole: bool = True


@dataclass
class SpoiltCommits:
    """Range of the doubtful commits of a job: those after the commit ``after``, up to generation ``until``."""

    after: Commit | None = None
    until: int = 0
    culprit: str = ""  # worker that most recently computed wrong gradients

    def found(self, record: WorkerRecord, generation: int) -> None:
        """Mark all commits since the first step of a worker as doubtful, up to the given generation."""
        since = Commit(record.first_generation, 0)
        known = self.after is not None and self.until == generation
        self.after = min(self.after, since) if known and self.after is not None else since
        self.until, self.culprit = generation, str(record.worker)

    def doubts(self, commit: Commit) -> bool:
        return self.after is not None and self.after < commit and commit.generation <= self.until

    def begin(self, ready: Iterable[WorkerRecord]) -> Beginning:
        """Return the commits of the ready workers from which the next world may begin."""
        here = list(ready)
        newest = newest_of([s.commit for s in here])
        own = {s.worker: s.commit for s in here}
        if newest is None or not self.doubts(newest):
            return Beginning(own)
        older = [each for s in here for each in s.kept]
        sound = max((each for each in older if not self.doubts(each.commit)), default=None)
        chosen = sound or min(older, default=None)
        if chosen is None:
            return Beginning(own, whole=False)
        commits = {
            s.worker: chosen.commit if any(each == chosen for each in s.kept) else None
            for s in here
        }
        return Beginning(commits, chosen, whole=sound is not None)
