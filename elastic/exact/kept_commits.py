"""Retention of older commits in memory, to restore one of them after a rank has computed wrong gradients.

Pure: no I/O, no clock.

Two commits are kept: the older one is dropped once the newer one is `window` steps old. The older one is therefore
between one and two windows old, unless the run is still shorter than that.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from elastic.protocol.messages import Commit, KeptCommit

Copy = TypeVar("Copy")


class KeptCommits(Generic[Copy]):
    """The commits that one worker keeps, oldest first."""

    def __init__(self) -> None:
        self._kept: list[tuple[KeptCommit, Copy]] = []

    @property
    def held(self) -> list[KeptCommit]:
        return [each for each, _ in self._kept]

    def due(self, step: int, window: int) -> bool:
        """Return whether to keep the commit of this step. This method drops commits that are no longer needed.

        Args:
            step: number of the step.
            window: number of steps to cover. 0 means that no commits are kept.
        """
        if not window:
            self._kept.clear()
            return False
        if self._kept and step - self._kept[-1][0].step < window:
            return False
        del self._kept[:-1]
        return True

    def add(self, commit: Commit, step: int, copy: Copy) -> None:
        self._kept.append((KeptCommit(commit, step), copy))

    def forget_after(self, commit: Commit) -> None:
        """Drop commits that are newer than the commit from which a world begins."""
        self._kept = [(each, copy) for each, copy in self._kept if each.commit <= commit]

    def copy_of(self, commit: Commit) -> Copy | None:
        return next((copy for each, copy in self._kept if each.commit == commit), None)
