"""Commits of a sharded state: copying, mirroring and sealing of shards, and restoring a commit in another world.

`elastic.sharding` makes the decisions; this module copies and sends data. For a commit, each rank copies its shard to
one of two snapshot buffers, and sends it to the ranks that keep a copy of the shard. The commit is sealed once all
ranks have copied and sent their shards.

Shards are sent in the background: `commit` returns once this rank's shard is copied. The next commit, a planned change
of the world and the end of the training wait in `seal` until they have been sent. In another world, all ranks report
which shards of which commits they hold and restore the newest complete commit: rows are sent to their new owners,
placed, and mirrored again before training continues.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from elastic.collectives import object_exchange, raise_together, threads_at_exit
from elastic.collectives.interface import Collectives, Op
from elastic.collectives.shared_memory.peer_memory import PeerMemoryUnavailable
from elastic.errors import CollectiveFailed, ShardLost, StateMismatch
from elastic.failpoints import failpoint
from elastic.protocol.messages import SHARDS_COMMIT, RowBytes, ShardsHeld, ShardsPlaced
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.sharding import shard_reports
from elastic.sharding.copy_placement import Placement, copied_to, lasting, place_copies
from elastic.sharding.device_mesh import columns, mesh_shape, sender
from elastic.sharding.double_buffer import BufferRecord, DoubleBuffer
from elastic.sharding.resharding import (
    ReshardingMove,
    order_of_replicas,
    order_of_shards,
    plan_moves,
    rounds,
)
from elastic.sharding.row_layout import Rows, ShardLayout, owners
from elastic.sharding.shard_division import Division
from elastic.sharding.shard_inventory import (
    CommitId,
    HeldShard,
    Inventory,
    WholeCommit,
    lost_shards,
    newest_whole,
)
from elastic.state.fully_sharded import peer_arena
from elastic.state.fully_sharded.background_exchange import Transfer
from elastic.state.fully_sharded.peer_arena import ArenaOffer, PeerArena
from elastic.state.fully_sharded.shard_buffers import ShardBuffers, as_layout
from elastic.state.fully_sharded.sharded_handlers import LiveShard, RowSpec, Sharded
from elastic.state.handlers.held_commit import HeldCommit, HeldRows
from elastic.state.snapshots.pinned_copy import DeviceStaging
from elastic.state.snapshots.snapshot import Snapshot

WRITTEN = (
    "the script has changed a sharded tensor after commit() and before the next step of an optimizer, so that commit"
    " was discarded: change tensors before commit(); from here on, training waits while commits are copied"
)
# Maximum number of bytes of one exchange: backends support counts up to 2**31, and an exchange keeps its rows in memory
# twice.
PIECE = 256 << 20
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ShardedWorld:
    """Ranks of one world among which the shards are divided.

    Args:
        generation: generation of the world.
        rank: this rank.
        order: rank at each position of a mesh of replicas by shards.
        shards: number of shards.
        hosts: host of each rank.
        placement: ranks that keep a copy of each shard.
        arenas: mapped arenas of other ranks on this host, by rank.
        lasting: whether this rank's memory outlives its process.
    """

    generation: int
    rank: int
    order: tuple[int, ...]
    shards: int
    hosts: tuple[str, ...]
    placement: Placement
    arenas: Mapping[int, PeerArena]  # mapped arenas of other ranks on this host, by rank
    lasting: bool = False

    @property
    def shard(self) -> int:
        return owners(self.order, self.shards)[self.rank]

    @property
    def senders(self) -> list[int]:
        """Return, for each shard, the rank that sends it to the ranks that keep a copy."""
        return [sender(column, n) for n, column in enumerate(columns(self.order, self.shards))]

    def placed(self) -> ShardsPlaced:
        """Return the report to the driver about this rank's shard, without the sources of its rows."""
        keeps = tuple(copied_to(self.placement, self.rank))
        return ShardsPlaced(self.shards, self.shard, keeps, self.lasting)

    def where(self) -> tuple[tuple[str, ...], ...]:
        """Return the hosts that hold each shard, the owners' hosts first."""
        return tuple(
            tuple(self.hosts[rank] for rank in (*column, *copies))
            for column, copies in zip(columns(self.order, self.shards), self.placement, strict=True)
        )


@dataclass
class CommitCost:
    """Cost of the last commit: size of the shard in bytes, seconds of each phase, and bytes sent to other ranks.

    With copies on other hosts, ``mirror_s`` excludes the transfer, which runs in the background, and ``seal_s`` is the
    time for which this commit has waited until the previous one was transferred and sealed.
    """

    nbytes: int = 0
    copy_s: float = 0.0
    mirror_s: float = 0.0
    seal_s: float = 0.0
    sent: int = 0


@dataclass(frozen=True)
class Choice:
    """Commit that all ranks restore.

    ``bank`` is this rank's snapshot buffer with a shard of the commit, or None if it has none.
    """

    whole: WholeCommit
    hosts: tuple[str, ...]
    bank: ShardBuffers | None
    arenas: Mapping[int, PeerArena]
    lasting: Sequence[bool]  # whether each rank's memory outlives its process
    # minimum number of shards of a mesh of replicas by shards, or None if each rank has its own shard
    least: int | None

    @property
    def root(self) -> int:
        """Return the rank that sends the replicated values."""
        return self.whole.ranks()[0]

    def lacking(self, size: int) -> list[int]:
        """Return the ranks that receive the replicated values.

        The initial state (generation 0) may differ between ranks, so all ranks except `root` receive it.
        """
        holding = [self.root] if self.whole.commit.generation == 0 else self.whole.ranks()
        return [rank for rank in range(size) if rank not in holding]


@dataclass(frozen=True)
class WorldInventory:
    """Shards, hosts and memory that the ranks of a world have reported, by rank.

    Args:
        arenas, lasting: see `Choice`.
    """

    inventories: Sequence[Inventory]
    hosts: tuple[str, ...]
    arenas: Mapping[int, PeerArena]
    lasting: Sequence[bool]
    leasts: Sequence[int | None]

    @property
    def least(self) -> int | None:
        """Return the minimum number of shards (see `Choice`), as reported by a rank that holds a commit.

        The report of a joining worker is ignored, because the worker has created its mesh before joining, possibly with
        another shape.
        """
        holding = [rank for rank, held in enumerate(self.inventories) if held]
        return self.leasts[self.whole.ranks()[0] if self.whole else min(holding, default=0)]

    @property
    def whole(self) -> WholeCommit | None:
        """Return the newest commit whose shards are all held by some rank, or None."""
        return newest_whole(self.inventories)

    @property
    def lost(self) -> bool:
        """Return whether the ranks hold commits, but no complete one."""
        return any(self.inventories) and self.whole is None

    def loss(self) -> ShardLost:
        """Return the error that lists the missing shards."""
        lost = lost_shards(self.inventories)
        return ShardLost([(each.shard, each.shards, each.hosts) for each in lost])


class ShardedCommits:
    """Commits of one sharded state. All methods must be called from the training thread.

    Args:
        parts: function that returns the parts with sharded tensors.
        copies: number of ranks on other hosts that keep a copy of each shard.
        least: minimum number of shards of a mesh with replicas. None means one shard per rank.
        given: ``least_shards`` as passed by the script, or None. In that case, ``least`` comes from a mesh, which a
            joining worker may have created with another shape.
        runtime: function that returns the runtime whose ranks hold the shards, or None without a runtime. Default: all
            ranks of the world.
        ascending: whether each rank has the shard of its own number in every world. Default: ranks keep their shards
            if the number of shards is unchanged.
    """

    def __init__(
        self,
        parts: Callable[[], Iterable[Sharded]],
        copies: int,
        least: int | None = None,
        given: int | None = None,
        *,
        runtime: Callable[[], WorkerRuntime | None] | None = None,
        ascending: bool = False,
    ) -> None:
        self.copies = copies
        self._runtime = runtime or (lambda: lifecycle.active())
        self._ascending = ascending
        self.given = given
        self.least = least  # minimum number of shards; see `Choice`
        self.spent = CommitCost()
        # report to the driver about the last change of the world
        self._rows_placed: ShardsPlaced | None = None
        self._parts = parts
        self._cycle = DoubleBuffer()
        spares: list[torch.Tensor] = []
        stage = DeviceStaging()
        self._banks = ShardBuffers(spares, stage), ShardBuffers(spares, stage)
        # thread that waits for a copy from a GPU and then mirrors the shard
        self._mirroring: _Mirroring | None = None
        self.discarded = False  # whether `seal` has dropped the newest commit
        self._exposed = True  # whether training may continue while the GPU's tensors are read
        # None if the state is not divided among ranks yet, or if this is the only rank
        self._world: ShardedWorld | None = None
        self._number = 0  # number of the next commit in this world
        self._bank = 0  # index of the snapshot buffer for the commit in progress
        # transfers of the newest commit, or None once it is sealed
        self._transfers: list[Transfer] | None = None
        # If ranks have different tensors: this rank's specifications at the last commit, and those of all ranks.
        self._mine: dict[str, RowSpec] | None = None
        self._everyones: dict[str, RowSpec] = {}

    def options(self) -> list[str]:
        """Return the options that must be equal on all workers of a world, as lines."""
        least = [] if self.given is None else [f"least_shards {self.given}"]
        return [f"copies {self.copies}", *least]

    # ---- a commit ------------------------------------------------------------------------------------------------

    def commit(self, save: Callable[[dict[str, Snapshot]], Any]) -> None:
        """Seal the previous commit and make another: copy this rank's shard, and start to mirror it.

        All ranks must call this method.

        The new commit is sealed immediately if no copies have to be sent.

        Args:
            save: function that saves the replicated parts into the given snapshots, keyed by part name, and returns the
                other replicated values. If it raises an exception, the previous commit stays the newest.

        Raises:
            PeerLost: a rank was lost.
            StateMismatch: ranks commit different tensors, or replicas of a shard differ.
        """
        waited_s = self.seal()
        # A commit that raised an error may have left a copy in progress, so wait for it.
        self._finish_copy()
        world, rt, live = self._world, self._runtime(), self._live()
        shards = self._with_rows(self._agree_on_specs(live), live)
        record = self._record(world)
        self._bank = self._cycle.begin(record)
        bank = self._banks[self._bank]
        bank.arrange(shards, record.shards, (record.shard, *record.copies))
        bank.values = save(bank.snapshots)
        began = time.perf_counter()
        failpoint("shard-copy")
        spent = CommitCost(bank.copy(shards, record.commit, exposed=self._exposed))
        if not bank.copying:
            self._cycle.copied()
        copied = time.perf_counter()
        failpoint("shard-mirror")
        transfers: list[Transfer] = []
        if world is not None and rt is not None:
            with rt.guard(SHARDS_COMMIT):
                group = rt.group("state", CPU)
                if rt.env.digest_commits:
                    self._finish_copy()
                if self._compare(group, world, bank, content=rt.env.digest_commits):
                    mirror = functools.partial(self._agree_and_mirror, group, world, bank)
                    self._mirroring = _Mirroring(bank, mirror)
                else:
                    transfers, spent.sent = self._mirror(group, world, bank)
        elif bank.copying:
            self._mirroring = _Mirroring(bank, lambda valid: (valid, [], 0))
        self._transfers = transfers
        self._number += 1
        spent.copy_s, spent.mirror_s = copied - began, time.perf_counter() - copied
        in_flight = bool(transfers) or self._mirroring is not None
        spent.seal_s = waited_s if in_flight else self.seal()
        self.spent = spent

    def _record(self, world: ShardedWorld | None) -> BufferRecord:
        if world is None:
            shard, count = self._position()
            return BufferRecord(CommitId(0, self._number), count, shard, (), ())
        commit, copies = (
            CommitId(world.generation, self._number),
            copied_to(world.placement, world.rank),
        )
        return BufferRecord(commit, world.shards, world.shard, tuple(copies), world.where())

    @property
    def newest(self) -> CommitId | None:
        """Return the commit that `commit` has made last, or None if it was discarded."""
        record = self._cycle.banks[self._bank]
        return None if record is None else record.commit

    def skip(self) -> None:
        """Skip the number of a commit that no rank makes. This method must be called on all ranks."""
        self._number += 1

    def redo(self) -> None:
        """Give the next commit the number of the newest commit, which was dropped."""
        self._number -= 1

    def seal(self) -> float:
        """Wait until all ranks have mirrored the newest commit, and seal it.

        Collective, unless the commit is already sealed.

        If the script has written to a tensor on any rank while it was copied, the commit is dropped instead. From then
        on, training waits for copies of this state.

        Returns:
            Time in seconds that sealing took.

        Raises:
            PeerLost: a rank was lost.
            DeviceLost: the GPU did not respond.
        """
        if self._transfers is None:
            return 0.0
        began, rt = time.perf_counter(), self._runtime()
        if self._world is not None and rt is not None:
            with rt.guard(SHARDS_COMMIT):
                valid = self._finish_copy()
                for transfer in self._transfers:
                    transfer.wait()
                if valid:
                    self._cycle.mirrored()
                failpoint("shard-seal")
                rt.group("state", CPU).barrier().wait()
            if valid:
                rt.commits.sealed(shard_reports.as_commit(self._cycle.written().commit))
        elif valid := self._finish_copy():
            self._cycle.mirrored()
        self._transfers = None
        if valid:
            self._cycle.sealed()
        else:
            self._cycle.discard()
        self.discarded = not valid
        return time.perf_counter() - began

    def _finish_copy(self) -> bool:
        """Wait until this rank's shard of the newest commit is copied.

        Return whether the copies are valid on all ranks.

        Raises:
            CollectiveFailed: the group has failed.
            DeviceLost: the GPU did not respond.
        """
        bank, mirroring = self._banks[self._bank], self._mirroring
        bank.order()
        if mirroring is None:
            if bank.copying and bank.finish():
                self._cycle.copied()
            return True  # The script has not run in the meantime, so the copy is valid.
        self._mirroring = None
        mirroring.join()
        if mirroring.copied:
            self._cycle.copied()
        else:
            self._exposed = False
            print(f"elastic: warning: {WRITTEN}", file=sys.stderr, flush=True)
        valid, transfers, self.spent.sent = mirroring.result()
        self._transfers = transfers
        return valid

    def _agree_and_mirror(
        self, group: Collectives, world: ShardedWorld, bank: ShardBuffers, valid: bool
    ) -> tuple[bool, list[Transfer], int]:
        """Mirror the copies if they are valid on all ranks. Return whether they are, and the result of `_mirror`.

        All ranks must call this method.
        """
        agreed = torch.tensor([valid], dtype=torch.int64, device="cpu")
        group.allreduce(agreed, Op.MIN).wait()
        if not bool(agreed):
            return False, [], 0
        return True, *self._mirror(group, world, bank)

    def _stop_mirroring(self) -> None:
        """Record the newest commit as mirrored if this rank's transfers of it had completed when the world ended."""
        with contextlib.suppress(CollectiveFailed):  # the group has failed with its world
            if not self._finish_copy():
                self._cycle.discard()
                self._transfers = None
        transfers, self._transfers = self._transfers, None
        if transfers and all(transfer.succeeded() for transfer in transfers):
            self._cycle.mirrored()

    def _agree_on_specs(self, live: dict[str, LiveShard]) -> dict[str, RowSpec]:
        """Return the specifications of all ranks' tensors. Collective if ranks can have different tensors."""
        mine = {name: each.spec for name, each in live.items()}
        if self._everywhere():
            return mine
        mine = _merged([mine])
        rt = self._runtime()
        if self._world is None or rt is None:
            return mine
        with rt.guard(SHARDS_COMMIT):
            group = rt.group("state", CPU)
            changed = torch.tensor([mine != self._mine], dtype=torch.int64, device="cpu")
            parts = [torch.zeros_like(changed, device="cpu") for _ in range(group.size)]
            group.allgather(parts, changed).wait()
            if any(map(bool, parts)):
                self._everyones = _merged(object_exchange.gather(group, mine))
        self._mine = mine
        return self._everyones

    def _with_rows(
        self, specs: dict[str, RowSpec], live: dict[str, LiveShard]
    ) -> dict[str, LiveShard]:
        if self._everywhere():
            return live
        return {
            name: live[name] if name in live else LiveShard(spec.local(0, CPU), spec)
            for name, spec in specs.items()
        }

    def _everywhere(self) -> bool:
        return all(part.everywhere for part in self._parts())

    def _compare(
        self, group: Collectives, world: ShardedWorld, bank: ShardBuffers, *, content: bool
    ) -> bool:
        """Check that all ranks commit the same tensors, and exchange the arena offsets of their shards.

        All ranks must call this method.

        All ranks must have the same tensors, because the sizes of the following transfers depend on them.

        Args:
            group: group of all ranks.
            world: current world.
            bank: snapshot buffer of the commit in progress.
            content: whether to compare the values of a shard's replicas as well.

        Returns:
            Whether any rank's shard is still being copied from a GPU.

        Raises:
            StateMismatch: tensors or replicas differ.
        """
        same = [bank.layout.digest, self._number]
        replicas = columns(world.order, world.shards)
        values = bank.digest() if content and len(replicas[0]) > 1 else 0
        fields = [*same, *bank.where(), values, bank.copying]
        mine = torch.tensor(fields, dtype=torch.int64, device="cpu")
        parts = [torch.zeros_like(mine, device="cpu") for _ in range(group.size)]
        group.allgather(parts, mine).wait()
        found = [each.tolist() for each in parts]
        shard_of = owners(world.order, world.shards)
        for rank, arena in world.arenas.items():
            offset, size = found[rank][2:4]
            if offset >= 0:
                bank.map_peer(shard_of[rank], arena, offset, size)
        other = next((rank for rank, each in enumerate(found) if each[:2] != same), None)
        if other is not None:
            error = StateMismatch(
                "the sharded tensors that this rank commits, or its number of commits, differ from those of rank"
                f" {other}: step the same optimizers and call commit() equally often on all ranks"
            )
            raise_together.raise_together(group, error)
        for shard, column in enumerate(replicas):
            differs = [rank for rank in column if found[rank][4] != found[column[0]][4]]
            if differs:
                error = StateMismatch(
                    f"ranks {column[0]} and {differs[0]} hold different values of shard {shard}: use the same hardware"
                    " and library versions on all hosts, and change parameters and learning rates on all ranks alike"
                )
                raise_together.raise_together(group, error)
        return any(each[5] for each in found)

    def _mirror(
        self, group: Collectives, world: ShardedWorld, bank: ShardBuffers
    ) -> tuple[list[Transfer], int]:
        """Start to send this rank's shard to the ranks that keep a copy of it, and to receive the shards to keep.

        Returns the transfers, and the number of bytes sent.
        """
        levels = max(map(len, world.placement), default=0)
        senders = world.senders
        kept = world.placement[world.shard] if senders[world.shard] == world.rank else ()
        largest = bank.layout.largest
        buffer = bank.buffer(world.shard)
        transfers, sent = [], 0
        for level in range(levels):
            to = kept[level : level + 1]
            of = {
                senders[shard]: shard
                for shard, ranks in enumerate(world.placement)
                if ranks[level : level + 1] == (world.rank,)
            }
            for begin in range(0, largest, PIECE):
                mine = buffer[begin : begin + PIECE]
                parts = {
                    rank: bank.buffer(of[rank])[begin : begin + PIECE]
                    for rank in range(group.size)
                    if rank in of
                }
                transfers.append(
                    Transfer(
                        group,
                        {rank: [mine] for rank in to},
                        {rank: [p] for rank, p in parts.items()},
                    )
                )
                sent += len(mine) * len(to)
        return transfers, sent

    # ---- another world -------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Discard all commits when a training starts, because its initial state is in the live tensors."""
        self._finish_copy()
        self._cycle.forget()
        self._world, self._number, self._transfers = None, 0, None

    def abandon_pass(self) -> None:
        """Discard the gathered parameters and gradients of an interrupted forward or backward pass."""
        for part in self._parts():
            part.abandon_pass()

    @property
    def placed(self) -> ShardsPlaced | None:
        """Return the report to the driver about this rank's shard in the newest world, or None before any report.

        The report contains the sources of the rows.
        """
        return self._rows_placed

    def held(self) -> ShardsHeld:
        """Return the report to the driver about the shards that this rank can contribute to the next world."""
        self._stop_mirroring()
        return shard_reports.as_held(self._inventory(), self.copies, self._cycle.newest_sealed)

    def meet(self, rt: WorkerRuntime) -> WorldInventory:
        """Exchange all ranks' inventories of shards in this world.

        All ranks must call this method.

        Raises:
            PeerLost: a rank was lost.
        """
        # FSDP2 derives its prefetching from a record of earlier passes, which joining ranks lack. Discard the record.
        self.abandon_pass()
        self._stop_mirroring()
        with rt.guard("choice of the commit"):
            group = rt.group("state", CPU)
            gathered = object_exchange.gather(
                group, (self._inventory(), rt.env.worker.host, peer_arena.offer(), self.least)
            )
            arenas = _map_arenas([offer for _, _, offer, _ in gathered], rt.place.rank)
            reached = object_exchange.gather(group, sorted(arenas))
        machines = [offer and offer.owner.host for _, _, offer, _ in gathered]
        return WorldInventory(
            [each for each, _, _, _ in gathered],
            tuple(host for _, host, _, _ in gathered),
            arenas,
            lasting(machines, reached),
            [least for _, _, _, least in gathered],
        )

    def choose(self, met: WorldInventory) -> Choice:
        """Return the commit that all ranks must restore.

        Raises:
            ShardLost: no commit is complete.
        """
        whole = met.whole
        if whole is None:
            raise met.loss()
        bank = self._cycle.adopt(whole.commit)
        return Choice(
            whole,
            met.hosts,
            None if bank is None else self._banks[bank],
            met.arenas,
            met.lasting,
            met.least,
        )

    def _inventory(self) -> Inventory:
        found = list(self._cycle.inventory())
        for record, bank in zip(self._cycle.banks, self._banks, strict=True):
            if record is not None and record.held():
                known = {each.shard for each in record.held()}
                found += [
                    HeldShard(record.commit, record.shards, shard, False, record.hosts)
                    for shard in bank.lasting(record.commit)
                    if shard not in known
                ]
        return tuple(found)

    def follow(self, rt: WorkerRuntime, choice: Choice) -> int:
        """Receive the rows of this rank's new shard from the ranks that hold them.

        All ranks must call this method. Returns the number of bytes received from other ranks.
        """
        rank, size = rt.place.rank, rt.place.size
        specs = self._agree(rt, choice)
        layout = as_layout(specs, choice.whole.shards)
        self.least = choice.least
        if choice.least is None:
            shards, order = size, [*range(size)]
            if not self._ascending:
                order = order_of_shards(choice.whole, layout.tensors, size)
        else:
            shards = mesh_shape(size, choice.least).shards
            order = order_of_replicas(
                choice.whole, layout.tensors, choice.hosts, shards, self.copies
            )
        placement = place_copies(order, choice.hosts, self.copies, choice.lasting, shards)
        self._world = world = ShardedWorld(
            rt.generation,
            rank,
            tuple(order),
            shards,
            choice.hosts,
            placement,
            choice.arenas,
            choice.lasting[rank],
        )
        self._number, self._mine = 0, None
        ascending = tuple(range(size))
        division = Division(
            world.order,
            rank,
            shards,
            choice.least is not None,
            choice.least is None and world.order == choice.whole.owners == ascending,
        )
        found = self._targets(specs, layout, division)
        moves = plan_moves(choice.whole, layout.tensors, order, choice.hosts, PIECE, shards)
        with rt.guard("copy of the shards"):
            self._travel(rt.group("state", CPU), moves, layout, choice, found)
        failpoint("shard-moved")
        self._place(specs, found)
        failpoint("shard-placed")
        whole, held = choice.whole, self._cycle.inventory()
        memory = {each.shard for each in held if each.commit == whole.commit}
        self._rows_placed = placed = shard_reports.as_placed(
            world.placed(), whole, moves, layout, rank, choice.hosts, memory
        )
        return placed.received

    def hold(self, held: HeldCommit) -> None:
        """Add this rank's rows of the newest commit to ``held_commit``.

        The rows stay unchanged until ``held_commit`` releases them.
        """
        newest = self._cycle.base if self._transfers is None else self._bank
        assert newest is not None, "nothing was committed"
        self._banks[newest].wait()
        # A checkpoint is complete once all ranks have written it, even if the commit is not sealed.
        bank = self._banks[newest]
        held.release_shard = bank.hold()
        world = self._world
        # Only one of several replicas writes the shard.
        writes = world is None or world.senders[world.shard] == world.rank
        for tensor, (name, (spec, rows)) in zip(
            bank.layout.tensors, bank.own_rows().items(), strict=True
        ):
            part, _, key = name.partition("/")
            whole = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            begin = bank.layout.rows(tensor, bank.shard).begin
            mine = rows if writes else rows[:0]
            held.parts[part].sharded[key] = HeldRows(
                whole, begin, mine, spec.plain, spec.sizes, spec.on_host
            )

    def recognized(self, specs: dict[str, RowSpec]) -> dict[str, RowSpec]:
        """Return the descriptions of a checkpoint's tensors, by part and name, in the form that the parts use."""
        parts = {part.name: part for part in self._parts()}
        found = {}
        for name, spec in specs.items():
            part, _, key = name.partition("/")
            found[name] = parts[part].recognized(key, spec)
        return found

    def divide(
        self, rt: WorkerRuntime, met: WorldInventory | None, specs: dict[str, RowSpec]
    ) -> dict[str, tuple[Rows, torch.Tensor]]:
        """Divide tensors from another source than the ranks' commits, such as a checkpoint, among this world's ranks.

        All ranks must call this method.

        Args:
            rt: runtime of this worker.
            met: shards that the ranks hold; None in a world of a single rank without a driver.
            specs: tensors to divide, by name.

        Returns:
            By name, this rank's rows, and the uninitialized tensor to read them into. Call `place` afterwards.
        """
        rank, size = rt.place.rank, rt.place.size
        order = tuple(range(size))
        self.least = self.least if met is None else met.least
        shards = size if self.least is None else mesh_shape(size, self.least).shards
        if met is not None:
            placement = place_copies([*order], met.hosts, self.copies, met.lasting, shards)
            self._world = ShardedWorld(
                rt.generation,
                rank,
                order,
                shards,
                met.hosts,
                placement,
                met.arenas,
                met.lasting[rank],
            )
            self._number, self._mine = 0, None
        layout = as_layout(specs, shards)
        division = Division(order, rank, shards, self.least is not None)
        if self._world is not None:
            rows = ((len(layout.rows(each, division.shard)), each) for each in layout.tensors)
            read = RowBytes(checkpoint=sum(count * each.row_bytes for count, each in rows))
            self._rows_placed = msgspec.structs.replace(self._world.placed(), rows=read)
        found = self._targets(specs, layout, division)
        return {
            each.name: (layout.rows(each, division.shard), found[each.name])
            for each in layout.tensors
        }

    def place(self, specs: dict[str, RowSpec], found: dict[str, torch.Tensor]) -> None:
        """Store the tensors that `divide` has returned, now filled with values, in the optimizers."""
        self._place(specs, found)

    def base(self) -> ShardBuffers | None:
        """Return the snapshot buffer with the newest sealed commit, or None."""
        return None if self._cycle.base is None else self._banks[self._cycle.base]

    def place_own(self, bank: ShardBuffers) -> None:
        """Set the sharded tensors from this rank's shard in the buffer, in an unchanged world.

        This method is not collective.
        """
        live, found = self._live(), {}
        for name, (spec, rows) in bank.own_rows().items():
            present = live.get(name)
            local = (
                spec.local(len(rows), self._device_of(name)) if present is None else present.local
            )
            with torch.no_grad():
                local.copy_(rows)
            found[name] = local
        self._place(bank.specs, found)

    def _agree(self, rt: WorkerRuntime, choice: Choice) -> dict[str, RowSpec]:
        specs = {} if choice.bank is None else choice.bank.specs
        if not self._everywhere():
            with rt.guard("choice of the commit"):
                everyones = _merged(object_exchange.gather(rt.group("state", CPU), specs))
            if choice.bank is not None:
                # The first commit contains the specifications of only this rank.
                choice.bank.learn(everyones)
            return everyones
        holding = choice.whole.ranks()
        if len(holding) == rt.place.size:
            return specs
        with rt.guard("choice of the commit"):
            received: dict[str, RowSpec] = object_exchange.broadcast(
                rt.group("state", CPU), specs, holding[0]
            )
        return received

    def _targets(
        self, specs: dict[str, RowSpec], layout: ShardLayout, division: Division
    ) -> dict[str, torch.Tensor]:
        """Move all parts to the new world, and return the tensors that receive this rank's rows in it.

        These are live tensors of models, and uninitialized ones for optimizers.
        """
        found = {
            f"{part.name}/{key}": local
            for part in self._parts()
            for key, local in part.follow(division).items()
        }
        for tensor, (name, spec) in zip(layout.tensors, specs.items(), strict=True):
            if name not in found:
                rows = tensor.rows_of(division.shard, division.shards)
                found[name] = spec.local(len(rows), self._device_of(name))
        return {name: found[name] for name in specs}

    def _travel(
        self,
        group: Collectives,
        moves: list[ReshardingMove],
        layout: ShardLayout,
        choice: Choice,
        found: dict[str, torch.Tensor],
    ) -> None:
        world = self._world
        assert world is not None
        shards, rank = world.shards, world.rank
        targets = list(found.values())

        def place(move: ReshardingMove, rows: torch.Tensor) -> None:
            tensor = layout.tensors[move.tensor]
            first = tensor.rows_of(world.shard, shards).begin
            into = targets[move.tensor][move.rows.begin - first : move.rows.end - first]
            into.copy_(rows.view(into.dtype).view(into.shape))

        with torch.no_grad():
            for move in moves:
                if move.source == move.target == rank:
                    assert choice.bank is not None
                    place(move, choice.bank.rows(move))
            for together in rounds(moves, layout, PIECE):
                sent: dict[int, list[torch.Tensor]] = {}
                received: dict[int, list[torch.Tensor]] = {}
                mine = [move for move in together if move.target == rank]
                for move in together:
                    if move.source == rank:
                        assert choice.bank is not None
                        sent.setdefault(move.target, []).append(choice.bank.rows(move))
                arrived = []
                for move in mine:
                    nbytes = len(move.rows) * layout.tensors[move.tensor].row_bytes
                    part = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                    arrived.append(part)
                    received.setdefault(move.source, []).append(part)
                Transfer(group, sent, received).wait()
                for move, part in zip(mine, arrived, strict=True):
                    place(move, part)

    def _place(self, specs: dict[str, RowSpec], found: dict[str, torch.Tensor]) -> None:
        for part in self._parts():
            prefix = f"{part.name}/"
            part.place_shards(
                {
                    name.removeprefix(prefix): (specs[name], local)
                    for name, local in found.items()
                    if name.startswith(prefix)
                }
            )

    def _live(self) -> dict[str, LiveShard]:
        return {
            f"{part.name}/{key}": each
            for part in self._parts()
            for key, each in part.live_shards().items()
        }

    def _device_of(self, name: str) -> torch.device:
        part, _, key = name.partition("/")
        return next(each.device_of(key) for each in self._parts() if each.name == part)

    def _position(self) -> tuple[int, int]:
        """Return this rank's shard and the number of shards in the world in which the script created the parts."""
        return next(where for part in self._parts() if (where := part.position) is not None)


class _Mirroring:
    """Thread that waits for a copy from the GPU, and then starts to send it to other ranks.

    Call `ShardBuffers.order` and `join` before any other collective of the same group.

    Args:
        bank: snapshot buffer to which the shard is being copied.
        mirror: called with whether this rank's copy is valid; returns whether all ranks' copies are valid, the
            transfers, and the number of bytes sent.
    """

    def __init__(
        self, bank: ShardBuffers, mirror: Callable[[bool], tuple[bool, list[Transfer], int]]
    ) -> None:
        self._bank = bank
        self._mirror = mirror
        self.copied = False  # whether this rank's copy is valid
        self._found: tuple[bool, list[Transfer], int] = False, [], 0
        self._error: BaseException | None = None
        self._thread = threads_at_exit.begin("elastic-mirror", self._work)

    def _work(self) -> None:
        try:
            self.copied = self._bank.finish()
            self._found = self._mirror(self.copied)
        except BaseException as error:  # the error is raised by `result`
            self._error = error

    def join(self) -> None:
        """Wait for the thread to end, after the copy or when the group fails."""
        self._thread.join()

    def result(self) -> tuple[bool, list[Transfer], int]:
        """Return the result of ``mirror``.

        Raises:
            DeviceLost: the GPU did not respond.
            CollectiveFailed: the group has failed.
        """
        if self._error is not None:
            raise self._error
        return self._found


def _merged(gathered: Sequence[dict[str, RowSpec]]) -> dict[str, RowSpec]:
    found: dict[str, RowSpec] = {}
    for each in gathered:
        found |= each
    return {name: found[name] for name in sorted(found)}


def _map_arenas(offers: Sequence[ArenaOffer | None], me: int) -> dict[int, PeerArena]:
    mine, found = offers[me], {}
    for rank, each in enumerate(offers):
        if rank != me and each is not None and mine and each.owner.host == mine.owner.host:
            with contextlib.suppress(PeerMemoryUnavailable):
                found[rank] = PeerArena(each)
    return found
