"""Selection of the commit that all ranks restore: the newest one of which every shard is held by some rank.

Pure: no I/O, no clock.

Different ranks may hold the shards of a commit, as owners or as copies. If any rank has sealed a commit, the commit is
mirrored on all ranks. A commit that is not mirrored on all ranks may still be complete, but has fewer copies than
requested. It is chosen only if no mirrored commit is complete.

The initial state (generation 0) may differ between the replicas of a shard. For each of its shards, one holder is
therefore chosen, which sends the shard to the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CommitId(NamedTuple):
    """Identity of a commit. Newer commits compare greater. ``number`` counts the commits of a generation."""

    generation: int
    number: int


class HeldShard(NamedTuple):
    """Complete shard of a commit in the memory of one rank.

    Attributes:
        hosts: hosts that held each shard of the commit, the owner's host first.
        mirrored: whether the rank also holds all copies of other shards that it must keep.
    """

    commit: CommitId
    shards: int
    shard: int
    own: bool
    hosts: tuple[tuple[str, ...], ...] = ()
    mirrored: bool = True


Inventory = tuple[HeldShard, ...]  # all complete shards that one rank holds


@dataclass(frozen=True)
class WholeCommit:
    """Commit whose shards are all held by some rank.

    Args:
        holders: ranks that hold each shard.
        owners: rank that owned each shard, or None if it was lost.
    """

    commit: CommitId
    shards: int
    holders: tuple[tuple[int, ...], ...]
    owners: tuple[int | None, ...]

    def ranks(self) -> list[int]:
        """Return the ranks that hold at least one shard. They also hold the replicated values."""
        return sorted({rank for ranks in self.holders for rank in ranks})


@dataclass(frozen=True)
class LostShard:
    """Shard of the newest commit that no rank holds any more.

    Args:
        hosts: hosts that held the shard.
    """

    commit: CommitId
    shard: int
    shards: int
    hosts: tuple[str, ...]


def newest_whole(inventories: Sequence[Inventory]) -> WholeCommit | None:
    """Return the newest commit whose shards are all held by some rank, or None.

    Args:
        inventories: shards that each rank holds, in rank order.
    """
    commits = _commits(inventories)
    mirrored = [commit for commit in commits if _mirrored(inventories, commit)]
    for commit in (*mirrored, *commits):
        found = _holders(inventories, commit)
        if all(found):
            owners: list[int | None] = [None] * len(found)
            for rank, inventory in enumerate(inventories):
                for each in inventory:
                    if each.commit == commit and each.own:
                        owners[each.shard] = rank
            if commit.generation == 0:
                found = [ranks[:1] for ranks in found]
            return WholeCommit(commit, len(found), tuple(found), tuple(owners))
    return None


def lost_shards(inventories: Sequence[Inventory]) -> list[LostShard]:
    """Return the shards of the newest commit that no rank holds.

    This function is called if `newest_whole` returns None.
    """
    for commit in _commits(inventories):
        held = [each for inventory in inventories for each in inventory if each.commit == commit]
        hosts = max((each.hosts for each in held), key=len)
        return [
            LostShard(commit, shard, held[0].shards, hosts[shard] if shard < len(hosts) else ())
            for shard, ranks in enumerate(_holders(inventories, commit))
            if not ranks
        ]
    return []


def _mirrored(inventories: Sequence[Inventory], commit: CommitId) -> bool:
    return all(each.mirrored for held in inventories for each in held if each.commit == commit)


def _commits(inventories: Sequence[Inventory]) -> list[CommitId]:
    return sorted({each.commit for held in inventories for each in held}, reverse=True)


def _holders(inventories: Sequence[Inventory], commit: CommitId) -> list[tuple[int, ...]]:
    held = [
        (not each.own, rank, each)
        for rank, inventory in enumerate(inventories)
        for each in inventory
        if each.commit == commit
    ]
    found: list[tuple[int, ...]] = [() for _ in range(held[0][2].shards)]
    for _, rank, each in sorted(held):
        if rank not in found[each.shard]:
            found[each.shard] = (*found[each.shard], rank)
    return found
