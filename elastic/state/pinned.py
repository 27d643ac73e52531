"""Copies from CUDA devices to pinned host memory, under way while training goes on. Acts, and decides nothing.

A copy that is under way when the world breaks is as good as any other, and is waited for. Whoever trains has waited on
the host for each collective before anything was queued that reads its result, so what is live at a commit never hangs
on a collective that an abort could spoil.

Where the device has room, the tensors are first copied on the device (fast, in the training stream) and from there to
the host on a side stream. Where it has none, the training stream waits for the copies to the host: training may write
the tensors again at any time, and a torn commit is worse than a slow one.
"""

from __future__ import annotations

import time

import torch

from elastic.errors import DeviceLost

POLL_S = 0.0002
COPY_LIMIT_S = 20.0  # a device that takes longer hangs
SLOWEST_BYTES_S = 250e6  # ... but for what the bytes themselves take over a slow or busy bus

Pair = tuple[torch.Tensor, torch.Tensor]  # on the device, pinned

_side: dict[torch.device, torch.cuda.Stream] = {}


class Transit:
    """The copies of one commit on their way."""

    def __init__(self) -> None:
        self.events: list[tuple[torch.device, torch.cuda.Event]] = []
        self.bytes = 0

    def complete(self) -> bool:
        """Any thread: each event is asked on its own device, or CUDA would begin to use GPU 0 there."""
        for device, event in self.events:
            with torch.cuda.device(device):
                if not event.query():
                    return False
        return True

    def wait(self) -> None:
        """Until the copies are complete. Raises DeviceLost where that takes longer than it should."""
        limit_s = COPY_LIMIT_S + self.bytes / SLOWEST_BYTES_S
        deadline = time.monotonic() + limit_s
        while not self.complete():
            if time.monotonic() > deadline:
                raise DeviceLost(
                    f"a copy from the GPU to the host did not complete within {limit_s:.0f} s"
                )
            time.sleep(POLL_S)
        self.events.clear()


class Stage:
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


def send(pairs: list[Pair], stage: Stage, transit: Transit) -> None:
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
                event = torch.cuda.Event()
                event.record(side)
            if rooms is None:
                training.wait_stream(side)
        transit.events.append((device, event))
        transit.bytes += sum(source.nbytes for source in sources)
