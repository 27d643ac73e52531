"""Brings the mark of a step (see `elastic.optimizer.plan_agreement`) from where it was reduced to the host."""

from __future__ import annotations

import torch

from elastic.collectives.interface import Op
from elastic.optimizer.plan_agreement import StepFlag, read_mark
from elastic.state.snapshots.pinned import Transit


class MarkOnHost:
    """Of one element of a bucket. From a GPU it is copied while later buckets are waited for: then it costs no wait."""

    def __init__(self, mark: torch.Tensor) -> None:
        self._mark = self._seen = mark
        self._copy = Transit() if mark.is_cuda else None
        if self._copy is not None:
            self._seen = torch.empty_like(mark, device="cpu", pin_memory=True)

    def fetch(self) -> None:
        """The reduction is over, and went well."""
        if self._copy is not None:
            self._seen.copy_(self._mark, non_blocking=True)
            self._copy.follow(self._mark.device, self._mark.nbytes)

    def read(self, op: Op) -> StepFlag:
        """After `fetch`. Raises DeviceLost where the copy does not end."""
        if self._copy is not None:
            self._copy.wait()
        return read_mark(op, float(self._seen))
