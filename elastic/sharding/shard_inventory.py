"""Selection of the commit that all ranks restore: the newest commit of which every shard is held by some rank.

Pure: no I/O, no clock.

Different ranks may hold the shards of a commit, as owners or as copies. A commit that was sealed on any rank is
mirrored on all ranks. A commit that is not mirrored on all ranks may still be complete, but with fewer copies than
requested, so it is chosen only if no mirrored commit is complete.

The initial state (generation 0) may differ between the replicas of a shard. Each of its shards therefore has a single
holder, which sends it to the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CommitId(NamedTuple):
    """Identifier of a commit. Newer commits compare greater. ``number`` counts the commits of a generation."""

    generation: int
    number: int


class HeldShard(NamedTuple):
    """Complete shard of one commit in the memory of a rank.

    Attributes:
        hosts: for each shard of the commit, the hosts that held the shard. The owner's host comes first.
        mirrored: whether the rank also has all copies of other shards that the rank has to keep.
    """

    commit: CommitId
    shards: int
    shard: int
    own: bool
    hosts: tuple[tuple[str, ...], ...] = ()
    mirrored: bool = True


Inventory = tuple[HeldShard, ...]  # the complete shards of one rank


@dataclass(frozen=True)
class WholeCommit:
    """Commit of which all shards are held by some rank.

    Args:
        holders: for each shard, the ranks that have the shard.
        owners: for each shard, the rank that trained the shard, if alive.
    """

    commit: CommitId
    shards: int
    holders: tuple[tuple[int, ...], ...]
    owners: tuple[int | None, ...]

    def ranks(self) -> list[int]:
        """Return the ranks with at least one shard. These ranks also hold the replicated values."""
        return sorted({rank for ranks in self.holders for rank in ranks})


@dataclass(frozen=True)
class LostShard:
    """Shard of the newest commit that no rank holds.

    Args:
        hosts: the hosts that held the shard.
    """

    commit: CommitId
    shard: int
    shards: int
    hosts: tuple[str, ...]


def newest_whole(inventories: Sequence[Inventory]) -> WholeCommit | None:
    """Return the newest complete commit, or None.

    Args:
        inventories: the shards that each rank holds.
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
    """Return the missing shards of the newest commit if `newest_whole` finds none."""
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
