"""Host memory of a snapshot buffer: this rank's shard, copies of other shards, and replicated values."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.collectives.shared_memory.host_copy import HostCopy
from elastic.sharding.resharding import ReshardingMove
from elastic.sharding.row_layout import ShardLayout
from elastic.sharding.shard_inventory import CommitId
from elastic.state.fully_sharded import peer_arena
from elastic.state.fully_sharded.background_copy import BackgroundCopy
from elastic.state.fully_sharded.peer_arena import PeerArena
from elastic.state.fully_sharded.sharded_handlers import LiveShard, RowSpec
from elastic.state.snapshots import digest, pinned_copy
from elastic.state.snapshots.snapshot import Snapshot

_numbers = itertools.count()


@functools.cache
def _log_once(why: str) -> None:
    print(f"elastic: warning: {why}", file=sys.stderr, flush=True)


def as_layout(specs: dict[str, RowSpec], shards: int) -> ShardLayout:
    return ShardLayout(tuple(spec.tensor(name) for name, spec in specs.items()), shards)


class ShardBuffers:
    """Memory of one commit. It is allocated once, and reallocated only if sizes change.

    Args:
        spares: memory from which checkpoints were written, for reuse by all snapshot buffers of the state.
        stage: GPU memory to copy through, shared by all snapshot buffers of the state.
    """

    def __init__(
        self,
        spares: list[torch.Tensor] | None = None,
        stage: pinned_copy.DeviceStaging | None = None,
    ) -> None:
        self._number = next(_numbers)
        self._spares = [] if spares is None else spares
        self._stage = pinned_copy.DeviceStaging() if stage is None else stage
        self._pinned: pinned_copy.PinnedMemory | None = None
        self._copying: tuple[BackgroundCopy, CommitId] | None = None
        # snapshots of the replicated tensors, by part name
        self.snapshots: dict[str, Snapshot] = {}
        self.values: Any = None
        self.specs: dict[str, RowSpec] = {}
        self.layout = ShardLayout((), 1)
        self.offsets: dict[int, list[int]] = {}  # offsets of the tensors in each shard
        # complete shards in snapshot buffers of other processes on this host, by shard, each with its header; several
        # for a replicated shard
        self.peers: dict[int, list[tuple[PeerArena, torch.Tensor]]] = {}
        # header and memory of this rank's shard
        self._own = torch.empty(0, dtype=torch.uint8, device="cpu")
        # the `_own` from which a checkpoint is being written, or None
        self._held_shard: torch.Tensor | None = None
        # copies of other shards as uint8 tensors, by shard
        self._buffers: dict[int, torch.Tensor] = {}
        self._shard = 0  # index of this rank's shard
        self._views: list[torch.Tensor] = []
        self._viewed: tuple[Any, ...] = ()
        self._host = HostCopy([], [])

    def arrange(self, shards: dict[str, LiveShard], count: int, held: Sequence[int]) -> None:
        """Prepare the buffer for a commit of these tensors, divided into ``count`` shards.

        Args:
            shards: this rank's rows of each tensor, by name.
            count: number of shards.
            held: shards to keep in this buffer, this rank's own first.
        """
        specs = {name: each.spec for name, each in shards.items()}
        # Offsets depend on the order of the tensors, which equal dicts may not share.
        if [*specs.items()] != [*self.specs.items()] or count != self.layout.shards:
            self.specs, self.layout = specs, as_layout(specs, count)
            self.offsets = {}
        self.peers = {}
        known = self.offsets
        self.offsets = {shard: known.get(shard) or self.layout.offsets(shard) for shard in held}
        own, *held = held
        size = peer_arena.HEADER + self.offsets[own][-1]
        assert self._copying is None, "the previous copy is in flight"
        if len(self._own) != size or self._own is self._held_shard:
            if self._pinned is not None:
                self._pinned.release()
                self._pinned = None
            self._own = self._memory(size)
        peer_arena.mark(self._own, None, own)
        self._shard = own
        free = [buffer for shard, buffer in self._buffers.items() if shard not in held]
        kept = {shard: each for shard, each in self._buffers.items() if shard in held}
        self._buffers = {}
        for shard in held:
            size = self.offsets[shard][-1]
            buffer = kept.get(shard)
            if buffer is None or len(buffer) != size:
                fit = next((n for n, each in enumerate(free) if len(each) == size), None)
                buffer = (
                    torch.empty(size, dtype=torch.uint8, device="cpu")
                    if fit is None
                    else free.pop(fit)
                )
            self._buffers[shard] = buffer

    def learn(self, specs: dict[str, RowSpec]) -> None:
        """Extend the layout to all tensors of the commit, including those without rows on this rank."""
        if list(specs) != list(self.specs):
            self.specs, self.layout = specs, as_layout(specs, self.layout.shards)
            self.offsets = {shard: self.layout.offsets(shard) for shard in self.offsets}

    def copy(self, shards: dict[str, LiveShard], commit: CommitId, *, exposed: bool = False) -> int:
        """Copy this rank's shard into the buffer, and mark it as complete.

        From a GPU, this only starts the copy: call `order` and `finish` afterwards.

        Args:
            shards: this rank's rows of each tensor, by name.
            commit: commit that the buffer will contain.
            exposed: see `BackgroundCopy`.

        Returns:
            The size of the shard in bytes.
        """
        shard = self._shard
        tensors = [each.local for each in shards.values() if each.local.numel()]
        buffer = self.buffer(shard)
        viewed = (buffer.data_ptr(), len(buffer), [(t.shape, t.dtype, t.device) for t in tensors])
        if viewed != self._viewed:
            self._views = [
                buffer[begin : begin + each.local.nbytes]
                .view(each.local.dtype)
                .view(each.local.shape)
                for each, begin in zip(shards.values(), self.offsets[shard], strict=False)
                if each.local.numel()
            ]
            self._viewed = viewed
            self._host = HostCopy(tensors, self._views)
        with torch.no_grad():
            if all(each.device.type == "cpu" for each in tensors):
                if tensors:
                    self._host.run(tensors, [each.data_ptr() for each in tensors])
            elif self._pin({each.device for each in tensors if each.is_cuda}):
                pairs = list(zip(tensors, self._views, strict=True))
                on_host = [pair for pair in pairs if not pair[0].is_cuda]
                if on_host:
                    torch._foreach_copy_([to for _, to in on_host], [each for each, _ in on_host])
                on_gpu = [pair for pair in pairs if pair[0].is_cuda]
                self._copying = BackgroundCopy(on_gpu, self._stage, exposed=exposed), commit
                return sum(each.nbytes for each in tensors)
            else:
                torch._foreach_copy_(self._views, tensors)
        peer_arena.mark(self._own, commit, shard)
        return sum(each.nbytes for each in tensors)

    def _pin(self, devices: set[torch.device]) -> bool:
        """Pin the memory if all tensors are on one GPU. Return whether it is pinned."""
        if len(devices) != 1:
            return False
        if self._pinned is None:
            try:
                self._pinned = pinned_copy.PinnedMemory(self._own, next(iter(devices)))
            except MemoryError as error:
                _log_once(f"{error}; commits wait for their copy")
        return self._pinned is not None

    @property
    def copying(self) -> bool:
        """Return whether a copy was started and `finish` has not been called."""
        return self._copying is not None

    def order(self) -> None:
        """Make the GPU's current stream wait until the copy has read the tensors.

        This method must be called in the training thread.
        """
        if self._copying is not None:
            self._copying[0].order()

    def wait(self) -> None:
        """Wait for the copy to complete before the script continues."""
        copying = self._copying
        if copying is not None:
            copying[0].order()
            copying[0].finish()

    def finish(self) -> bool:
        """Wait for the copy, and mark it as complete.

        This method may be called in any thread, and may wait for `order`.

        Returns:
            Whether the copy is valid; see `BackgroundCopy.finish`.

        Raises:
            DeviceLost: the GPU did not respond.
        """
        if self._copying is None:
            return True
        copying, commit = self._copying
        valid = copying.finish()
        if valid:
            peer_arena.mark(self._own, commit, self._shard)
        self._copying = None
        return valid

    def digest(self) -> int:
        """Return a 63-bit digest of the values in this rank's shard."""
        return digest.digest((str(number), view) for number, view in enumerate(self._views))

    def hold(self) -> Callable[[], None]:
        """Keep this rank's shard unchanged. Until it is released, later commits are copied to other memory.

        Returns:
            A function that releases the shard. It may be called from any thread.
        """
        assert self._held_shard is None, "the shard is held already"
        self._held_shard = self._own
        return self._release_shard

    def _release_shard(self) -> None:
        held, self._held_shard = self._held_shard, None
        if held is not None and held is not self._own:
            self._spares.append(held)

    def _memory(self, size: int) -> torch.Tensor:
        with contextlib.suppress(IndexError):
            while True:
                spare = self._spares.pop()
                if len(spare) == size:
                    return peer_arena.keep(spare, self._number)
        resized = None if self._own is self._held_shard else peer_arena.resized(self._own, size)
        if resized is not None:
            return peer_arena.keep(resized, self._number)
        return peer_arena.allocate(size, self._number)

    def own_rows(self) -> dict[str, tuple[RowSpec, torch.Tensor]]:
        """Return the specification and this rank's rows of each tensor, by name."""
        found, views = {}, iter(self._views)
        shard = self._shard
        for tensor, (name, spec) in zip(self.layout.tensors, self.specs.items(), strict=True):
            some = len(self.layout.rows(tensor, shard)) * tensor.row_bytes
            found[name] = spec, next(views) if some else spec.local(0, torch.device("cpu"))
        return found

    @property
    def shard(self) -> int:
        """Return the index of this rank's shard."""
        return self._shard

    def where(self) -> tuple[int, int]:
        """Return the arena offset of this rank's shard, and its size in bytes. Both include the header.

        The offset is -1 if the shard is not in the arena.
        """
        return peer_arena.offset_of(self._own), len(self._own)

    def map_peer(self, shard: int, arena: PeerArena, offset: int, size: int) -> None:
        """Record the location of this shard of the commit in another process on this host."""
        self.peers.setdefault(shard, []).append((arena, arena.view(offset, size)))

    def lasting(self, commit: CommitId) -> list[int]:
        """Return the shards of the commit that are complete in the memory of other processes on this host.

        These processes may have been killed in the meantime, but their memory stays mapped.
        """
        self.peers = {
            shard: [each for each in there if peer_arena.is_whole(each[1], commit, shard)]
            for shard, there in self.peers.items()
        }
        return [shard for shard, there in self.peers.items() if there]

    def buffer(self, shard: int) -> torch.Tensor:
        """Return all bytes of a shard as a uint8 tensor, from this buffer or from another process on this host."""
        if shard == self._shard:
            return self._own[peer_arena.HEADER :]
        held = self._buffers.get(shard)
        return self.peers[shard][0][1][peer_arena.HEADER :] if held is None else held

    def rows(self, move: ReshardingMove) -> torch.Tensor:
        """Return the rows that a move sends, from a shard in this buffer, as a uint8 tensor."""
        tensor = self.layout.tensors[move.tensor]
        first = self.layout.rows(tensor, move.shard).begin
        if move.shard not in self.offsets:
            self.offsets[move.shard] = self.layout.offsets(move.shard)
        begin = self.offsets[move.shard][move.tensor] + (move.rows.begin - first) * tensor.row_bytes
        return self.buffer(move.shard)[begin : begin + len(move.rows) * tensor.row_bytes]
