"""Asynchronous copies from CUDA devices to pinned host memory while training continues.

A copy in flight when the world fails is still valid, so recovery waits until it is complete. A commit begins after all
collectives of the step have ended (`WorkerRuntime.settle`). The tensors at a commit therefore never depend on a
collective that an abort could corrupt.

If the device has enough memory, tensors are first copied on the device (fast, in the training stream) and from there to
the host on a side stream. Otherwise the training stream waits for the copies to the host: training may overwrite the
tensors at any time, which would make the commit inconsistent.

This module pins host memory itself, in one allocation per commit, because torch's pinned memory allocator rounds each
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
COPY_LIMIT_S = 20.0  # a device that takes longer is considered hung
# bytes per second on a slow or busy bus; at this rate, the size of a copy extends COPY_LIMIT_S
SLOWEST_BYTES_S = 250e6
ALIGNMENT = 64  # bytes; alignment of each tensor in the pinned memory

Pair = tuple[torch.Tensor, torch.Tensor]  # tensor on the device, pinned tensor on the host

_side: dict[torch.device, torch.cuda.Stream] = {}
_given_up: list[mmap.mmap] = []  # never freed, because a hung device may still write to this memory


class _Pages(mmap.mmap):
    """Pinned memory mapping. It is freed with the last tensor in it, once no copy from or to it is in flight."""

    device: torch.device | None = None
    address = 0
    owner = 0  # ID of the process that owns the memory

    def __del__(self) -> None:
        if self.device is None or self.owner != os.getpid() or sys.is_finalizing():
            return
        transit = PinnedCopy()
        # only copies for commits can be in flight, since restores wait for theirs
        for device, stream in _side.items():
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
    """Return the offsets of consecutive tensors of these sizes and the total size, in bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return, for each CUDA tensor, a pinned tensor of its shape, dtype and stride order. All share one allocation.

    Raises:
        MemoryError: the memory can't be pinned.
    """
    if not tensors:
        return []
    models = [torch.empty_like(each, device="meta") for each in tensors]
    starts, total = layout([each.nbytes for each in models])
    # A shared mapping, so that after a fork the parent keeps the pages that the GPU writes to.
    pages = _Pages(-1, max(total, ALIGNMENT))
    block = torch.frombuffer(pages, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    with torch.cuda.device(tensors[0].device):
        code = cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if int(code):
        raise MemoryError(
            f"CUDA can't pin {block.nbytes} bytes of host memory for commits: {cudart.cudaGetErrorString(code)}."
            " Provide more host memory, or start fewer workers per host"
        )
    pages.device, pages.address, pages.owner = tensors[0].device, block.data_ptr(), os.getpid()
    return [
        block[start : start + model.nbytes]
        .view(model.dtype)
        .as_strided(model.shape, model.stride())
        for start, model in zip(starts, models, strict=True)
    ]


class PinnedMemory:
    """Host memory that is registered with CUDA while this object exists, so that copies to it are asynchronous.

    Args:
        memory: a CPU tensor of whole pages, or one that shares its last page with no other registered memory.
        device: the GPU that copies to it.

    Raises:
        MemoryError: the memory can't be pinned.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        self._owner = 0
        cudart = torch.cuda.cudart()
        with torch.cuda.device(device):
            code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code):
            raise MemoryError(
                f"CUDA can't pin {memory.nbytes} bytes of host memory for commits: {cudart.cudaGetErrorString(code)}."
                " Provide more host memory, or start fewer workers per host"
            )
        self._owner = os.getpid()

    def release(self) -> None:
        """Unregister the memory, once no copy to it is in flight."""
        if self._owner == os.getpid() and not sys.is_finalizing():
            self._owner = 0
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

    __del__ = release


class PinnedCopy:
    """Set of copies in flight for one commit or one restore."""

    def __init__(self) -> None:
        self.events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._bytes = 0

    def follow(self, device: torch.device, size: int) -> None:
        """Add the copies queued on the device's current stream, ``size`` bytes in all, to those to wait for."""
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        self.events.append((device, event))
        self._bytes += size

    def complete(self) -> bool:
        """Return whether all copies are complete. Thread-safe.

        Each event is queried on its own device; otherwise CUDA would initialize GPU 0 in the calling thread.
        """
        for device, event in self.events:
            with torch.cuda.device(device):
                if not event.query():
                    return False
        return True

    def wait(self) -> None:
        """Wait until the copies are complete.

        Raises:
            DeviceLost: the copies did not complete within the time limit.
        """
        limit_s = COPY_LIMIT_S + self._bytes / SLOWEST_BYTES_S
        deadline = time.monotonic() + limit_s
        while not self.complete():
            if time.monotonic() > deadline:
                raise DeviceLost(
                    f"a copy between the GPU and the host did not complete within {limit_s:.0f} s. This worker"
                    " exits: check its GPU with nvidia-smi and dmesg"
                )
            time.sleep(POLL_S)
        self.events.clear()


class DeviceStaging:
    """Device memory from which one commit is copied to the host.

    The memory is allocated once and reused. If device memory is short, no memory is allocated.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[torch.device, torch.dtype, tuple[int, ...], int], torch.Tensor] = {}
        self._refused: set[torch.device] = set()

    def has_room(self, sources: list[torch.Tensor]) -> bool:
        """Return whether `room` can provide memory for these tensors, which are all on one device."""
        return self.room(sources[0].device, sources) is not None

    def room(self, device: torch.device, sources: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return a staging tensor on the device for each source, or None if device memory is short."""
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


def send(
    pairs: list[Pair], stage: DeviceStaging, transit: PinnedCopy, *, exposed: bool = False
) -> None:
    """Start the copies and return immediately. The training stream may overwrite the sources afterwards.

    With ``exposed``, the caller must first make the training stream wait for the events of ``transit``.
    """
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
            if rooms is None and not exposed:
                training.wait_stream(side)
