"""Ranks with banks, copies and seals, on made-up memory, of which some are lost between any two steps of any rank.

What decides is the product's. No sealed commit may be lost while no more ranks are lost since its seal than there are
copies; what ranks train on after that are the rows of one commit, each once. In some jobs each rank has a shard of its
own, in others there are replicas of shards. Planted bugs have to be found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.sharding import copy_placement, device_mesh, resharding, shard_inventory
from elastic.sharding.copy_placement import Placement, copied_to
from elastic.sharding.device_mesh import MeshShape, columns, sender
from elastic.sharding.double_buffer import BufferRecord, DoubleBuffer
from elastic.sharding.resharding import ReshardingMove
from elastic.sharding.row_layout import ShardedTensor, owners
from elastic.sharding.shard_inventory import CommitId, Inventory, WholeCommit
from elastic.sharding.zero_partition import Partition, PartitionedTensor
from harness.planted_shards import (
    SealsWhatIsNotMirrored,
    WritesOverTheBase,
    brings_rows_to_one_replica,
    copies_nothing_that_has_a_replica,
    counts_a_row_twice,
    sends_from_a_rank_of_another_shard,
    takes_stale_shards,
    takes_what_replicas_hold_for_what_copies_hold,
)

WHOLE = Partition(((6, 2, 4), (5,)))
TENSORS = (
    ShardedTensor("weight", 7, 8),
    ShardedTensor("bias", 1, 4),
    ShardedTensor("odd", 5, 3),
    *(PartitionedTensor(f"{n}.m", 3, 4, partition=WHOLE, number=n) for n in range(4)),
)
TICKS = 400
Content = dict[tuple[int, int], int]  # by tensor and row, the step that it belongs to
Script = Generator[None, None, None]


class PeerGone(Exception):
    pass


class Broken(Exception):
    """An invariant."""


@dataclass(eq=False)
class SimulatedRank:
    host: str
    cycle: DoubleBuffer
    memory: tuple[dict[int, Content], dict[int, Content]] = field(default_factory=lambda: ({}, {}))
    steps: list[int] = field(default_factory=lambda: [0, 0])  # that each bank's commit is of
    live: Content = field(default_factory=dict)
    step: int = 0
    alive: bool = True


class SimulatedWorld:
    """One generation. A collective is over for a rank once all have called it; never if one is lost before."""

    def __init__(self, generation: int, ranks: list[SimulatedRank]) -> None:
        self.generation = generation
        self.ranks = ranks
        self.hosts = [each.host for each in ranks]
        self.number = 0
        self.order: list[int] = []
        self.shards = 0
        self.placement: Placement = ()
        self._called: dict[Any, dict[SimulatedRank, Any]] = {}

    def follow(self, order: list[int], shards: int, placement: Placement) -> None:
        self.order, self.shards, self.placement = order, shards, placement

    def call(self, key: Any, rank: SimulatedRank, value: Any = None) -> Script:
        called = self._called.setdefault(key, {})
        called[rank] = value
        while len(called) < len(self.ranks):
            if not all(each.alive or each in called for each in self.ranks):
                raise PeerGone
            yield

    def told(self, key: Any) -> list[Any]:
        return [self._called[key][rank] for rank in self.ranks]


@dataclass
class Decisions:
    """The product's, one of which a test may plant a bug in."""

    cycle: type[DoubleBuffer] = DoubleBuffer
    newest_whole: Callable[[Sequence[Inventory]], WholeCommit | None] = shard_inventory.newest_whole
    plan_moves: Callable[..., list[ReshardingMove]] = resharding.plan_moves
    place_copies: Callable[..., Placement] = copy_placement.place_copies
    mesh_shape: Callable[[int, int], MeshShape] = device_mesh.mesh_shape
    sender: Callable[[Sequence[int], int], int] = sender
    seal_first: bool = False


class Simulation:
    def __init__(self, seed: int, decisions: Decisions) -> None:
        self.random = random.Random(seed)
        self.decisions = decisions
        self.copies = self.random.randint(1, 2)
        self.most = self.random.randint(2, 6)
        # Shards of a world with replicas; None: each rank has a shard of its own.
        self.least = self.random.choice([None, 1, 2, 2, min(3, self.most)])
        self.sealed = -1  # the step of the newest sealed commit
        self.allowed = 0  # ranks that may be lost since its seal: as many as there are copies
        self.lost = self.worlds = 0
        self.world = self._world([self._rank() for _ in range(self.most)])
        shards = self._shards(self.most)
        self._follow(self.world, list(range(self.most)))
        for place, rank in enumerate(self.world.ranks):
            rank.live = {key: 0 for key in self._keys(place % shards, shards)}

    def _rank(self) -> SimulatedRank:
        return SimulatedRank(self.random.choice("ab"), self.decisions.cycle())

    def _world(self, ranks: list[SimulatedRank]) -> SimulatedWorld:
        self.worlds += 1
        return SimulatedWorld(self.worlds, ranks)

    def _shards(self, size: int) -> int:
        return size if self.least is None else self.decisions.mesh_shape(size, self.least).shards

    def _follow(self, world: SimulatedWorld, order: list[int]) -> None:
        shards = self._shards(len(order))
        place = self.decisions.place_copies
        world.follow(order, shards, place(order, world.hosts, self.copies, (), shards))

    def _keys(self, shard: int, shards: int) -> list[tuple[int, int]]:
        return [(n, row) for n, t in enumerate(TENSORS) for row in range(*t.rows_of(shard, shards))]

    def run(self) -> None:
        scripts = {rank: self._train(rank, False) for rank in self.world.ranks}
        broken: set[SimulatedRank] = set()  # wait for another world
        for _ in range(TICKS):
            rank = self.random.choice([*scripts])
            may = self.sealed >= 0 and self.lost < self.allowed and len(scripts) > 1
            if may and self.random.random() < 0.02:
                rank.alive = False
                self.lost += 1
                del scripts[rank]
                broken.discard(rank)
                continue
            try:
                next(scripts[rank])
            except PeerGone:
                scripts[rank] = self._waits()
                broken.add(rank)
            if {*scripts} == broken:
                lacking = max(0, (self.least or 1) - len(scripts))
                joined = self.random.randint(lacking, self.most - len(scripts))
                survivors = [each for each in self.world.ranks if each.alive]
                self.world = self._world([*survivors, *(self._rank() for _ in range(joined))])
                scripts = {rank: self._train(rank, True) for rank in self.world.ranks}
                broken.clear()

    def _waits(self) -> Script:
        while True:
            yield

    # ---- one rank ----------------------------------------------------------------------------------------------

    def _train(self, rank: SimulatedRank, recovers: bool) -> Script:
        world, number = self.world, 0
        if recovers:
            yield from self._recover(rank, world)
        while True:
            yield from self._commit(rank, world, number)
            number += 1
            yield from world.call(("gradients", number), rank)
            rank.step += 1
            rank.live = {key: rank.step for key in rank.live}
            yield

    def _commit(self, rank: SimulatedRank, world: SimulatedWorld, number: int) -> Script:
        me = world.ranks.index(rank)
        shard = owners(world.order, world.shards)[me]
        kept = tuple(copied_to(world.placement, me))
        record = BufferRecord(CommitId(world.generation, number), world.shards, shard, kept, ())
        bank = rank.cycle.begin(record)
        own = rank.memory[bank].setdefault(shard, {})
        for key in [*own]:
            if key not in rank.live:
                del own[key]
        for key, value in rank.live.items():
            own[key] = value
            if self.random.random() < 0.2:
                yield
        rank.steps[bank] = rank.step
        rank.cycle.copied()
        yield
        if self.decisions.seal_first:
            yield from self._seal(rank, world, number)
        yield from world.call(("mirror", number), rank, (shard, dict(own)))
        told = world.told(("mirror", number))
        for other in kept:
            source = self.decisions.sender(columns(world.order, world.shards)[other], other)
            rank.memory[bank][other] = told[source][1]
        if not self.decisions.seal_first:
            rank.cycle.mirrored()
            yield
            yield from self._seal(rank, world, number)

    def _seal(self, rank: SimulatedRank, world: SimulatedWorld, number: int) -> Script:
        yield from world.call(("seal", number), rank)
        rank.cycle.sealed()
        if rank.step > self.sealed or number == 0:
            self.sealed = max(self.sealed, rank.step)
            self.lost = sum(not each.alive for each in world.ranks)
            self.allowed = min(self.copies, len(world.ranks) - 1)
        yield

    def _recover(self, rank: SimulatedRank, world: SimulatedWorld) -> Script:
        yield from world.call("meet", rank, rank.cycle.inventory())
        whole = self.decisions.newest_whole(world.told("meet"))
        if whole is None:
            raise Broken("a sealed commit is lost")
        base = rank.cycle.adopt(whole.commit)
        size, hosts = len(world.ranks), world.hosts
        shards = self._shards(size)
        if self.least is None:
            order = resharding.order_of_shards(whole, TENSORS, size)
        else:
            order = resharding.order_of_replicas(whole, TENSORS, hosts, shards, self.copies)
        plan = self.decisions.plan_moves(whole, TENSORS, order, hosts, 10, shards)
        yield from world.call("travel", rank, (base, rank.memory, rank.steps))
        told = world.told("travel")
        me = world.ranks.index(rank)
        live: Content = {}
        for move in plan:
            if move.target == me:
                bank, memory, _ = told[move.source]
                for row in range(*move.rows):
                    key = (move.tensor, row)
                    if key in live:
                        raise Broken("a row came twice")
                    content = {} if bank is None else memory[bank].get(move.shard, {})
                    if key not in content:
                        raise Broken("a row was taken from a rank that does not have it")
                    live[key] = content[key]
        yield
        bank, _, steps = told[whole.ranks()[0]]
        rank.live, rank.step = live, steps[bank]
        if {*live} != {*self._keys(owners(order, shards)[me], shards)}:
            raise Broken("a rank has other rows than those of its shard")
        if {*live.values()} - {rank.step}:
            raise Broken("a rank has rows of another commit")
        if rank.step < self.sealed:
            raise Broken("an older commit than the newest sealed one was taken")
        self._follow(world, order)
        yield


@given(st.integers(0, 10**9))
def test_no_sealed_commit_is_lost_while_lost_ranks_do_not_exceed_the_copies(seed: int):
    Simulation(seed, Decisions()).run()


@pytest.mark.nightly
def test_thousand_simulated_worlds_keep_the_invariants():
    for seed in range(1000):
        Simulation(seed, Decisions()).run()


def test_ranks_are_lost_and_join_in_the_simulation():
    simulations = [Simulation(seed, Decisions()) for seed in range(30)]
    for each in simulations:
        each.run()
    assert sum(each.worlds for each in simulations) > 60
    assert sum(each.sealed for each in simulations) > 60
    with_replicas = [each for each in simulations if each.least is not None]
    assert sum(each.worlds for each in with_replicas) > 30
    assert any(each.least is None for each in simulations)


# ---- planted bugs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planted",
    [
        Decisions(cycle=WritesOverTheBase),
        Decisions(cycle=SealsWhatIsNotMirrored, seal_first=True),
        Decisions(newest_whole=takes_stale_shards),
        Decisions(plan_moves=counts_a_row_twice),
        Decisions(place_copies=copies_nothing_that_has_a_replica),
        Decisions(plan_moves=brings_rows_to_one_replica),
        Decisions(newest_whole=takes_what_replicas_hold_for_what_copies_hold),
        Decisions(sender=sends_from_a_rank_of_another_shard),
    ],
    ids=[
        "bank-written-too-early",
        "sealed-before-mirrored",
        "stale-shard",
        "row-twice",
        "replica-instead-of-copies",
        "rows-to-one-replica",
        "any-rank-for-any-shard",
        "copy-of-another-shard",
    ],
)
def test_a_planted_bug_is_found(planted: Decisions):
    for seed in range(300):
        try:
            Simulation(seed, planted).run()
        except Broken:
            return
    pytest.fail("no invariant was broken")
