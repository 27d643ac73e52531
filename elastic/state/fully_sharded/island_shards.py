"""Commits and recovery of a `DiLoCo` whose model is sharded over the ranks of an island.

Each island commits and restores independently of the others: a commit is a collective in the island only, and contains
the shards of the inner and the outer parameters and optimizers, and the counters of the rounds. In a new world, the
ranks of an island restore the newest commit of which they hold all shards. An island without such a commit, for example
a new one, receives the outer parameters from another island. Afterwards, `Rounds` completes the merges that an island
lacks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch

from elastic.collectives import object_exchange
from elastic.collectives.dtensor import is_dtensor
from elastic.collectives.interface import Collectives
from elastic.diloco.diloco import DiLoCo
from elastic.diloco.sharded import ShardedIsland, ShardedRows, local_of, sharded_rows
from elastic.errors import ShardLost, StateMismatch
from elastic.negotiation import submission
from elastic.protocol.messages import COPY, Commit, Place
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.sharding import fsdp2, unsupported_sharding
from elastic.sharding.shard_division import Division
from elastic.sharding.shard_inventory import CommitId
from elastic.state.fully_sharded.sharded_commits import ShardedCommits, WorldInventory
from elastic.state.fully_sharded.sharded_handlers import (
    FullyShardedHandler,
    LiveShard,
    RowSpec,
    Sharded,
    ShardedOptimizerHandler,
)
from elastic.state.handlers import state_transfer
from elastic.state.handlers.diloco_state import DiLoCoStateHandler
from elastic.state.handlers.part import Part
from elastic.state.handlers.tensor_spec import Destination, TensorSpec
from elastic.state.snapshots.snapshot import Snapshot

CPU = torch.device("cpu")


class _UnreportedCommits:
    """Replaces the log of a worker's commits: the driver does not track the commits of an island."""

    def sealed(self, commit: Commit) -> None:
        pass


class IslandRuntime:
    """Runtime of a worker as seen within its island: ranks, size and groups are those of the island.

    Args:
        rt: the runtime.
        members: ranks of the island in ascending order.
    """

    def __init__(self, rt: WorkerRuntime, members: Sequence[int]) -> None:
        self._rt, self._members = rt, tuple(members)
        rank, size = self._members.index(rt.place.rank), len(self._members)
        self.place = Place(rank, size, rank, size, 0, 1)
        self.generation, self.env = rt.generation, rt.env
        self.commits = _UnreportedCommits()

    def guard(self, name: str) -> AbstractContextManager[None]:
        return self._rt.guard(name)

    def group(
        self, purpose: str, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> Collectives:
        """Return the group named ``purpose`` of these ranks of the island (default: all)."""
        numbers = range(len(self._members)) if ranks is None else ranks
        members = tuple(self._members[number] for number in numbers)
        return self._rt.group(f"{purpose} of an island", device, members)


class IslandModelHandler(FullyShardedHandler):
    """Handler of the model, which moves it to the mesh of the island."""

    def __init__(self, island: ShardedIsland, name: str) -> None:
        self._island = island
        super().__init__(island.model, name)

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        self._island.follow()
        return {name: each.local for name, each in self.live_shards().items()}


class OuterShards:
    """The outer parameters, which are sharded like the inner ones."""

    everywhere = True

    def __init__(self, diloco: DiLoCo, name: str) -> None:
        self._diloco, self.name = diloco, name

    @property
    def position(self) -> tuple[int, int] | None:
        return None

    def live_shards(self) -> dict[str, LiveShard]:
        diloco = self._diloco
        return {
            name: LiveShard(local_of(each), RowSpec(tuple(each.shape), each.dtype))
            for name, each in zip(diloco.names, diloco.outer, strict=True)
        }

    def device_of(self, key: str) -> torch.device:
        diloco = self._diloco
        return local_of(diloco.outer[diloco.names.index(key)]).device

    def recognized(self, key: str, spec: RowSpec) -> RowSpec:
        return spec

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        """Give the outer parameters uninitialized rows in the mesh of the inner ones, which has followed before."""
        for inner, outer in zip(self._diloco.inner, self._diloco.outer, strict=True):
            rows = torch.empty_like(local_of(inner).detach(), dtype=outer.dtype)
            with torch.no_grad():
                fsdp2.as_sharded(rows, inner, outer)
            outer.grad = None
        return {name: each.local for name, each in self.live_shards().items()}

    def place_shards(self, found: dict[str, tuple[RowSpec, torch.Tensor]]) -> None:
        """Do nothing, because the rows were received directly into the parameters."""

    def abandon_pass(self) -> None:
        for each in self._diloco.outer:
            each.grad = None


class IslandReport(NamedTuple):
    """Report of a rank about the commit that its island has restored."""

    whole: bool  # whether the island has all shards of a commit
    trained: bool  # whether the commit is of a world in which the island has trained
    merges: int  # number of merges


def source_of(reports: Sequence[IslandReport], leaders: Sequence[int]) -> int | None:
    """Return the leader of the island that sends outer parameters to the islands without them, or None. Pure.

    Args:
        reports: reports of all ranks. Those of one island are equal.
        leaders: leaders of all islands.
    """
    able = [leader for leader in leaders if reports[leader].whole]
    return max(able, key=lambda each: (*reports[each][1:], -each), default=None)


class IslandShards:
    """Shards of a `DiLoCo` in the memory of this rank and of its neighbors in the island.

    All methods must be called from the training thread.

    Args:
        diloco: DiLoCo of a sharded model.
        name: name of the DiLoCo in its state.
        copies: number of ranks on other hosts of the island that keep a copy of each shard.
    """

    def __init__(self, diloco: DiLoCo, name: str, copies: int) -> None:
        assert diloco.sharded is not None
        self._diloco, self._island, self._name = diloco, diloco.sharded, name
        self._model = IslandModelHandler(self._island, "inner model")
        self._outer = OuterShards(diloco, "outer model")
        self._optimizer_parts: dict[str, ShardedOptimizerHandler] = {
            "outer optimizer": ShardedOptimizerHandler(diloco.outer_optimizer, "outer optimizer")
        }
        optimizers = [diloco.outer_optimizer]
        if diloco.inner_optimizer is not None:
            self._optimizer_parts["inner optimizer"] = ShardedOptimizerHandler(
                diloco.inner_optimizer, "inner optimizer"
            )
            optimizers.append(diloco.inner_optimizer)
        unsupported_sharding.follow_island(optimizers)
        # The outer parameters follow the model: see `OuterShards.follow`.
        sharded: list[Sharded] = [self._model, self._outer, *self._optimizer_parts.values()]
        self._parts: dict[str, Part] = {self._model.name: self._model, **self._optimizer_parts}
        self._commits = ShardedCommits(
            lambda: sharded, copies, runtime=self._runtime, ascending=True
        )
        self._generation: int | None = None  # world in which the island has restored a commit
        # newest commit that belongs to the values of this rank's state
        self._completed: CommitId | None = None
        self._begun: CommitId | None = None
        # position of the DiLoCo that belongs to the other values of the state
        self._position = 0

    def _runtime(self) -> WorkerRuntime | None:
        rt = lifecycle.active()
        return None if rt is None else self._within(rt)

    def _within(self, rt: WorkerRuntime) -> WorkerRuntime:
        return cast(WorkerRuntime, IslandRuntime(rt, self._island.group.islands.members))

    # ---- commits -------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the shards. Collective in the island, unless it has restored no commit in this world yet.

        Raises:
            PeerLost: a rank was lost, in any island.
        """
        rt = lifecycle.active()
        if rt is not None and not rt.alone:
            rt.session.raise_if_broken()
            if self._generation != rt.generation:
                return  # The island has not restored its commit in this world, so its shards are not complete.
        self._model.check_parameters()
        self._commit()

    def _commit(self) -> None:
        self._commits.commit(self._save)
        self._begun = self._commits.newest

    def completed(self) -> None:
        """Record that the other values of the state were saved after `commit`."""
        self._completed = self._begun
        self._position = self._diloco.position

    def reconciled(self) -> None:
        """Record the position that the islands have agreed on. The other values of the state already belong to it."""
        self._position = self._diloco.position

    def finish(self) -> None:
        """Wait until the newest commit can be restored even if this worker is lost. Collective in the island.

        Raises:
            PeerLost: a rank was lost.
        """
        self._commits.seal()
        if self._commits.discarded:
            self._commits.redo()
            self._commit()
            self._commits.seal()
            self.completed()

    def capture(self) -> None:
        """Take the first snapshot when training starts. A worker that joins later has nothing to contribute."""
        self._commits.forget()
        self._begun = self._completed = self._generation = None
        rt = lifecycle.active()
        if rt is None or not rt.provisional:
            self._commit()
            self.completed()

    def restore(self) -> None:
        """Discard the current forward and backward pass. Outside elastic jobs, also restore this rank's shards.

        In an elastic job, the ranks of the island choose the commit to restore in `recover`.
        """
        self._commits.abandon_pass()
        rt = lifecycle.active()
        if rt is not None and not rt.alone:
            return
        self._commits.seal()
        bank = self._commits.base()
        if bank is not None:
            self._restore_replicated(bank.snapshots, bank.values)
            self._commits.place_own(bank)

    def _save(self, snapshots: dict[str, Snapshot]) -> dict[str, Any]:
        for name, part in self._parts.items():
            part.snapshot = snapshots.setdefault(name, Snapshot())
            part.save()
        return self._counters()

    def _counters(self) -> dict[str, Any]:
        rounds = self._diloco.rounds
        return {"shared": rounds.shared(), "own": rounds.own()}

    def _restore_replicated(self, snapshots: dict[str, Snapshot], values: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.snapshot = snapshots[name]
            part.snapshot.complete()
            part.restore()
        self._take_counters(values)

    def _take_counters(self, values: dict[str, Any], *, joins: bool = False) -> None:
        rounds, own = self._diloco.rounds, values["own"]
        rounds.merged = list(
            values["shared"]["merged"]
        )  # The merges belong to the restored shards.
        self._diloco.take_shared(values["shared"])
        if joins:  # The tokens of another rank count there.
            own = own | {"tokens": [0.0] * len(own["tokens"])}
        rounds.take_own(own)

    # ---- another world -------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Restore a commit in a new world. Collective over all ranks.

        Raises:
            PeerLost: a rank was lost.
            ShardLost: no island has a complete commit.
        """
        rt = lifecycle.current()
        if self._generation == rt.generation:
            return
        if not rt.elastic and self._completed is None:
            self._commit()
            self.completed()
        view = self._within(rt)
        met = self._restorable(view, self._commits.meet(view))
        whole = met.whole
        if whole is None:
            self._start_anew(view, met)
        else:
            self._restore_commit(view, met)
        trained = whole is not None and whole.commit.generation > 0
        merges = sum(self._diloco.merged) if trained else 0
        self._meet_islands(rt, IslandReport(whole is not None, trained, merges), met)
        # If the island has restored an older commit, it repeats no step, like an island that is behind the others: the
        # other values of the state, such as its step, are those of the newest commit.
        rounds = self._diloco.rounds
        rounds.position = max(rounds.position, self._position)
        self._commit()
        self._commits.seal()
        self.completed()
        self._generation = rt.generation

    def _restorable(self, view: WorkerRuntime, met: WorldInventory) -> WorldInventory:
        """Leave out commits that are newer than the other values of the state on every rank of the island."""
        with view.guard("choice of the commit"):
            completed = object_exchange.gather(view.group("state", CPU), self._completed)
        newest = max((each for each in completed if each is not None), default=None)
        return dataclasses.replace(
            met,
            inventories=[
                tuple(each for each in held if newest is not None and each.commit <= newest)
                for held in met.inventories
            ],
        )

    def _restore_commit(self, view: WorkerRuntime, met: WorldInventory) -> None:
        choice, commits = self._commits.choose(met), self._commits
        if choice.bank is not None:
            self._restore_replicated(choice.bank.snapshots, choice.bank.values)
        rank, lacking = view.place.rank, choice.lacking(view.place.size)
        ranks = (choice.root, *lacking)
        if lacking and rank in ranks:
            group_on = functools.partial(view.group, "state", ranks=ranks)
            with view.guard(COPY):
                _, values = state_transfer.transfer(
                    group_on(CPU), 0, self._parts, self._counters(), self._layout(), group_on
                )
            if rank in lacking:
                self._take_counters(values, joins=True)
        commits.follow(view, choice)

    def _start_anew(self, view: WorkerRuntime, met: WorldInventory) -> None:
        """Divide the model among the ranks of an island that has no complete commit. The rows are uninitialized."""
        if met.lost and view.place.rank == 0:
            lost = ", ".join(f"{shard} of {shards}" for shard, shards, _ in met.loss().lost)
            print(
                f"elastic: warning: diloco: island {self._island.group.islands.name} has lost shard {lost}, and"
                " continues from the outer parameters of another island",
                file=sys.stderr,
                flush=True,
            )
        for part in self._optimizer_parts.values():
            part.value.state.clear()
            part.forget_specs()
        specs = {
            f"{part.name}/{key}": each.spec
            for part in (self._model, self._outer)
            for key, each in part.live_shards().items()
        }
        self._commits.place(
            specs,
            {name: rows for name, (_, rows) in self._commits.divide(view, met, specs).items()},
        )

    def _meet_islands(self, rt: WorkerRuntime, report: IslandReport, met: WorldInventory) -> None:
        """Send the outer parameters to the islands that have not trained yet. Collective over all ranks."""
        islands = self._island.group.islands
        reports = [report]
        if submission.group_size(CPU) > 1:
            texts = submission.agree("diloco", "islands", json.dumps(report))
            reports = [IslandReport(*json.loads(text)) for text in texts]
        source = source_of(reports, islands.leaders)
        if source is None:
            raise met.loss() if met.lost else ShardLost([])
        lacking = [each for each in islands.leaders if each != source and not reports[each].trained]
        receives = islands.leader in lacking
        if not lacking or not (receives or islands.leader == source):
            return
        diloco, island = self._diloco, self._island
        mine = {
            "counters": self._counters()["shared"],
            "options": self._options(),
            "untrained": self._untrained_layout(),
        }
        theirs = island.copy_object(mine, source, lacking)
        if theirs["untrained"] != mine["untrained"]:
            different = state_transfer.difference(
                "\n".join(theirs["untrained"]), "\n".join(mine["untrained"]), "another island"
            )
            raise StateMismatch(f"{different}: create the same buffers on all workers")
        diloco.copy_outer(source, lacking, range(len(diloco.outer)))
        island.copy_between(source, lacking, self._untrained())
        if receives:
            self._begin_with_outer(theirs)

    def _begin_with_outer(self, theirs: dict[str, Any]) -> None:
        diloco = self._diloco
        diloco.rounds.own_steps = 0
        self._take_counters({"shared": theirs["counters"], "own": diloco.rounds.own()}, joins=True)
        # `Rounds.take_shared` has counted the merges that the outer parameters contain.
        with torch.no_grad():
            for inner, outer in zip(diloco.inner, diloco.outer, strict=True):
                local_of(inner).copy_(local_of(outer))
        if diloco.inner_optimizer is not None:
            diloco.inner_optimizer.state.clear()
            groups = diloco.inner_optimizer.param_groups
            for group, options in zip(groups, theirs["options"], strict=True):
                group.update(options)
        for part in self._optimizer_parts.values():
            part.forget_specs()
        diloco.clear_gradients()

    def _options(self) -> list[dict[str, Any]]:
        optimizer = self._diloco.inner_optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        return [{key: each for key, each in group.items() if key != "params"} for group in groups]

    def _untrained(self) -> Iterator[ShardedRows | torch.Tensor]:
        """Yield the buffers and the frozen parameters, in the order of their names."""
        for _, each in sorted(self._diloco.others().items()):
            yield sharded_rows(each) if is_dtensor(each) else each

    def _untrained_layout(self) -> list[str]:
        return [
            f"{self._name}.{name} {str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
            for name, each in sorted(self._diloco.others().items())
        ]

    def _layout(self) -> str:
        return "\n".join(line for part in self._parts.values() for line in part.layout())


class ShardedDiLoCoHandler(DiLoCoStateHandler):
    """Handler of a `DiLoCo` with a sharded model. `IslandShards` commits and restores all its values."""

    shards: IslandShards

    def _adopt_value(self) -> None:
        self.value.name_in_state = self.name
        self.keep_copies(1)

    def keep_copies(self, copies: int) -> None:
        """Set the number of other ranks that keep a copy of each shard. Call it before training."""
        self.shards = IslandShards(self.value, self.name, copies)

    def layout(self) -> list[str]:
        return [*super().layout(), f"{self.name} is sharded within islands"]

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return {}, {}

    def versions(self) -> dict[str, int]:
        return {}

    def own(self) -> Any:
        return None

    def destinations(
        self, structure: Any, specs: dict[str, TensorSpec], *, restoring: bool
    ) -> dict[str, torch.Tensor | Destination]:
        return {}

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        """Do nothing, because `IslandShards.recover` restores the values."""

    def save(self) -> None:
        super().save()
        if hasattr(self, "shards"):
            self.shards.completed()

    def restore(self) -> None:
        self.shards.restore()

    def restore_nothing(self) -> None:
        self.shards.restore()

    def digested(self) -> dict[str, torch.Tensor]:
        return {}
