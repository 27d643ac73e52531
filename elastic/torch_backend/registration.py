"""Registration of the backend ``elastic`` with torch.distributed, and creation of its process groups."""

from __future__ import annotations

from typing import Any

from torch import distributed

from elastic.errors import Invalid
from elastic.rendezvous.launcher_detection import ByStore, LauncherEnv
from elastic.runtime import lifecycle
from elastic.torch_backend import comm_hooks, data_parallel_models, group_names, shared_buckets
from elastic.torch_backend.following_group import NAME
from elastic.torch_backend.process_group import ElasticProcessGroup


def register() -> None:
    """Register the backend, so that ``init_process_group("elastic")`` works. Idempotent."""
    if NAME.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(
            NAME, create, extended_api=True, devices=["cpu", "cuda"]
        )


def create(options: Any, _: Any) -> ElasticProcessGroup:
    """Create a process group for ``init_process_group`` and ``new_group``; called by torch.

    Raises:
        Invalid: rank or size differ from those of the world.
    """
    members: tuple[int, ...] | None = tuple(options.global_ranks_in_group) or None
    if members is None:
        lifecycle.init_through(_started(options))
        _check(options.group_rank, options.group_size)
    comm_hooks.replace()
    data_parallel_models.replace()
    shared_buckets.replace()
    group_names.replace()
    return ElasticProcessGroup(
        options.store,
        f"torch {options.group_id}",
        members if members != tuple(range(lifecycle.place().size)) else None,
        options.timeout.total_seconds(),
    )


def _started(options: Any) -> LauncherEnv:
    rank, size = options.group_rank, options.group_size
    way = ByStore(options.store, _host(options.store)) if size > 1 else None
    return LauncherEnv("init_process_group", rank, size, None, way)


def _host(store: Any) -> str:
    """Return the host that serves the store, or an empty string if it is not a TCP store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _check(rank: int, size: int) -> None:
    place = lifecycle.place()
    if (rank, size) != (place.rank, place.size):
        raise Invalid(
            f"init_process_group got rank {rank} of {size}, but this worker is rank {place.rank} of"
            f" {place.size}: omit rank and world_size"
        )
