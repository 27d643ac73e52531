"""Loading of the newest durable commit of a fully sharded state into a world of any size.

This module runs on all ranks.

Rank 0 chooses the checkpoint, loads the replicated values and sends them to the other ranks. Then each rank reads its
rows of the sharded tensors. All ranks use the same commit: if one rank cannot read it, all ranks try the previous one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import torch

from elastic.checkpoints import newest_checkpoint, state_restoring
from elastic.checkpoints.files import row_reader
from elastic.checkpoints.files.manifest import Manifest, StoredTensor, UnreadableCommit
from elastic.checkpoints.files.row_ranges import check_ranges
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import CheckpointOptions
from elastic.checkpoints.storage_retries import read_patiently
from elastic.checkpoints.tensors_as_plain_data import dtype_named
from elastic.collectives import object_exchange
from elastic.failpoints import failpoint
from elastic.protocol.messages import COPY
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.sharding.row_layout import Rows
from elastic.state.fully_sharded.sharded_commits import WorldInventory
from elastic.state.fully_sharded.sharded_handlers import RowSpec
from elastic.state.handled_state import HandledState, shards_of
from elastic.state.state import broadcast_state

CPU = torch.device("cpu")
Value = TypeVar("Value")
Targets = Mapping[str, tuple[Rows, torch.Tensor]]


class Chosen(msgspec.Struct, frozen=True):
    """Checkpoint from which all ranks read. ``url`` is the folder of checkpoints that contains it."""

    url: str
    manifest: Manifest


class ShardReader:
    """One rank's reader of a sharded checkpoint. All ranks read the same checkpoint together.

    Args:
        met: the shards that each rank holds. None in a world of one rank without a driver.
    """

    def __init__(
        self,
        rt: WorkerRuntime,
        state: HandledState,
        options: CheckpointOptions,
        met: WorldInventory | None,
    ) -> None:
        self._rt = rt
        self._state = state
        self._options = options
        self._met = met
        self._storage = Storage(options.url)
        self._passed: newest_checkpoint.Passed = {}  # commits that could not be read; used only on rank 0

    def resume(self, reset: Callable[[], None]) -> bool:
        """Load the newest commit that all ranks can read, and commit the loaded state.

        Return False if no checkpoint exists.

        Args:
            reset: called before the state is changed.

        Raises:
            StateMismatch: the state does not match the commit. Raised on rank 0.
            Invalid: checkpoints exist, but none can be read. Raised on rank 0.
            PeerLost: a rank was lost.
            OSError: the storage failed.
        """
        sharded = shards_of(self._state)
        assert sharded is not None
        if not self._from_rank_0(self._there_is_one):
            return False
        # Call reset callbacks on all ranks at the same time, because they may contain collectives.
        reset()
        while (chosen := self._from_rank_0(self._load)) is not None:
            specs = sharded.recognized(row_specs(chosen.manifest.tensors))
            self._send_replicated()
            targets = sharded.divide(self._rt, self._met, specs)
            failpoint("durable-rows")
            troubles = self._gather(self._read(chosen, targets))
            if not any(troubles):
                sharded.place(specs, {name: where for name, (_, where) in targets.items()})
                self._state.save()
                self._state.finish_commit()
                return True
            if self._rt.place.rank == 0:
                rank, why = next((n, each) for n, each in enumerate(troubles) if each)
                reason = f"rank {rank} found that {why}"
                newest_checkpoint.pass_over(chosen.url, chosen.manifest, reason, self._passed)
        return False

    def _there_is_one(self) -> bool:
        storage, options = self._storage, self._options
        found = read_patiently(
            storage, lambda: newest_checkpoint.proposal(storage, options, self._passed)
        )
        if found is None:
            lost = self._met is not None and self._met.whole is None
            end = "" if lost else ": training starts from the beginning"
            _print(f"{storage.url} has no checkpoint to resume from{end}")
        return found is not None

    def _load(self) -> Chosen | None:
        storage, options = self._storage, self._options

        def load() -> Chosen | None:
            while (found := newest_checkpoint.proposal(storage, options, self._passed)) is not None:
                where, manifest = found
                try:
                    failpoint("durable-load")
                    check_ranges(manifest.tensors)
                    state_restoring.load(where, manifest, self._state)
                except UnreadableCommit as error:
                    newest_checkpoint.pass_over(where.url, manifest, error.trouble, self._passed)
                else:
                    return Chosen(where.url, manifest)
            return None

        chosen = read_patiently(storage, load)
        if chosen is not None:
            lost = "" if self._met is None or not self._met.lost else f": {self._met.loss()}"
            what = "falling back to" if lost else "resuming from"
            _print(f"{what} {chosen.manifest} in {chosen.url}/{chosen.manifest.name}{lost}")
            if not self._rt.alone:
                newest_checkpoint.report(
                    chosen.manifest, chosen.url, options, self._rt.session.send
                )
        return chosen

    def _send_replicated(self) -> None:
        if self._rt.place.size > 1:
            broadcast_state(self._state)
            if self._rt.place.rank:
                # Make samplers divide the remaining samples among the ranks of this world.
                self._state.reset()

    def _read(self, chosen: Chosen, targets: Targets) -> str:
        """Read this rank's rows and the states of its random generators.

        Return the reason if they cannot be read, otherwise an empty string.
        """
        storage, rank = Storage(chosen.url), self._rt.place.rank
        try:
            with self._long(), torch.no_grad():
                read_patiently(storage, lambda: read_rows(storage, chosen.manifest, targets))
            state_restoring.load_random(chosen.manifest.generators, rank, self._state)
        except UnreadableCommit as error:
            return error.trouble
        return ""

    def _long(self) -> contextlib.AbstractContextManager[None]:
        if self._rt.alone:
            return contextlib.nullcontext()
        return self._rt.training.long_phase("reading the checkpoint")

    def _from_rank_0(self, work: Callable[[], Value]) -> Value:
        """Call ``work`` on rank 0 and broadcast its result to all ranks.

        All ranks must call this method.
        """
        value: Any = None
        if self._rt.place.rank == 0:
            with self._long():
                value = work()
        if self._rt.place.size > 1:
            with self._rt.guard(COPY):
                value = object_exchange.broadcast(self._rt.group("state", CPU), value, 0)
        found: Value = value
        return found

    def _gather(self, value: str) -> list[Any]:
        if self._rt.place.size == 1:
            return [value]
        with self._rt.guard(COPY):
            return object_exchange.gather(self._rt.group("state", CPU), value)


def row_specs(tensors: list[StoredTensor]) -> dict[str, RowSpec]:
    """Return the specs of the sharded tensors of a checkpoint, by part and name.

    Raises:
        StateMismatch: tensors differ from those of the state.
    """
    found: dict[str, RowSpec] = {}
    for each in tensors:
        if each.rows is not None:
            rows = each.rows
            found[f"{each.part}/{each.key}"] = RowSpec(
                tuple(each.shape),
                dtype_named(each.dtype),
                rows.plain,
                None if rows.sizes is None else tuple(rows.sizes),
                rows.on_host,
            )
    return found


def read_rows(storage: Storage, manifest: Manifest, targets: Targets) -> None:
    """Read the rows of each tensor into its destination.

    Raises:
        UnreadableCommit: a file is missing or corrupted.
        OSError: the storage failed.
    """
    by_name: dict[str, list[StoredTensor]] = {}
    for each in manifest.tensors:
        by_name.setdefault(f"{each.part}/{each.key}", []).append(each)
    for name, (wanted, where) in targets.items():
        row_reader.read(storage, str(manifest.name), by_name[name], wanted, where)


def _print(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)
