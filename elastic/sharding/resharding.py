"""Plan for moving a commit's shards to the ranks of another world while sending few bytes. Pure: no I/O, no clock.

Rows that a rank already holds, as an owner or as a copy, are not sent. All other rows are sent by a rank on the same
host if possible, and otherwise by that holder of the rows that has the fewest bytes to send so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elastic.sharding.device_mesh import columns
from elastic.sharding.row_layout import Rows, ShardedTensor, ShardLayout, overlap, owners, pieces
from elastic.sharding.shard_inventory import WholeCommit


class ReshardingMove(NamedTuple):
    """Move of rows of a tensor from a shard on rank ``source`` to rank ``target``.

    If both are the same rank, no data is sent.
    """

    tensor: int  # index of the tensor in the layout
    shard: int  # index of the commit's shard that contains the rows
    rows: Rows
    source: int
    target: int


def order_of_shards(whole: WholeCommit, tensors: Sequence[ShardedTensor], size: int) -> list[int]:
    """Return the rank that gets each shard in a world of this size.

    If the number of shards is unchanged, each rank keeps a shard that it owns or has a copy of, and ranks without one
    get the remaining shards. If the number changes, shards are assigned in rank order.
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
    """Return the rank at each position of a mesh of replicas by ``shards``.

    Candidate orders are compared by these criteria, in descending priority: more hosts with replicas of each shard (up
    to 1 + ``copies``, because every commit has to send the missing copies), fewer bytes to move, and ranks in ascending
    order.
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
    """Return the moves through which every rank gets every row of its new shard exactly once.

    Args:
        whole: commit to redistribute, with the ranks that hold its shards.
        tensors: tensors in the commit's layout.
        order: rank at each position of the new mesh of replicas by shards.
        hosts: host of each rank.
        limit: maximum size of a move in bytes. A move of a single row may be larger.
        shards: number of shards of the new mesh (default: each rank has its own shard).
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
    """Group the moves between different ranks into rounds, in their order.

    The moves of a round have at most ``limit`` bytes in total, unless the round is a single larger move.
    """
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


def travelling(
    moves: Sequence[ReshardingMove], layout: ShardLayout, target: int | None = None
) -> int:
    """Return the number of bytes that the moves send to other ranks.

    Args:
        moves: moves of all ranks.
        layout: layout of the commit.
        target: rank whose received bytes are counted (default: all ranks).
    """
    sent = (move for move in moves if move.source != move.target)
    return sum(move_bytes(move, layout) for move in sent if target in (None, move.target))
