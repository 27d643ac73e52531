"""Gives a script that asks for Gloo, for NCCL or for no backend in particular ours, and its own rank. Acts.

For workers that elasticrun has started: `elastic.torch_autoload`. Two functions of torch.distributed are replaced, by
which all its process groups are made: the one that finds rank, size and store for ``env://``, and the one that makes a
process group of a backend's name. What a script asks of a group by ``get_backend()`` is what it has asked for. A third
one, ``broadcast_object_list``, leaves a worker that has joined no world yet what it has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world as torchs_groups

from elastic.errors import Invalid
from elastic.rendezvous import environment
from elastic.runtime import lifecycle
from elastic.torch_backend.following_group import NAME, FollowingGroup
from elastic.torch_backend.world_store import WorldStore

_BACKENDS = {"gloo", "nccl", "undefined", NAME}
_MORE = ("backend_options", "timeout", "pg_tag", "device_id", "group_desc")
_torch: Any = distributed_c10d
# The last one; torch's C++, which alone would hold it, needs the object of Python.
_stores: list[WorldStore] = []
_theirs: dict[str, Callable[..., Any]] = {}  # torch's own functions, by name


def install(theirs: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """What stands in their place, by name."""
    _theirs.update(theirs)
    return {
        "rendezvous": rendezvous,
        "_new_process_group_helper": new_group,
        "broadcast_object_list": broadcast_object_list,
    }


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    """As torch's. Under elasticrun the place of this worker is known, and need not be told in the script."""
    known = environment.read()
    if known.driver is None or not (known.elastic or url.startswith("env:")):
        yield from _theirs["rendezvous"](url, rank, world_size, **options)
        return
    lifecycle.init()
    place = lifecycle.place()
    for name, told, found in (("rank", rank, place.rank), ("world_size", world_size, place.size)):
        if told not in (-1, found) and not known.elastic:
            raise Invalid(
                f"init_process_group was given {name} {told}, and in this job it is {found};"
                " leave rank and world_size out, they are known"
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
    """As torch's ``_new_process_group_helper``."""
    asked, theirs = str(backend), _theirs["_new_process_group_helper"]
    of_this_world = _of_this_world(size, rank, ranks, store)
    if not _kinds(asked) <= _BACKENDS or not of_this_world:
        if of_this_world and environment.read().elastic:
            raise Invalid(
                f"a process group of backend {asked!r} can't follow an elastic job's world when workers are lost or"
                " join: leave the backend out, or run a job of a fixed size, without --min-np"
            )
        return theirs(size, rank, ranks, backend, store, name, *rest, **options)
    options |= dict(zip(_MORE, rest, strict=False))
    options["backend_options"] = options["device_id"] = None  # they are Gloo's or NCCL's
    made = theirs(size, rank, ranks, NAME, store, name, **options)
    group, prefixed = made
    if prefixed is not None:
        known: Any = torchs_groups
        known.pg_map[group] = (asked, prefixed)
    return made


def _of_this_world(size: int, rank: int, ranks: Any, store: Any) -> bool:
    """Whether it is the world's process group, or one of some of its ranks. A script may have another one of its own,
    through a store of its own: of this worker alone, say.
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
    """As torch's, whose receiver reads how many bytes come; to a newcomer none do. See `mirror`."""
    rt = lifecycle.active()
    if rt is None or not rt.provisional:
        _theirs["broadcast_object_list"](object_list, *args, **options)


def _kinds(backend: str) -> set[str]:
    """Of ``gloo``, or ``cpu:gloo,cuda:nccl``."""
    return {each.rpartition(":")[2].strip().lower() for each in backend.split(",")}
