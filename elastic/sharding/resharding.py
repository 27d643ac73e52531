"""Plans how shards of a commit become those of another world with the fewest bytes. Pure; the same on every rank.

Rows that a rank holds already, as an owner or as a copy, don't travel. The others come from a rank of the same host, if
one has them, and else from the one that sends least so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elastic.sharding.device_mesh import columns
from elastic.sharding.rows import Rows, ShardedTensor, ShardLayout, overlap, owners, pieces
from elastic.sharding.shard_inventory import WholeCommit


class ReshardingMove(NamedTuple):
    """Rows of one tensor: from a shard of the commit that ``source`` holds to ``target``. The same rank: no travel."""

    tensor: int  # its index in the layout
    shard: int  # of the commit
    rows: Rows
    source: int
    target: int


def order_of_shards(whole: WholeCommit, tensors: Sequence[ShardedTensor], size: int) -> list[int]:
    """The rank of each shard in a world of this size.

    Where the number of shards stays, each rank keeps the shard that it owns, or else has a copy of, and whoever holds
    none takes one that is left: only that one travels. Where it changes, ranks keep their order.
    """
    if whole.shards != size:
        return list(range(size))
    order: list[int | None] = list(whole.owners)
    free: set[int | None] = {*range(size)} - {*order}
    for shard, ranks in enumerate(whole.holders):
        if order[shard] is None:
            order[shard] = next((rank for rank in ranks if rank in free), None)
            free -= {order[shard]}
    left = iter(sorted(rank for rank in free if rank is not None))
    return [next(left) if rank is None else rank for rank in order]


def order_of_replicas(
    whole: WholeCommit,
    tensors: Sequence[ShardedTensor],
    hosts: Sequence[str],
    shards: int,
    copies: int,
) -> list[int]:
    """The rank at each place of a mesh of replicas by ``shards``, in a world with these hosts of its ranks.

    Of a few orders, the one taken has the replicas of each shard on the most hosts, up to 1 + ``copies``, since every
    commit sends what is missing there; among these, the one that moves the fewest bytes, and ranks that are in order.
    """
    size = len(hosts)
    wanted = _bytes_in_common(whole, tensors, shards)
    has = [[0] * shards for _ in range(size)]
    for old, ranks in enumerate(whole.holders):
        for rank in ranks:
            for new, common in wanted[old].items():
                has[rank][new] += common

    def merit(order: Sequence[int]) -> tuple[int, int]:
        spread = sum(
            min(1 + copies, len({hosts[rank] for rank in column}))
            for column in columns(order, shards)
        )
        kept = sum(has[rank][shard] for rank, shard in owners(order, shards).items())
        return spread, kept

    apart = [_assign(has, hosts, shards, distinct) for distinct in (1, 1 + copies)]
    return max([list(range(size)), *apart], key=merit)


def _bytes_in_common(
    whole: WholeCommit, tensors: Sequence[ShardedTensor], shards: int
) -> list[Counter[int]]:
    """By shard of the commit, the bytes that it has in common with new ones."""
    found: list[Counter[int]] = [Counter() for _ in range(whole.shards)]
    for tensor in tensors:
        for new in range(shards):
            wanted = tensor.rows_of(new, shards)
            for old in tensor.shards_with(wanted, whole.shards):
                common = overlap(tensor.rows_of(old, whole.shards), wanted)
                found[old][new] += len(common) * tensor.row_bytes
    return found


def _assign(
    has: Sequence[Sequence[int]], hosts: Sequence[str], shards: int, distinct: int
) -> list[int]:
    """Each rank to a shard of which it has much, the largest first. The first ``distinct`` ranks of a shard are on
    hosts of their own, as far as possible.
    """
    size = len(hosts)
    found: list[list[int]] = [[] for _ in range(shards)]
    pairs = sorted(
        ((rank, shard) for rank in range(size) for shard in range(shards)),
        key=lambda pair: -has[pair[0]][pair[1]],
    )
    free = set(range(size))
    for anywhere in (False, True):
        for rank, shard in pairs:
            if rank not in free or len(found[shard]) == size // shards:
                continue
            used = {hosts[each] for each in found[shard]}
            if anywhere or hosts[rank] not in used or len(used) >= distinct:
                found[shard].append(rank)
                free.remove(rank)
    return [rank for row in zip(*map(sorted, found), strict=True) for rank in row]


def plan_moves(
    whole: WholeCommit,
    tensors: Sequence[ShardedTensor],
    order: Sequence[int],
    hosts: Sequence[str],
    limit: int,
    shards: int | None = None,
) -> list[ReshardingMove]:
    """Every row of every new shard once, for each rank that is to hold it.

    Args:
        whole: the commit, and which rank holds which of its shards.
        tensors: of its layout.
        order: the rank at each place of the new mesh of replicas by shards.
        hosts: of each rank.
        limit: bytes of a move, or one row.
        shards: of the new mesh. Default: each rank has a shard of its own.
    """
    shards = shards or len(order)
    shard_of = owners(order, shards)
    sends: Counter[int] = Counter()
    found = []
    for number, tensor in enumerate(tensors):
        for target in sorted(shard_of):
            wanted = tensor.rows_of(shard_of[target], shards)
            for shard in tensor.shards_with(wanted, whole.shards):
                common = overlap(tensor.rows_of(shard, whole.shards), wanted)
                source = _source(whole.holders[shard], target, hosts, sends)
                if source != target:
                    sends[source] += len(common) * tensor.row_bytes
                found += [
                    ReshardingMove(number, shard, piece, source, target)
                    for piece in pieces(common, tensor.row_bytes, limit)
                ]
    return found


def _source(holders: Sequence[int], target: int, hosts: Sequence[str], sends: Counter[int]) -> int:
    if target in holders:
        return target
    return min(holders, key=lambda rank: (hosts[rank] != hosts[target], sends[rank], rank))


def rounds(
    moves: Sequence[ReshardingMove], layout: ShardLayout, limit: int
) -> Iterator[list[ReshardingMove]]:
    """Those that travel, in order, so that no more than ``limit`` bytes are under way at once, or one move."""
    found: list[ReshardingMove] = []
    size = 0
    for move in moves:
        if move.source == move.target:
            continue
        nbytes = move_bytes(move, layout)
        if found and size + nbytes > limit:
            yield found
            found, size = [], 0
        found.append(move)
        size += nbytes
    if found:
        yield found


def move_bytes(move: ReshardingMove, layout: ShardLayout) -> int:
    return len(move.rows) * layout.tensors[move.tensor].row_bytes


def travelling(moves: Sequence[ReshardingMove], layout: ShardLayout) -> int:
    """Bytes that go from one rank to another."""
    return sum(move_bytes(move, layout) for move in moves if move.source != move.target)
