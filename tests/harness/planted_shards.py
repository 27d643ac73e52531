"""Bugs to plant in the decisions about shards, each of a kind that a simulation must find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.sharding import copy_placement, resharding, shard_inventory
from elastic.sharding.copy_placement import Placement
from elastic.sharding.double_buffer import BufferState, DoubleBuffer
from elastic.sharding.resharding import ReshardingMove
from elastic.sharding.shard_inventory import Inventory, WholeCommit

# As they are, whatever a test puts in their place.
_newest_whole, _plan_moves, _place_copies = (
    shard_inventory.newest_whole,
    resharding.plan_moves,
    copy_placement.place_copies,
)


class WritesOverTheBase(DoubleBuffer):
    def _free(self) -> int:
        return 0 if self.base is None else self.base


class SealsBeforeItsMirror(DoubleBuffer):
    def copied(self) -> None:
        super().copied()
        self.newest_sealed = self.written().commit


class SealsWhatIsNotMirrored(DoubleBuffer):
    def sealed(self) -> None:
        record = self.banks[self.writing or 0]
        assert record is not None
        record.state = BufferState.MIRRORED
        super().sealed()


def takes_stale_shards(inventories: Sequence[Inventory]) -> WholeCommit | None:
    if not any(inventories):
        return None
    newest = max((each for held in inventories for each in held), key=lambda each: each.commit)
    return _newest_whole(
        [
            tuple(
                each._replace(commit=newest.commit) for each in held if each.shards == newest.shards
            )
            for held in inventories
        ]
    )


def counts_a_row_twice(*arguments: Any) -> list[ReshardingMove]:
    plan = _plan_moves(*arguments)
    return [*plan, plan[0]] if plan else plan


def copies_nothing_that_has_a_replica(
    order: Sequence[int], hosts: Sequence[str], copies: int, lasting: Sequence[bool], shards: int
) -> Placement:
    if len(order) > shards:
        return ((),) * shards
    return _place_copies(order, hosts, copies, lasting, shards)


def brings_rows_to_one_replica(*arguments: Any) -> list[ReshardingMove]:
    """The other one keeps those that it holds."""
    seen: set[tuple[int, int, Any]] = set()
    found = []
    for move in _plan_moves(*arguments):
        key = move.tensor, move.shard, move.rows
        if move.source == move.target or key not in seen:
            found.append(move)
            seen.add(key)
    return found


def takes_what_replicas_hold_for_what_copies_hold(
    inventories: Sequence[Inventory],
) -> WholeCommit | None:
    """A commit counts as whole as soon as one row of the mesh would be full."""
    newest = max(each.commit for held in inventories for each in held)
    held = [tuple(each for each in held if each.commit == newest) for held in inventories]
    shards = next(each.shards for each in sum(held, ()))
    if len([each for each in held if each]) < shards:
        return _newest_whole(inventories)
    holders = [tuple(rank for rank, each in enumerate(held) if each)] * shards
    return WholeCommit(newest, shards, tuple(holders), (None,) * shards)


def sends_from_a_rank_of_another_shard(column: Sequence[int], shard: int) -> int:
    return 0


def copies_on_the_owners_host(
    order: Sequence[int], hosts: Sequence[str], copies: int, lasting: Sequence[bool], shards: int
) -> Placement:
    """As if all ranks were on one host."""
    return _place_copies(order, ["h"] * len(hosts), copies, lasting, shards)
