"""Override that provides this backend and this worker's rank to scripts that request Gloo, NCCL or the default.

This module is used for workers that elasticrun has started: see `elastic.torch_autoload`. The module replaces the two
functions of torch.distributed that create all process groups: the one that determines rank, size and store for
``env://``, and the one that creates a process group for a backend name. ``get_backend()`` still returns what the script
requested. A third function, ``broadcast_object_list``, leaves the list unchanged on a worker that has not joined a
world yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world as torchs_groups

from elastic.errors import Invalid
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from elastic.torch_backend.following_group import NAME, FollowingGroup
from elastic.torch_backend.world_store import WorldStore

_BACKENDS = {"gloo", "nccl", "undefined", NAME}
_MORE = ("backend_options", "timeout", "pg_tag", "device_id", "group_desc")
_torch: Any = distributed_c10d
# The newest store. It is referenced here because torch's C++ code needs the Python object to stay alive.
_stores: list[WorldStore] = []
_theirs: dict[str, Callable[..., Any]] = {}  # torch's own functions, by name


def install(theirs: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Store torch's own functions, and return their replacements, by name."""
    _theirs.update(theirs)
    return {
        "rendezvous": rendezvous,
        "_new_process_group_helper": new_group,
        "broadcast_object_list": broadcast_object_list,
    }


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Replacement of torch's function ``rendezvous``.

    Under elasticrun, rank and size are known and need not be passed by the script.
    """
    known = worker_settings.read()
    if known.driver is None or not (known.elastic or url.startswith("env:")):
        yield from _theirs["rendezvous"](url, rank, world_size, **options)
        return
    lifecycle.init()
    place = lifecycle.place()
    for name, given, found in (("rank", rank, place.rank), ("world_size", world_size, place.size)):
        if given not in (-1, found) and not known.elastic:
            raise Invalid(
                f"init_process_group got {name}={given}, but this job has {found}: omit rank and world_size,"
                " which elasticrun sets"
            )
    _stores[:] = [store := WorldStore()]
    store.set_timeout(options.get("timeout") or timedelta(seconds=known.collective_timeout_s))
    if not known.elastic:
        store.meet()
    yield store, place.rank, place.size


def new_group(
    size: int,
    rank: int,
    ranks: Any,
    backend: str,
    store: Any,
    name: str,
    *rest: Any,
    **options: Any,
) -> Any:
    """Replacement of torch's ``_new_process_group_helper``."""
    asked, theirs = str(backend), _theirs["_new_process_group_helper"]
    of_this_world = _of_this_world(size, rank, ranks, store)
    if not _kinds(asked) <= _BACKENDS or not of_this_world:
        if of_this_world and worker_settings.read().elastic:
            raise Invalid(
                f"a process group of backend {asked!r} can't follow an elastic job's world when workers are lost or"
                " join: omit the backend, or run a job of a fixed size, without --min-np"
            )
        return theirs(size, rank, ranks, backend, store, name, *rest, **options)
    options |= dict(zip(_MORE, rest, strict=False))
    # drop options specific to Gloo or NCCL
    options["backend_options"] = options["device_id"] = None
    made = theirs(size, rank, ranks, NAME, store, name, **options)
    group, prefixed = made
    if prefixed is not None:
        known: Any = torchs_groups
        known.pg_map[group] = (asked, prefixed)
    return made


def _of_this_world(size: int, rank: int, ranks: Any, store: Any) -> bool:
    """Return whether this is the process group of the world, or of some of its ranks.

    A script may create a process group through its own store, for example of this worker alone.
    """
    if ranks:
        return isinstance(distributed_c10d.GroupMember.WORLD, FollowingGroup)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, WorldStore):
        return True
    rt = lifecycle.active()
    if rt is not None:
        return (rank, size) == (rt.place.rank, rt.place.size)
    return [str(rank), str(size)] == [os.environ.get(each) for each in ("RANK", "WORLD_SIZE")]


def broadcast_object_list(object_list: list[Any], *args: Any, **options: Any) -> None:
    """Replacement of torch's function that does nothing on a worker that has not joined a world.

    On such a worker, torch's own function would receive a size of zero. See `collectives_before_joining`.
    """
    rt = lifecycle.active()
    if rt is None or not rt.provisional:
        _theirs["broadcast_object_list"](object_list, *args, **options)


def _kinds(backend: str) -> set[str]:
    """Return the names of the backends in a string such as ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    return {each.rpartition(":")[2].strip().lower() for each in backend.split(",")}
