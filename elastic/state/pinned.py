"""Copies from CUDA devices to pinned host memory, under way while training goes on, and whether they count.

After a collective is aborted its stream runs on and computes with garbage. So a copy counts only if it had completed
before the abort was asked for. Who aborts says so first: `abort_requested`, from any thread. It decides nothing else.

Where the device has room, the tensors are first copied on the device (fast, in the training stream) and from there to
the host on a side stream. Where it has none, the training stream waits for the copies to the host: training may write
the tensors again at any time, and a torn commit is worse than a slow one.
"""

from __future__ import annotations

import threading
import time
import weakref

import torch

from elastic.errors import PeerLost

POLL_S = 0.0002
COPY_LIMIT_S = 120.0  # a device that takes longer hangs

Pair = tuple[torch.Tensor, torch.Tensor]  # on the device, pinned

_lock = threading.Lock()
_under_way: weakref.WeakSet[Transit] = weakref.WeakSet()
_side: dict[torch.device, torch.cuda.Stream] = {}


class Transit:
    """The copies of one commit. ``verdict``: whether they count, or None while nobody had to decide."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.launched = False
        self.verdict: bool | None = None
        with _lock:
            _under_way.add(self)

    def complete(self) -> bool:
        return self.launched and all(event.query() for event in self.events)

    def judge(self) -> None:
        """Decides now, for good. The lock keeps two threads from deciding differently."""
        with _lock:
            if self.verdict is None:
                self.verdict = self.complete()

    def counts(self) -> bool:
        """Waits until the copies are complete, or an abort was asked for before they were. Bounded."""
        deadline = time.monotonic() + COPY_LIMIT_S
        while self.verdict is None:
            if self.complete():
                self.judge()  # an abort that comes from now on is too late to spoil them
            elif time.monotonic() > deadline:
                raise PeerLost(f"a copy from the GPU did not complete within {COPY_LIMIT_S:g} s")
            else:
                time.sleep(POLL_S)
        return self.verdict


def abort_requested() -> None:
    """To be called before CUDA collectives are aborted, once the generation is marked broken.

    Copies that have not completed by now never count. Any thread, any number of times, never blocks.
    """
    with _lock:
        transits = list(_under_way)
    for transit in transits:
        transit.judge()


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
    """Starts the copies. Returns at once; the training stream may overwrite the sources afterwards.

    Raises PeerLost if the generation is broken: what the device computes now is garbage.
    """
    from elastic import runtime

    rt = runtime.active()
    # Looked at after the transit was registered: either this sees the break, or `abort_requested` sees the transit.
    if rt is not None and rt.broken:
        transit.judge()
        raise PeerLost("the world broke before its state could be committed")
    devices: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        devices.setdefault(pair[0].device, []).append(pair)
    for device, mine in devices.items():
        sources, hosts = [source for source, _ in mine], [host for _, host in mine]
        with torch.cuda.device(device):
            training = torch.cuda.current_stream(device)
            side = _side.setdefault(device, torch.cuda.Stream(device))
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
        transit.events.append(event)
    transit.launched = True
