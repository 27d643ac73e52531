"""Reports of a rank to the driver about the shards that it holds, and its rows in a new world.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import msgspec

from elastic.protocol.messages import Commit, HeldCommitShards, RowBytes, ShardsHeld, ShardsPlaced
from elastic.sharding.resharding import ReshardingMove, move_bytes, travelling
from elastic.sharding.row_layout import ShardLayout
from elastic.sharding.shard_inventory import CommitId, HeldShard, Inventory, WholeCommit

ORIGINS = RowBytes.__struct_fields__


def as_commit(commit: CommitId) -> Commit:
    return Commit(commit.generation, commit.number)


def as_held(inventory: Inventory, copies: int, sealed: CommitId | None) -> ShardsHeld:
    """Return the report of the shards that a rank holds while it waits for a world.

    Args:
        inventory: shards that the rank holds.
        copies: number of copies of each shard on other hosts, as configured in the state.
        sealed: newest commit whose seal the rank has recorded.
    """
    by_commit: dict[CommitId, list[HeldShard]] = defaultdict(list)
    for each in inventory:
        by_commit[each.commit].append(each)
    return ShardsHeld(
        copies,
        None if sealed is None else as_commit(sealed),
        tuple(
            HeldCommitShards(
                as_commit(commit),
                held[0].shards,
                next((each.shard for each in held if each.own), None),
                tuple(sorted(each.shard for each in held if not each.own)),
                any(each.own and each.mirrored for each in held),
            )
            for commit, held in sorted(by_commit.items())
        ),
    )


def as_placed(
    part: ShardsPlaced,
    whole: WholeCommit,
    moves: Sequence[ReshardingMove],
    layout: ShardLayout,
    rank: int,
    hosts: Sequence[str],
    memory: Collection[int],
) -> ShardsPlaced:
    """Return a rank's report on its shard in a new world, including the sources of its rows.

    Args:
        part: report without the sources of the rows.
        whole: restored commit.
        moves: moves of all ranks.
        layout: layout of the commit.
        rank: rank that reports.
        hosts: host of each rank.
        memory: shards of the commit that are in the rank's own memory.
    """
    lost = tuple(shard for shard, owner in enumerate(whole.owners) if owner is None)
    found, of_lost = dict.fromkeys(ORIGINS, 0), dict.fromkeys(ORIGINS, 0)
    for move in moves:
        if move.target != rank:
            continue
        if move.source == rank and move.shard in memory:
            origin = "memory"
        else:
            origin = "host" if hosts[move.source] == hosts[rank] else "network"
        found[origin] += move_bytes(move, layout)
        of_lost[origin] += move_bytes(move, layout) if move.shard in lost else 0
    return msgspec.structs.replace(
        part,
        restored=as_commit(whole.commit),
        rows=RowBytes(**found),
        received=travelling(moves, layout, rank),
        lost=lost,
        lost_rows=RowBytes(**of_lost),
    )
