"""Simulated worker with a sharded state: the real decisions of `elastic.sharding` on simulated rows.

A commit is a collective: each rank copies its shard into a snapshot buffer and, in the background, receives the copies
that it keeps. The next commit, or a planned change of the world, seals the commit. In a new world, the ranks choose the
newest complete commit and send its rows to their new owners. Each row contains the history of its state, so that a row
of another commit is detected.

Invariant: if workers on no more than ``copies`` hosts were lost since the newest seal, the sealed commit or a newer
one is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from elastic.chaos.simulator.interface import SimulatedJob
from elastic.chaos.simulator.simulated_training import Collective, State
from elastic.chaos.simulator.simulated_worker import SimulatedWorker
from elastic.errors import ShardLost
from elastic.protocol import messages
from elastic.protocol.messages import ShardsHeld, ShardsPlaced, Worker
from elastic.sharding import copy_placement, resharding, shard_inventory, shard_reports
from elastic.sharding.copy_placement import Placement, copied_to
from elastic.sharding.device_mesh import columns, mesh_shape, sender
from elastic.sharding.double_buffer import BufferRecord, DoubleBuffer
from elastic.sharding.resharding import ReshardingMove
from elastic.sharding.row_layout import ShardedTensor, ShardLayout, owners
from elastic.sharding.shard_inventory import CommitId, Inventory, WholeCommit

TENSORS = (ShardedTensor("weight", 7, 8), ShardedTensor("bias", 1, 4), ShardedTensor("odd", 5, 3))
LIMIT = 10  # maximum size of a transfer of rows, in bytes
SPENT_EVERY = 4  # number of commits between reports of rank 0 on how it spent its time
# for each (tensor, row), the history of the state to which the row belongs
Rows = dict[tuple[int, int], int]
Thread = Generator[tuple[str, float | Callable[[], bool]], None, None]


class Sealed(NamedTuple):
    """Sealed commit, and the workers that made it."""

    steps: int
    workers: tuple[Worker, ...]


class Mirroring(NamedTuple):
    """Background transfer of shard copies for one commit.

    Attributes:
        sent: collective that transfers the copies between all ranks.
        bank: number of the snapshot buffer that receives the copies.
        senders: for each shard of which this rank keeps a copy, the rank that sends the shard.
        steps: number of steps of the commit.
    """

    sent: Collective
    bank: int
    senders: dict[int, int]
    steps: int


class ShardedJob:
    """Sealed commits and restored commits of one job.

    Args:
        copies: number of copies of each shard on other hosts.
        least: smallest number of shards of a world with replicas. None means one shard per rank.
    """

    def __init__(self, copies: int, least: int | None = None) -> None:
        self.copies = copies
        self.least = least
        self.newest: Sealed | None = None
        self.restored = 0  # number of worlds that restored a commit of an earlier world
        self.lost = 0  # number of worlds whose members held no complete commit

    @classmethod
    def drawn(cls, seed: int) -> ShardedJob:
        """Draw a job from a seed, with one or two copies of each shard. Half of the jobs have replicas."""
        return cls(1 + seed % 2, (None, None, 1, 2)[seed // 2 % 4])

    def shards(self, size: int) -> int:
        return size if self.least is None else mesh_shape(size, min(self.least, size)).shards

    def sealed(self, steps: int, workers: tuple[Worker, ...]) -> None:
        """Record a commit as sealed: a rank was notified that all ranks have received their copies."""
        self.newest = Sealed(steps, workers)

    def met(self, present: tuple[Worker, ...], steps: int | None) -> None:
        """Check the commit that these workers restore.

        Args:
            present: members of the world.
            steps: number of steps of the commit. None means that the workers have no complete commit.

        Raises:
            AssertionError: the commit is older than a sealed commit that must have survived.
        """
        newest = self.newest
        self.lost += steps is None
        self.restored += steps is not None
        if newest is None:
            return
        hosts = {each.host for each in newest.workers}
        missing = {each.host for each in newest.workers if each not in present}
        if len(missing) <= min(self.copies, len(hosts) - 1):
            assert steps is not None and steps >= newest.steps, (
                f"step {steps} is restored, although step {newest.steps} was sealed and only workers on"
                f" {sorted(missing)} are missing"
            )


class ShardedWorker(SimulatedWorker):
    """Simulated worker with a sharded state."""

    def __init__(self, sim: SimulatedJob, agent: Any, worker: Worker) -> None:
        super().__init__(sim, agent, worker)
        self._cycle = DoubleBuffer()
        # rows of each shard, in each of the two snapshot buffers
        self._memory: tuple[dict[int, Rows], dict[int, Rows]] = ({}, {})
        # replicated values, in each of the two snapshot buffers
        self._kept: list[State] = [self.state, self.state]
        self._live: Rows = {}
        self._order: list[int] = []
        self._placement: Placement = ()
        # this worker's report on its part of the state in the current world
        self._placed: ShardsPlaced | None = None
        self._count = 0  # number of commits in the current generation
        self._exchanges = 0
        # transfer of the newest commit, or None if the commit is sealed
        self._transfer: Mirroring | None = None

    # ---- commits ---------------------------------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Begin training with the state that the script has created, in the world formed by init()."""
        place = self.recovery.place
        if self.recovery.newcomer or not place.size:
            return
        shards = self._job.shards(place.size)
        order = list(range(place.size))
        self._live = dict.fromkeys(_keys(owners(order, shards)[place.rank], shards), 0)
        shard = owners(order, shards)[place.rank]
        bank = self._cycle.begin(BufferRecord(CommitId(0, 0), shards, shard, (), ()))
        self._memory[bank][shard], self._kept[bank] = dict(self._live), self.state
        self._cycle.copied()
        self._cycle.mirrored()
        self._cycle.sealed()

    @property
    def _job(self) -> ShardedJob:
        found: ShardedJob = self.sim.sharded
        return found

    def keep(self) -> Thread:
        yield from self.commit()
        yield from self._seal()

    def commit(self) -> Thread:
        yield from self._copy()
        self.committed()
        yield "commit", 0.0

    def _copy(self) -> Thread:
        """Seal the previous commit, copy this rank's shard, and start sending it to the ranks that keep copies."""
        yield from self._seal()
        generation, rank = self.recovery.generation, self.recovery.place.rank
        shards = self._job.shards(len(self._order))
        shard, kept = owners(self._order, shards)[rank], tuple(copied_to(self._placement, rank))
        record = BufferRecord(CommitId(generation, self._count), shards, shard, kept, ())
        bank = self._cycle.begin(record)
        self._memory[bank][shard] = own = {key: self.state.history for key in self._live}
        self._live = dict(own)
        self._kept[bank] = self.state
        yield "shard copied", 0.0
        self._cycle.copied()
        yield from self._exchange("shards compare", None)
        senders = {other: sender(columns(self._order, shards)[other], other) for other in kept}
        sent = self._begin_exchange("shards mirror", dict(own))
        self._transfer = Mirroring(sent, bank, senders, self.state.steps)
        self._count += 1
        if not any(self._placement):
            yield from self._seal()

    def _seal(self) -> Thread:
        """Wait until each rank has received its copies of the newest commit, and seal the commit."""
        transfer = self._transfer
        if transfer is None:
            return
        yield from self.arrive(transfer.sent)
        self._receive(transfer)
        yield "shard mirrored", 0.0
        yield from self._exchange("shards seal", None)
        commit = self._cycle.written().commit
        self._cycle.sealed()
        self._transfer = None
        self._job.sealed(transfer.steps, self._members())
        self.recovery.seal(shard_reports.as_commit(commit))
        if self.recovery.place.rank == 0 and self._count % SPENT_EVERY == 0:
            self.send(
                messages.TimeSpent(
                    commit.generation, messages.Times(), "training", sealed=self.recovery.sealed
                )
            )

    def _receive(self, transfer: Mirroring) -> None:
        for other, source in transfer.senders.items():
            self._memory[transfer.bank][other] = transfer.sent.values[source]
        self._cycle.mirrored()

    def _stop_mirroring(self) -> None:
        """Abort the transfer that the end of the world interrupted. Keep the copies that were received completely."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            begun = all(source in transfer.sent.values for source in transfer.senders.values())
            if begun and self.sim.clock.random.random() < 0.5:
                self._receive(transfer)

    def held_shards(self) -> ShardsHeld:
        self._stop_mirroring()
        held, sealed = self._cycle.inventory(), self._cycle.newest_sealed
        return shard_reports.as_held(held, self._job.copies, sealed)

    def placed_shards(self) -> ShardsPlaced | None:
        return self._placed

    def _members(self) -> tuple[Worker, ...]:
        world = self.sim.training.worlds[self.recovery.generation]
        return tuple(member.worker for member in world.members)

    def _exchange(self, purpose: str, value: Any) -> Generator[Any, None, list[Any]]:
        collective = self._begin_exchange(purpose, value)
        yield from self.arrive(collective)
        return [collective.values[rank] for rank in collective.ranks]

    def _begin_exchange(self, purpose: str, value: Any) -> Collective:
        collective = self.collective(purpose, self._exchanges)
        self._exchanges += 1
        collective.values[self.recovery.place.rank] = value
        return collective

    # ---- another world ---------------------------------------------------------------------------------------------

    def bring(self) -> Thread:
        """Restore the newest complete commit. Its rows are sent to their owners in this world."""
        self._stop_mirroring()
        self._exchanges = self._count = 0
        rank, size = self.recovery.place.rank, self.recovery.place.size
        inventories = yield from self._exchange("shards meet", self._cycle.inventory())
        whole = self._newest_whole(inventories)
        base = None if whole is None else self._cycle.adopt(whole.commit)
        mine = None if base is None else (self._memory[base], self._kept[base])
        banks = yield from self._exchange("shards travel", mine)
        restored = None if whole is None else banks[whole.ranks()[0]][1]
        if rank == 0:
            self._job.met(self._members(), None if restored is None else restored.steps)
        if whole is None or restored is None:
            raise ShardLost(
                [
                    (each.shard, each.shards, each.hosts)
                    for each in shard_inventory.lost_shards(inventories)
                ]
            )
        hosts, shards = [each.host for each in self._members()], self._job.shards(size)
        if self._job.least is None:
            order = resharding.order_of_shards(whole, TENSORS, size)
        else:
            order = resharding.order_of_replicas(whole, TENSORS, hosts, shards, self._job.copies)
        rows: Rows = {}
        plan = self._plan(whole, order, hosts, shards)
        for move in plan:
            if move.target == rank:
                held = banks[move.source][0][move.shard]
                rows.update(
                    {(move.tensor, row): held[move.tensor, row] for row in range(*move.rows)}
                )
        assert {*rows} == _keys(owners(order, shards)[rank], shards), f"{self.worker} lacks rows"
        self._placement = copy_placement.place_copies(order, hosts, self._job.copies, (), shards)
        shard, kept = owners(order, shards)[rank], tuple(copied_to(self._placement, rank))
        layout, memory = ShardLayout(TENSORS, whole.shards), set() if mine is None else {*mine[0]}
        self._placed = shard_reports.as_placed(
            ShardsPlaced(shards, shard, kept), whole, plan, layout, rank, hosts, memory
        )
        first = whole.commit.generation == 0
        assert first or {*rows.values()} <= {restored.history}, f"{self.worker} mixes commits"
        self._live, self._order = rows, order
        self.state = self.saved = restored
        self.reports.samples = []
        yield from self._copy()
        yield from self._seal()

    def _newest_whole(self, inventories: list[Inventory]) -> WholeCommit | None:
        return shard_inventory.newest_whole(inventories)

    def _plan(
        self, whole: WholeCommit, order: list[int], hosts: list[str], shards: int
    ) -> list[ReshardingMove]:
        return resharding.plan_moves(whole, TENSORS, order, hosts, LIMIT, shards)


def _keys(shard: int, shards: int) -> set[tuple[int, int]]:
    return {
        (number, row)
        for number, tensor in enumerate(TENSORS)
        for row in range(*tensor.rows_of(shard, shards))
    }
