"""Copies from CUDA devices to pinned host memory, under way while training goes on. Acts, and decides nothing.

A copy that is under way when the world breaks is as good as any other, and is waited for. Whoever trains has waited on
the host for each collective before anything was queued that reads its result, so what is live at a commit never hangs
on a collective that an abort could spoil.

Where the device has room, the tensors are first copied on the device (fast, in the training stream) and from there to
the host on a side stream. Where it has none, the training stream waits for the copies to the host: training may write
the tensors again at any time, and a torn commit is worse than a slow one.

The host memory is pinned here, all that one commit needs in one piece: torch's allocator of pinned memory rounds every
request up to a power of two.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Sequence

import torch

from elastic.errors import DeviceLost

POLL_S = 0.0002
COPY_LIMIT_S = 20.0  # a device that takes longer hangs
SLOWEST_BYTES_S = 250e6  # ... but for what the bytes themselves take over a slow or busy bus
ALIGNMENT = 64  # bytes; of each tensor in the pinned memory

Pair = tuple[torch.Tensor, torch.Tensor]  # on the device, pinned

_side: dict[torch.device, torch.cuda.Stream] = {}
_given_up: list[mmap.mmap] = []  # a device that hangs may still write there


class _Pages(mmap.mmap):
    """Pinned memory of its own mapping. Freed with the last tensor in it, once no device copies from or to it."""

    device: torch.device | None = None
    address = 0
    owner = 0  # process

    def __del__(self) -> None:
        if self.device is None or self.owner != os.getpid() or sys.is_finalizing():
            return
        transit = PinnedCopy()
        for device, stream in _side.items():  # restores are waited for where they are made
            with torch.cuda.stream(stream):
                transit.follow(device, len(self))
        try:
            transit.wait()
        except DeviceLost:
            _given_up.append(self)
            return
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(self.address)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin, one after another, and where the last one ends; in bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each CUDA tensor a pinned one of its shape, dtype and order of strides; all in one allocation.

    Raises MemoryError where so much can't be pinned.
    """
    if not tensors:
        return []
    models = [torch.empty_like(each, device="meta") for each in tensors]
    starts, total = layout([each.nbytes for each in models])
    # The mapping is shared, so a fork leaves the parent the very pages that the GPU writes.
    pages = _Pages(-1, max(total, ALIGNMENT))
    block = torch.frombuffer(pages, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    with torch.cuda.device(tensors[0].device):
        code = cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if int(code):
        raise MemoryError(
            f"CUDA can't pin {block.nbytes} bytes of host memory for commits: {cudart.cudaGetErrorString(code)}"
        )
    pages.device, pages.address, pages.owner = tensors[0].device, block.data_ptr(), os.getpid()
    return [
        block[start : start + model.nbytes]
        .view(model.dtype)
        .as_strided(model.shape, model.stride())
        for start, model in zip(starts, models, strict=True)
    ]


class PinnedCopy:
    """Copies on their way: those of one commit, or of a restore."""

    def __init__(self) -> None:
        self.events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._bytes = 0

    def follow(self, device: torch.device, size: int) -> None:
        """Also wait for the copies of ``size`` bytes that are queued on the device's current stream."""
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        self.events.append((device, event))
        self._bytes += size

    def complete(self) -> bool:
        """Any thread: each event is asked on its own device, or CUDA would begin to use GPU 0 there."""
        for device, event in self.events:
            with torch.cuda.device(device):
                if not event.query():
                    return False
        return True

    def wait(self) -> None:
        """Until the copies are complete. Raises DeviceLost where that takes longer than it should."""
        limit_s = COPY_LIMIT_S + self._bytes / SLOWEST_BYTES_S
        deadline = time.monotonic() + limit_s
        while not self.complete():
            if time.monotonic() > deadline:
                raise DeviceLost(
                    f"a copy between the GPU and the host did not complete within {limit_s:.0f} s"
                )
            time.sleep(POLL_S)
        self.events.clear()


class DeviceStaging:
    """Room on the devices for one commit on its way to the host; made once, or found to be too expensive."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[torch.device, torch.dtype, tuple[int, ...], int], torch.Tensor] = {}
        self._refused: set[torch.device] = set()

    def room(self, device: torch.device, sources: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """One tensor on the device for each source, or None where memory is short."""
        if device in self._refused:
            return None
        counts: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], int] = {}
        keys = []
        for source in sources:
            kind = (device, source.dtype, tuple(source.shape))
            counts[kind] = counts.get(kind, 0) + 1
            keys.append((*kind, counts[kind]))
        missing = [
            (key, source)
            for key, source in zip(keys, sources, strict=True)
            if key not in self._rooms
        ]
        needed = sum(source.nbytes for _, source in missing)
        if needed and torch.cuda.mem_get_info(device)[0] < 4 * needed:
            self._refused.add(device)
            self._rooms = {key: room for key, room in self._rooms.items() if key[0] != device}
            return None
        for key, source in missing:
            self._rooms[key] = torch.empty_like(source)
        return [self._rooms[key] for key in keys]


def send(pairs: list[Pair], stage: DeviceStaging, transit: PinnedCopy) -> None:
    """Starts the copies. Returns at once; the training stream may overwrite the sources afterwards."""
    devices: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        devices.setdefault(pair[0].device, []).append(pair)
    for device, mine in devices.items():
        sources, hosts = [source for source, _ in mine], [host for _, host in mine]
        with torch.cuda.device(device):
            training = torch.cuda.current_stream(device)
            side = _side.get(device)
            if side is None:
                side = _side[device] = torch.cuda.Stream(device)
            rooms = stage.room(device, sources)
            if rooms is not None:
                torch._foreach_copy_(rooms, sources)
            side.wait_stream(training)
            with torch.cuda.stream(side):
                for source, host in zip(rooms or sources, hosts, strict=True):
                    host.copy_(source, non_blocking=True)
                transit.follow(device, sum(source.nbytes for source in sources))
            if rooms is None:
                training.wait_stream(side)
