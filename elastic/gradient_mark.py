"""Brings the mark of a step (see `elastic.plans`) from where it was reduced to the host."""

from __future__ import annotations

import torch

from elastic.collectives.interface import Op
from elastic.plans import Mark, read_mark


class MarkOnHost:
    """Of one element of a bucket. From a GPU it is copied while later buckets are waited for: then it costs no wait."""

    def __init__(self, mark: torch.Tensor) -> None:
        self._mark = self._seen = mark
        self._copied: torch.cuda.Event | None = None
        if mark.is_cuda:
            self._seen = torch.empty_like(mark, device="cpu", pin_memory=True)
            self._copied = torch.cuda.Event()

    def fetch(self) -> None:
        """The reduction is over, and went well."""
        if self._copied is not None:
            self._seen.copy_(self._mark, non_blocking=True)
            self._copied.record()

    def read(self, op: Op) -> Mark:
        """After `fetch`."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return read_mark(op, float(self._seen))
