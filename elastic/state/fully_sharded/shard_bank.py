"""The host memory of one bank: this rank's shard, copies of other ranks' shards, and what is replicated. Acts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.collectives.shared_memory.host_copy import HostCopy
from elastic.sharding.moves import Move
from elastic.sharding.rows import ShardedTensor, ShardLayout
from elastic.state.fully_sharded.live_shards import LiveShard, RowSpec
from elastic.state.snapshots.snapshot import Snapshot


def as_layout(specs: dict[str, RowSpec], shards: int) -> ShardLayout:
    return ShardLayout(
        tuple(
            ShardedTensor(name, spec.shape[0] if spec.shape else 1, spec.row_bytes)
            for name, spec in specs.items()
        ),
        shards,
    )


class ShardBank:
    """Buffers are made once, and again only where sizes change. ``values``: what the state keeps besides."""

    def __init__(self) -> None:
        self.snapshots: dict[str, Snapshot] = {}  # of what is replicated, by part
        self.values: Any = None
        self.specs: dict[str, RowSpec] = {}
        self.layout = ShardLayout((), 1)
        self.offsets: dict[int, list[int]] = {}  # by shard
        self._buffers: dict[int, torch.Tensor] = {}  # uint8, by shard
        self._views: list[torch.Tensor] = []
        self._viewed: tuple[Any, ...] = ()
        self._host = HostCopy([], [])

    def arrange(self, shards: dict[str, LiveShard], count: int, held: Sequence[int]) -> None:
        """For these tensors, divided into ``count`` shards of which it holds ``held``, this rank's first."""
        specs = {name: each.spec for name, each in shards.items()}
        if specs != self.specs or count != self.layout.shards:
            self.specs, self.layout = specs, as_layout(specs, count)
        self.offsets = {shard: self.layout.offsets(shard) for shard in held}
        free = [buffer for shard, buffer in self._buffers.items() if shard not in held]
        kept = {s: b for s, b in self._buffers.items() if s in held}
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

    def copy(self, shards: dict[str, LiveShard], shard: int) -> int:
        """This rank's shard into the bank. Complete when it returns. Returns its bytes."""
        tensors = [each.local.detach() for each in shards.values() if each.local.numel()]
        buffer = self._buffers[shard]
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
            else:
                torch._foreach_copy_(self._views, tensors)
        return sum(each.nbytes for each in tensors)

    def own_rows(self) -> dict[str, tuple[RowSpec, torch.Tensor]]:
        """This rank's rows of each tensor."""
        found, views = {}, iter(self._views)
        shard = next(iter(self.offsets))
        for tensor, (name, spec) in zip(self.layout.tensors, self.specs.items(), strict=True):
            some = len(self.layout.rows(tensor, shard)) * tensor.row_bytes
            found[name] = spec, next(views) if some else spec.local(0, torch.device("cpu"))
        return found

    def buffer(self, shard: int) -> torch.Tensor:
        """uint8, all bytes of a shard that this bank holds."""
        return self._buffers[shard]

    def rows(self, move: Move) -> torch.Tensor:
        """uint8: the rows of a move, of a shard that this bank holds."""
        tensor = self.layout.tensors[move.tensor]
        first = self.layout.rows(tensor, move.shard).begin
        begin = self.offsets[move.shard][move.tensor] + (move.rows.begin - first) * tensor.row_bytes
        return self._buffers[move.shard][begin : begin + len(move.rows) * tensor.row_bytes]
