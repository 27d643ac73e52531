"""Determine which of the trained samples count in the committed history, and check them. Pure: no I/O, no clock.

With each commit, a worker reports the samples on which it trained since the previous commit, separately for each
epoch. A report counts if its commit is in the committed history: the commits from which later worlds began, and the
earlier commits of the same worlds. All other training was undone and is repeated.

Each sample must count exactly once per epoch. Only the last round may repeat samples, to pad the partition. The number
of repeated samples is smaller than the number of workers. If a worker dies between a commit and its report, the report
is lost, so a missing sample is an error only if lost reports cannot explain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from elastic.protocol.messages import Commit, Worker


@dataclass
class Epoch:
    """Samples of one epoch that are part of the committed history."""

    # the first commit that contains each sample
    seen: dict[int, Commit] = field(default_factory=dict)
    # for each commit, its samples that are also in an earlier commit
    repeats: dict[Commit, list[int]] = field(default_factory=dict)
    last: Commit | None = None  # the latest commit with samples of this epoch
    # for each generation, the number of samples that were not in an earlier generation
    fresh: dict[int, int] = field(default_factory=dict)
    # for each commit with missing reports, their number and the maximum number of samples in each
    silent: dict[Commit, tuple[int, int]] = field(default_factory=dict)

    @property
    def unreported(self) -> int:
        """Maximum number of trained samples that can be missing because reports were lost."""
        return sum(reports * longest for reports, longest in self.silent.values())


class SampleHistory:
    """Checker of trained samples. Its methods are called in the order of the journal.

    Each method returns a description of a violation, or an empty string.
    """

    def __init__(self, samples: int = 0) -> None:
        # size of the dataset; 0 means unknown, in which case it is inferred from the reports
        self._samples = samples
        self._sizes: dict[int, int] = {}
        # for each generation, the number of its last commit in the committed history
        self._kept: dict[int, int] = {}
        self._settled = 0  # commits of generations before this generation are final
        # samples of each commit and worker, by epoch
        self._pending: dict[Commit, dict[Worker, dict[int, list[int]]]] = {}
        self._epochs: dict[int, Epoch] = {}
        # Commits that the newest worlds have undone, and the value of `_kept` before. Discarded at these worlds' first
        # commit.
        self._undone: dict[Commit, dict[Worker, dict[int, list[int]]]] = {}
        self._kept_before: dict[int, int] | None = None
        self.counted = 0

    def reported(self, worker: Worker, commit: Commit, epoch: int, samples: list[int]) -> str:
        """Record a worker's report. It may arrive after a later world has begun."""
        if commit.number > self._kept.get(commit.generation, commit.number):
            return ""  # this report's commit was undone
        if commit.number and commit.generation >= max(self._sizes, default=0):
            self._undone, self._kept_before = {}, None
        if commit.generation < self._settled:
            silent = self._epoch(epoch).silent
            if commit in silent:
                reports_missing, longest = silent[commit]
                silent[commit] = (reports_missing - 1, longest)
            return self._count(commit, epoch, samples)
        mine = self._pending.setdefault(commit, {}).setdefault(worker, {})
        if samples and mine.get(epoch):
            return f"{worker} reports samples of epoch {epoch} under {commit} twice"
        if samples:
            mine[epoch] = list(samples)
        return ""

    def began(
        self, generation: int, size: int, commit: Commit | None, back_to: int | None = None
    ) -> str:
        """Record a new world, which undoes all commits after ``commit``.

        Args:
            generation: number of the world.
            size: number of its workers.
            commit: the commit from which the world continues. None means the initial state.
            back_to: the oldest generation to which a later world may still return.
        """
        self._sizes[generation] = size
        if self._kept_before is None:
            self._kept_before = {**self._kept}
        for old in range((commit.generation if commit else 0), generation):
            self._kept[old] = -1
        if commit is not None:
            self._kept[commit.generation] = commit.number
        undone = [c for c in self._pending if commit is None or c > commit]
        for each in undone:
            self._undone[each] = self._pending.pop(each)
        self._settled = commit.generation if commit else 0
        if back_to is not None:
            self._settled = min(back_to, self._settled)
        return self._settle(before=self._settled)

    def restored(self, commit: Commit) -> None:
        """Record that the current world continues from ``commit``, a checkpoint newer than the commit in `began`."""
        before = self._kept_before or {}
        for old in [each for each in self._kept if each < commit.generation]:
            self._kept.pop(old)
            if old in before:
                self._kept[old] = before[old]
        self._kept[commit.generation] = commit.number
        for each in [each for each in self._undone if each <= commit]:
            self._pending[each] = self._undone.pop(each)

    def finish(self, *, complete: bool) -> str:
        """Check the counted samples at the end of the job.

        Args:
            complete: whether the job succeeded. If so, all samples must have been trained, provided that the size of
                the dataset is known.
        """
        wrong = self._settle(before=None)
        if wrong or not self._epochs:
            return wrong
        length = self._samples or 1 + max(max(e.seen, default=-1) for e in self._epochs.values())
        last = max(self._epochs)
        for number, epoch in sorted(self._epochs.items()):
            whole = number < last or (complete and self._samples > 0)
            wrong = self._judge(number, epoch, length, whole=whole)
            if wrong:
                return wrong
        return ""

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _epoch(self, number: int) -> Epoch:
        return self._epochs.setdefault(number, Epoch())

    def _settle(self, before: int | None) -> str:
        for commit in sorted(c for c in self._pending if before is None or c.generation < before):
            reports = self._pending.pop(commit)
            reported = [pair for by_epoch in reports.values() for pair in by_epoch.items()]
            silent = self._sizes.get(commit.generation, 0) - len(reports)
            for epoch, samples in reported if silent > 0 else ():
                known = self._epoch(epoch).silent
                known[commit] = (silent, max(len(samples), known.get(commit, (0, 0))[1]))
            for epoch, samples in reported:
                wrong = self._count(commit, epoch, samples)
                if wrong:
                    return wrong
        return ""

    def _count(self, commit: Commit, number: int, samples: Iterable[int]) -> str:
        epoch, size = self._epoch(number), self._sizes.get(commit.generation, 1)
        epoch.last = max(epoch.last or commit, commit)
        for sample in samples:
            self.counted += 1
            if sample not in epoch.seen:
                epoch.seen[sample] = commit
                epoch.fresh[commit.generation] = epoch.fresh.get(commit.generation, 0) + 1
                continue
            repeats = epoch.repeats.setdefault(commit, [])
            repeats.append(sample)
            if len(repeats) >= size:
                return (
                    f"sample {sample} of epoch {number} counts in {epoch.seen[sample]} and again in {commit}:"
                    f" repeat {len(repeats)} in a world of {size}, and the last round needs at most {size - 1}"
                )
        return ""

    def _judge(self, number: int, epoch: Epoch, length: int, *, whole: bool) -> str:
        missing = length - len(epoch.seen)
        if whole and missing > epoch.unreported:
            first = next(self._absent(epoch, length))
            return f"{missing} samples of epoch {number} are in no commit, the first is {first}"
        for commit, repeats in sorted(epoch.repeats.items()):
            twice = f"samples {repeats[:8]} of epoch {number} count again in {commit}"
            if epoch.last is not None and commit < epoch.last:
                return f"{twice}, which is not its last round: that was in {epoch.last}"
            if epoch.unreported > 0 or missing > 0:
                continue  # Skip this check, because the length of the last partition is unknown.
            size = self._sizes.get(commit.generation, 1)
            left = length - sum(n for g, n in epoch.fresh.items() if g < commit.generation)
            if len(repeats) > -left % size:
                return f"{twice}: {left} were left for {size} workers, which needs {-left % size} repeats"
        return ""

    @staticmethod
    def _absent(epoch: Epoch, length: int) -> Iterator[int]:
        return (sample for sample in range(length) if sample not in epoch.seen)
