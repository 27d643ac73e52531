"""Checkpointing of a training function: starts and stops the writer, and resumes from the newest checkpoint.

This module runs in the training thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from elastic.api.broadcasting import broadcast_object
from elastic.checkpoints import catalog, newest_checkpoint, options, state_restoring
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import CheckpointOptions
from elastic.checkpoints.shard_reader import ShardReader
from elastic.errors import Invalid, StateMismatch
from elastic.protocol.messages import COPY, ShardsPlaced, World
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state.fully_sharded.sharded_commits import WorldInventory
from elastic.state.handled_state import HandledState, is_sharded_within_islands, shards_of
from elastic.state.state import ObjectState, State, overridden


@contextlib.contextmanager
def commits(rt: WorkerRuntime, state: State) -> Iterator[None]:
    """Context manager that writes the job's commits to storage while a function under ``elastic.run`` trains.

    Raises:
        Invalid: the options are invalid, or the state cannot be written to a checkpoint.
    """
    found = options.read(os.environ)
    if found is None:
        yield
        return
    if not isinstance(state, ObjectState) or "save" in overridden(state):
        raise Invalid(
            f"{type(state).__name__} overrides save(), so it can't be written to a checkpoint: use TorchState or"
            " ObjectState, or train without --checkpoint-dir"
        )
    if is_sharded_within_islands(state):
        raise Invalid(
            "--checkpoint-dir is not supported with an elastic.DiLoCo whose model is sharded within islands: train"
            " without it, or use DistributedDataParallel(model, process_group=elastic.island_group())"
        )
    if rt.alone and rt.place.size > 1:
        raise Invalid(
            f"--checkpoint-dir with several workers requires elasticrun: unset {options.DIR} under other"
            " launchers"
        )
    storage = Storage(found.url)
    if rt.alone and not found.run:  # Without a driver, no run number is assigned.
        found = replace(found, run=catalog.claim_run(storage))
    # Import on demand: loading torch.distributed.checkpoint and SymPy takes most of a second, which jobs without
    # checkpoints should not spend.
    from elastic.checkpoints.background_writer import CheckpointWriter

    writer = CheckpointWriter(storage, found, rt.session.send, alone=rt.alone)
    rt.commits.durable = writer
    rt.first_not_finite = None if rt.alone else writer.first_not_finite
    rt.link_thread.checkpoints = writer.receive
    if not rt.alone and not rt.elastic:
        rt.link_thread.listen_for_sigterm()
    try:
        yield
    finally:
        rt.commits.durable = rt.first_not_finite = None
        rt.link_thread.checkpoints = lambda message: False
        writer.close()


def entered(rt: WorkerRuntime, world: World) -> None:
    """Adopt the run number of a new world, so that all its ranks use the same number, even after a driver failover.

    If this worker receives another rank's state, records of non-finite gradients are discarded.
    """
    if rt.commits.durable is not None and world.run:
        rt.commits.durable.run = world.run
    if rt.first_not_finite is not None and world.holders == 0:
        rt.first_not_finite.began()
    elif rt.first_not_finite is not None and world.place.rank >= world.holders:
        rt.first_not_finite.missed()


def finish(rt: WorkerRuntime, state: State) -> None:
    """Make the last commit durable after the training function has returned and before the job ends."""
    if rt.commits.durable is None:
        return
    # Suspends hang detection: a rank that waits here for slower ranks or slow storage is not stuck.
    long = contextlib.nullcontext() if rt.alone else rt.training.long_phase("last checkpoint")
    with long, rt.account.during("storage"):
        rt.commits.finish(state)


def returned(rt: WorkerRuntime) -> None:
    """Record that the training function has returned. This function is called on each rank, after `finish`."""
    commit = rt.session.recovery.agreed()
    if rt.commits.durable is not None and not rt.alone and commit is not None:
        rt.commits.durable.returned(commit, rt.place, rt.env.worker.incarnation)


def resume(rt: WorkerRuntime, state: State) -> None:
    """Resume from the newest durable commit, if one exists, when no worker holds a commit in memory.

    All ranks must call this function.

    If the state does not match the checkpoint, the job ends.

    Raises:
        OSError: the storage failed. Raised on rank 0.
        PeerLost: a rank was lost. Raised on the other ranks.
    """
    found = options.read(os.environ)
    if found is None or not isinstance(state, ObjectState):
        return
    with rt.account.during("storage"):
        if state.is_sharded():
            _resume_shards(rt, state, found, None, lambda: None)
        else:
            _resume(rt, state, found)


class TransferOutcome(NamedTuple):
    """Outcome of the transfer of a sharded state to all ranks.

    The fields, in order: number of bytes received from other ranks, whether the state was read from a checkpoint, and
    this rank's part of the state.
    """

    copied_bytes: int
    from_checkpoint: bool
    shards: ShardsPlaced | None


def bring_shards(rt: WorkerRuntime, state: State, reset: Callable[[], None]) -> TransferOutcome:
    """Restore a sharded state on all ranks of a new world.

    All ranks must call this function.

    The newest commit that the ranks hold is restored. If the ranks no longer hold all shards, or before the first
    training step, the newest durable commit is restored.

    Args:
        rt: the runtime.
        state: the sharded state.
        reset: see `State.bring_shards`.

    Raises:
        PeerLost: a rank was lost.
        ShardLost: shards are lost and there is no durable commit either.
        OSError: the storage failed.
    """
    sharded = shards_of(state)
    assert sharded is not None
    met = sharded.meet(rt)
    whole, found = met.whole, options.read(os.environ)
    if found is not None and (whole is None or whole.commit.generation == 0):
        with rt.account.during("storage"):
            if _resume_shards(rt, state, found, met, reset):
                return TransferOutcome(0, True, sharded.placed)
    return TransferOutcome(state.bring_shards(reset, met), False, sharded.placed)


def _resume_shards(
    rt: WorkerRuntime,
    state: State,
    found: CheckpointOptions,
    met: WorldInventory | None,
    reset: Callable[[], None],
) -> bool:
    assert isinstance(state, HandledState)
    try:
        return ShardReader(rt, state, found, met).resume(reset)
    except (StateMismatch, Invalid) as error:
        if rt.alone or rt.place.rank:
            raise
        _cannot_begin(rt, error)


def _cannot_begin(rt: WorkerRuntime, error: Exception) -> NoReturn:
    """Report to the driver an error that would recur on every worker, so that the driver ends the job."""
    rt.training.cannot_begin(str(error))
    sys.exit(1)


def _resume(rt: WorkerRuntime, state: ObjectState, found: CheckpointOptions) -> None:
    generators: list[Any] = []
    if rt.place.rank == 0:
        # Suspends hang detection: the other ranks wait here while rank 0 reads from slow or unreachable storage.
        long = (
            contextlib.nullcontext()
            if rt.alone
            else rt.training.long_phase("reading the checkpoint")
        )
        try:
            with long:
                generators = _load(rt, found, state)
        except (StateMismatch, Invalid) as error:
            if rt.alone:
                raise
            _cannot_begin(rt, error)
    if rt.place.size > 1:
        with rt.guard(COPY):
            generators = broadcast_object(generators, root_rank=0, name="elastic.checkpoint")
    state_restoring.load_random(generators, rt.place.rank, state)


def _load(rt: WorkerRuntime, found: CheckpointOptions, state: ObjectState) -> list[Any]:
    """Load the newest checkpoint, and return the random generator states that each rank has committed.

    The list is empty if there is no checkpoint and training starts from the beginning.
    """
    storage = Storage(found.url)
    begin = newest_checkpoint.load_newest(storage, found, state)
    if begin is None:
        text = f"{storage.url} has no checkpoint to resume from: training starts from the beginning"
        print(f"elastic: {text}", file=sys.stderr, flush=True)
        return []
    url, manifest = begin
    print(
        f"elastic: resuming from {manifest} in {url}/{manifest.name}", file=sys.stderr, flush=True
    )
    if not rt.alone:
        newest_checkpoint.report(manifest, url, found, rt.session.send)
    return manifest.generators
