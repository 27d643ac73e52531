"""Copy of the reduced step flag (see `elastic.optimizer.gradients.plan_agreement`) on the host."""

from __future__ import annotations

import torch

from elastic.collectives.interface import Op
from elastic.optimizer.gradients.plan_agreement import StepFlag, read_mark
from elastic.state.snapshots.pinned_copy import PinnedCopy


class HostStepFlag:
    """The element of a bucket that contains the step flag, with a copy on the host.

    On a GPU, the copy overlaps with the wait for later buckets.
    """

    def __init__(self, mark: torch.Tensor) -> None:
        self._mark = self._seen = mark
        self._copy = PinnedCopy() if mark.is_cuda else None
        if self._copy is not None:
            self._seen = torch.empty_like(mark, device="cpu", pin_memory=True)

    def fetch(self) -> None:
        """Start the copy to the host, after the reduction has succeeded."""
        if self._copy is not None:
            self._seen.copy_(self._mark, non_blocking=True)
            self._copy.follow(self._mark.device, self._mark.nbytes)

    def read(self, op: Op) -> StepFlag:
        """Return the flag. Call `fetch` first.

        Raises:
            DeviceLost: the copy did not complete.
        """
        if self._copy is not None:
            self._copy.wait()
        return read_mark(op, float(self._seen))
