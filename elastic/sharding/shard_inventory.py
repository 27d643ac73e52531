"""Decides which commit all ranks go back to: the newest of which every shard is held by some rank. Pure.

A commit's shards may be held by different ranks, as owners or as copies. A commit that was sealed on one rank is
mirrored on all of them. One that is not was never sealed: it may be whole all the same, but with fewer copies than were
asked for, so that it is only taken where no other is whole.

What a training begins with may differ between replicas of a shard: those of generation 0 have one holder each, from
which the others receive it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CommitId(NamedTuple):
    """Ordered by age. ``number`` counts the commits of one generation, on all ranks alike."""

    generation: int
    number: int


class HeldShard(NamedTuple):
    """A whole shard of one commit that a rank has in memory. ``hosts``: where each shard was, its owner's first.
    ``mirrored``: the rank has all copies of other shards, too, that it is to keep.
    """

    commit: CommitId
    shards: int
    shard: int
    own: bool
    hosts: tuple[tuple[str, ...], ...] = ()
    mirrored: bool = True


Inventory = tuple[HeldShard, ...]  # of one rank


@dataclass(frozen=True)
class WholeCommit:
    """``holders``: the ranks that have each shard. ``owners``: the rank that trained it, if it is still there."""

    commit: CommitId
    shards: int
    holders: tuple[tuple[int, ...], ...]
    owners: tuple[int | None, ...]

    def ranks(self) -> list[int]:
        """That hold at least one shard, and with it what is replicated."""
        return sorted({rank for ranks in self.holders for rank in ranks})


@dataclass(frozen=True)
class LostShard:
    """A shard of the newest commit that no rank holds. ``hosts``: where it was."""

    commit: CommitId
    shard: int
    shards: int
    hosts: tuple[str, ...]


def newest_whole(inventories: Sequence[Inventory]) -> WholeCommit | None:
    """``inventories``: what each rank holds. None: of no commit all shards are held."""
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
    """Of the newest commit, where `newest_whole` finds none."""
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
    """On all ranks that are left of those that have made it."""
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
