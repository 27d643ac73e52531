"""Steps of one rank in collectives over several hosts. Each call returns when its result is in place.

Only one thread at a time calls the methods of `Steps`. All ranks of a host start the same collectives in the same
order, as do all ranks of an inter-node group. See `plan` for the carriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from elastic.collectives.hierarchical import plan
from elastic.collectives.hierarchical.part import GroupPart
from elastic.collectives.hierarchical.plan import Exchange, Parcel, Topology, Turn
from elastic.collectives.interface import Collectives, Op, Work
from elastic.collectives.shared_memory import arena
from elastic.errors import CollectiveFailed

# Part of a chunk that one rank sends between hosts at a time, in bytes; large enough to keep the network busy. 2 MiB
# was faster than 0.5 and 1 MiB (25 MiB tensor, two hosts with two ranks each, single runs on a busy machine).
SHARE_BYTES = 1 << 21
LEADER_BYTES = 1 << 22  # part of a chunk that a leader sends between hosts at a time, in bytes
SMALL_BYTES = 1 << 15  # minimum size in bytes of a tensor that is divided into chunks
_COPIES = plan.AHEAD + 2  # number of chunks in flight at once

_HALF = (torch.float16, torch.bfloat16)


class Scale(NamedTuple):
    """Scale and divisor of a reduction, as in `Collectives.allreduce`."""

    scale: float = 1.0
    divisor: int = 1


class Halves(Collectives, Protocol):
    """Interface of a group of one host that can run an allreduce in two halves.

    Each rank owns a share of the flat tensor in the arena.
    """

    def reduce_shares(
        self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1
    ) -> Work:
        """Run the first half of an allreduce: replace the share of every rank by the reduction."""

    def spread_shares(self, tensor: torch.Tensor) -> Work:
        """Run the second half of an allreduce: copy the share of every rank to all ranks of the host."""

    def share(self, elements: int, dtype: torch.dtype) -> slice:
        """Return the elements that this rank owns. The result may be empty."""


class Steps:
    """Steps of one rank in collectives over several hosts.

    Args:
        halves: group of this host's ranks, or None if hosts have different numbers of ranks.
        wire: group between hosts, or None if the leader of this host sends for this rank.
    """

    def __init__(
        self, topology: Topology, host: GroupPart, wire: GroupPart | None, halves: Halves | None
    ) -> None:
        self._topology = topology
        self._host = host
        self._wire = wire
        self._halves = halves
        # arena memory for copies of chunks that are not in the arena
        self.copies: torch.Tensor | None = None

    # ---- allreduce -------------------------------------------------------------------------------------------------

    def allreduce(self, flat: torch.Tensor, op: Op, scale: Scale) -> None:
        if flat.numel() == 0:
            return
        if not self._topology.even:
            self._reduce_by_leaders(flat, op, scale)
        elif flat.nbytes <= SMALL_BYTES:
            self._reduce_small(flat, op, scale)
        else:
            self._reduce_by_shares(flat, op, scale)

    def _reduce_small(self, flat: torch.Tensor, op: Op, scale: Scale) -> None:
        # Scale before the network, because a half-precision sum of unscaled tensors could overflow there.
        adds = op in (Op.SUM, Op.PRODUCT)
        wide = flat.float() if adds and flat.dtype in _HALF else flat
        assert self._wire is not None
        self._wire.run(self._wire.group.allreduce, wide, op)
        self._host.run(self._host.group.allreduce, wide, op, *scale)
        if wide is not flat:
            flat.copy_(wide)

    def _reduce_by_shares(self, flat: torch.Tensor, op: Op, scale: Scale) -> None:
        host, wire, halves = self._host, self._wire, self._halves
        assert wire is not None and halves is not None
        before, after = _scales(flat.dtype, op, scale)
        chunk_bytes = SHARE_BYTES * len(self._topology.local_ranks)
        spans = plan.chunks(flat.numel(), flat.element_size(), chunk_bytes)
        pieces = [flat[begin:end] for begin, end in spans]
        shared = pieces if _in_arena(flat) else self._copies_of(pieces, chunk_bytes)
        reducing: dict[int, Work] = {}
        crossing: dict[int, Work] = {}
        spreading: dict[int, Work] = {}

        def conclude(number: int) -> None:
            host.finish(spreading.pop(number))
            if shared is not pieces:
                pieces[number].copy_(shared[number])

        for turn, number in plan.schedule(len(spans)):
            match turn:
                case Turn.REDUCE:
                    if number >= _COPIES:
                        conclude(number - _COPIES)
                    if shared is not pieces:
                        shared[number].copy_(pieces[number])
                    reducing[number] = host.begin(halves.reduce_shares, shared[number], op, *before)
                case Turn.CROSS:
                    host.finish(reducing.pop(number))
                    chunk = shared[number]
                    share = chunk[halves.share(chunk.numel(), chunk.dtype)]
                    if share.numel() > 0:
                        crossing[number] = wire.begin(wire.group.allreduce, share, op, *after)
                case Turn.SPREAD:
                    if number in crossing:
                        wire.finish(crossing.pop(number))
                    spreading[number] = host.begin(halves.spread_shares, shared[number])
        for number in list(spreading):
            conclude(number)

    def _reduce_by_leaders(self, flat: torch.Tensor, op: Op, scale: Scale) -> None:
        host, wire = self._host, self._wire
        before, after = _scales(flat.dtype, op, scale)
        spans = plan.chunks(flat.numel(), flat.element_size(), LEADER_BYTES)
        pieces = [flat[begin:end] for begin, end in spans]
        reducing: dict[int, Work] = {}
        crossing: dict[int, Work] = {}
        spreading: list[Work] = []
        for turn, number in plan.schedule(len(spans)):
            piece = pieces[number]
            match turn:
                case Turn.REDUCE:
                    reducing[number] = host.begin(host.group.allreduce, piece, op, *before)
                case Turn.CROSS if wire is not None:
                    host.finish(reducing.pop(number))
                    crossing[number] = wire.begin(wire.group.allreduce, piece, op, *after)
                case Turn.SPREAD:
                    if wire is not None:
                        wire.finish(crossing.pop(number))
                    spreading.append(host.begin(host.group.broadcast, piece, 0))
        for work in spreading:
            host.finish(work)

    def _copies_of(self, pieces: Sequence[torch.Tensor], chunk_bytes: int) -> list[torch.Tensor]:
        if self.copies is None:
            own = arena.mine()
            self.copies = None if own is None else own.tensor(_COPIES * chunk_bytes, torch.uint8)
        if self.copies is None:
            raise CollectiveFailed(
                "the shared memory of this host's ranks is full: keep fewer gradient tensors alive, or start the job"
                " with ELASTIC_NATIVE=0"
            )
        places = self.copies.view(_COPIES, chunk_bytes)
        return [
            places[number % _COPIES, : piece.nbytes].view(piece.dtype)
            for number, piece in enumerate(pieces)
        ]

    # ---- other collectives -----------------------------------------------------------------------------------------

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Broadcast ``flat``, a flat tensor of bytes, from rank ``root`` in place."""
        host, wire = self._host, self._wire
        route = plan.route(self._topology, root)
        spans = plan.chunks(flat.numel(), 1, LEADER_BYTES)
        pieces = [flat[begin:end] for begin, end in spans]
        crossing: dict[int, Work] = {}
        moving: list[Work] = []
        for turn, number in plan.schedule(len(spans)):
            piece = pieces[number]
            match turn:
                case Turn.REDUCE if route.first is not None:
                    moving.append(host.begin(host.group.broadcast, piece, route.first))
                case Turn.CROSS if route.cross is not None and wire is not None:
                    if route.first is not None:
                        host.finish(moving[number])
                    crossing[number] = wire.begin(wire.group.broadcast, piece, route.cross)
                case Turn.SPREAD:
                    if wire is not None and number in crossing:
                        wire.finish(crossing.pop(number))
                    if route.last is not None:
                        moving.append(host.begin(host.group.broadcast, piece, route.last))
        for work in moving:
            host.finish(work)

    def allgather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of every rank, by rank. ``flat`` is this rank's flat tensor of bytes."""
        topology, host, wire = self._topology, self._host, self._wire
        length = flat.numel()
        if length == 0:
            return [flat] * topology.size
        if topology.even:
            assert wire is not None
            column = flat.new_empty(len(topology.hosts), length)
            wire.run(wire.group.allgather, list(column), flat)
            columns = column.new_empty(len(topology.local_ranks), *column.shape)
            host.run(host.group.allgather, list(columns.flatten(1)), column.flatten())
            return [columns[i, h] for h, i in map(topology.of, range(topology.size))]
        rows = [flat.new_empty(len(ranks), length) for ranks in topology.hosts]
        host.run(host.group.allgather, list(rows[topology.host]), flat)
        if wire is not None:
            crossing = [
                wire.begin(wire.group.broadcast, row.flatten(), number)
                for number, row in enumerate(rows)
            ]
            for work in crossing:
                wire.finish(work)
        for number, row in enumerate(rows):
            if number != topology.host:
                host.run(host.group.broadcast, row.flatten(), 0)
        return [rows[h][i] for h, i in map(topology.of, range(topology.size))]

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        """Exchange rows. The carriers need all row counts, so these are gathered first."""
        topology = self._topology
        own = torch.tensor(sent, dtype=torch.int64, device="cpu").view(torch.uint8)
        table = [row.view(torch.int64).tolist() for row in self.allgather(own)]
        posting = plan.posting(topology)
        parcels = {(topology.rank, to): rows for to, rows in enumerate(torch.split(tensor, sent))}
        for part, exchange in (
            (self._host, posting.collect),
            (self._wire, posting.cross),
            (self._host, posting.deal),
        ):
            if part is not None and exchange is not None:
                parcels = _exchanged(part, exchange, parcels, table, tensor)
        output.copy_(torch.cat([parcels[sender, topology.rank] for sender in range(topology.size)]))

    def barrier(self) -> None:
        """Wait until all ranks have called this method. This method takes two steps if every rank is a carrier.

        When a rank has passed its inter-node barrier, all ranks of every host have arrived.
        """
        host, wire = self._host, self._wire
        if not self._topology.even:
            host.run(host.group.barrier)
        if wire is not None:
            wire.run(wire.group.barrier)
        host.run(host.group.barrier)


def _exchanged(
    part: GroupPart,
    exchange: Exchange,
    parcels: dict[Parcel, torch.Tensor],
    table: list[list[int]],
    like: torch.Tensor,
) -> dict[Parcel, torch.Tensor]:
    sent = [parcels[parcel] for peer in exchange.sent for parcel in peer]
    coming = [parcel for peer in exchange.received for parcel in peer]
    lengths = [table[sender][receiver] for sender, receiver in coming]
    rows = torch.cat(sent) if sent else like[:0]
    output = like.new_empty(sum(lengths), *like.shape[1:])
    part.run(
        part.group.alltoall,
        output,
        rows,
        [sum(table[s][r] for s, r in peer) for peer in exchange.received],
        [sum(table[s][r] for s, r in peer) for peer in exchange.sent],
    )
    return dict(zip(coming, torch.split(output, lengths), strict=True))


def _scales(dtype: torch.dtype, op: Op, scale: Scale) -> tuple[Scale, Scale]:
    """Return the scales to apply before and after the network.

    A half-precision sum is scaled before, to avoid overflow.
    """
    return (scale, Scale()) if op is Op.SUM and dtype in _HALF else (Scale(), scale)


def _in_arena(tensor: torch.Tensor) -> bool:
    own = arena.mine()
    return own is not None and own.offset_of(tensor.data_ptr(), tensor.nbytes) is not None
