"""Copying of a shard from a GPU to pinned host memory while training continues.

If the GPU has no room for a second copy, the tensors are read while the next forward and backward pass run. The next
optimizer step waits, on its stream, until the tensors have been read (`order`). Other writes cannot be prevented, but
are detected by comparing checksums of the tensors and of their copies, and the commit is then discarded.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.collectives import threads_at_exit
from elastic.state.snapshots import pinned_copy
from elastic.state.snapshots.pinned_copy import DeviceStaging, Pair, PinnedCopy
from elastic.torch_backend import compile_exclusion

_LOOK_S = 0.1
_WORD = 8  # bytes
_installed: list[Any] = []
_in_flight: list[BackgroundCopy] = []


class BackgroundCopy:
    """One copy in flight. The constructor begins it, after the work that is queued on the current stream.

    Args:
        pairs: pairs of a tensor on the GPU and a pinned host tensor with the same layout.
        stage: buffer in the GPU's memory to copy through, if there is room for one.
        exposed: whether training may continue while the tensors are read, if there is no room for a buffer.
    """

    def __init__(self, pairs: Sequence[Pair], stage: DeviceStaging, *, exposed: bool) -> None:
        # keeps the tensors alive while they are read
        self._tensors = [tensor for tensor, _ in pairs]
        self._transit = PinnedCopy()
        # checksums at the commit and copies of the tensors, if training may write to the tensors during the copy
        self._check: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._valid: bool | None = None  # the result of `finish`
        self._ordered = threading.Event()
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        # A read of the tensors within the GPU's memory takes a fraction of the time of a copy to the host.
        if exposed and not stage.has_room(self._tensors):
            before = _sums(self._tensors)
            sums = pinned_copy.like([before])[0].copy_(before, non_blocking=True)
            self._transit.follow(before.device, sums.nbytes)
            self._check = sums, [host for _, host in pairs]
        pinned_copy.send([*pairs], stage, self._transit, exposed=self._check is not None)
        if self._check is None:
            self._ordered.set()
            self._tensors = []
            return
        self._events = list(self._transit.events)
        _in_flight.append(self)
        if not _installed:
            compile_exclusion.keep_function_out(_before_step)
            _installed.append(register_optimizer_step_pre_hook(_before_step))

    def order(self) -> None:
        """Make the current stream wait for the copy, before work on the stream writes to the tensors.

        Call this once, in the training thread.
        """
        if self._ordered.is_set():
            return
        _in_flight.remove(self)
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        self._tensors = []
        self._ordered.set()

    def finish(self) -> bool:
        """Block until `order` was called and the copy is complete. This method may be called in any thread.

        Returns:
            True if no tensor was written to while it was read, so that the copy is valid.

        Raises:
            DeviceLost: the copy did not complete within its time limit.
            ProcessExiting: in a thread, at the exit of the process.
        """
        if self._valid is None:
            while not self._ordered.wait(_LOOK_S):
                threads_at_exit.leave_if_ending()
            self._transit.wait()
            # The copies are compared, and not the tensors after the copy: a script may have written to the tensors and
            # then restored them, as in an evaluation with averaged weights.
            self._valid = self._check is None or torch.equal(self._check[0], _sums(self._check[1]))
            self._check = None
        return self._valid


def _before_step(*_: Any) -> None:
    for copy in [*_in_flight]:
        copy.order()


def _sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over the bits of each tensor, as int64.

    The sums are computed on the tensors' device, without waiting.
    """
    with torch.no_grad():
        return torch.stack([_sum(each) for each in tensors])


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    # Words of 8 bytes, because a CPU sums up narrower ones at a hundredth of the speed.
    row = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if row.storage_offset() % _WORD:
        row = row.clone()
    whole = len(row) // _WORD * _WORD
    total = row[:whole].view(torch.int64).sum()
    return total + row[whole:].sum(dtype=torch.int64) if whole < len(row) else total
