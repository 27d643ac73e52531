"""Process group of this worker's island, for DistributedDataParallel within DiLoCo."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._C._distributed_c10d import _register_process_group
from torch.distributed.distributed_c10d import _world as torchs_groups

from elastic.collectives import object_exchange
from elastic.diloco.islands import Islands
from elastic.errors import Invalid
from elastic.pickling import pickled
from elastic.protocol.islands import island_of
from elastic.runtime import lifecycle
from elastic.runtime.guarded_groups import ByteExchange
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.torch_backend import comm_hooks, shared_buckets
from elastic.torch_backend.following_group import NAME
from elastic.torch_backend.group_names import names
from elastic.torch_backend.process_group import ElasticProcessGroup

PURPOSE = "island"
ISLANDS = "islands"  # name of the exchange of the islands' names


class IslandGroup(ElasticProcessGroup):
    """Process group of this worker's island. Its ranks are updated when the world changes.

    Attributes:
        islands: the islands of the current world.
    """

    def __init__(self) -> None:
        rt = lifecycle.current()
        # names of the islands, which the ranks of a new world are exchanging
        self._names: ByteExchange | None = None
        self.islands = _islands_of(rt, _exchanged_names(rt))
        comm_hooks.replace()
        shared_buckets.replace()
        super().__init__(None, PURPOSE, self.islands.members, None)

    def metadata(self, rt: WorkerRuntime) -> dict[str, str]:
        return {ISLANDS: _own_name(rt)}

    def enter(self, rt: WorkerRuntime) -> None:
        """Start the exchange of the islands' names, which `settle` completes, and then to connect the group."""
        place, generation = rt.place, rt.generation

        def connect(names: list[bytes]) -> None:
            rt.form_ahead(PURPOSE, _named_islands(names, place.rank).members, generation)

        self._names = _exchanged_names(rt, connect)

    def settle(self, rt: WorkerRuntime) -> None:
        self.islands = _islands_of(rt, self._names)
        self._names = None
        self.ranks = self.islands.members
        self.messages.move(self.ranks)
        self.messages.expect(rt)

    def fits(self, size: int) -> bool:
        """Return whether the group can be used in the current world: always True."""
        return True

    def outlive(self) -> bool:
        """Return whether the group became unusable: always False, because `enter` sets its ranks in the next world."""
        return False

    def share(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast a tensor in place from a rank of the world.

        Raises:
            PeerLost: a rank was lost.
        """
        assert self.ranks is not None
        self.broadcast([tensor], root=self.ranks.index(root)).wait()

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Broadcast any picklable value from a rank of the world, and return it. See `broadcast_object`.

        Raises:
            PeerLost: a rank was lost.
        """
        assert self.ranks is not None
        rt = lifecycle.current()
        sends = rt.place.rank == root
        content = pickled(value) if sends else b""
        group = rt.group(PURPOSE, torch.device("cpu"), self.ranks)
        with rt.guard("state of the island"):
            content = object_exchange.broadcast_bytes(group, content, self.ranks.index(root))
        return value if sends else pickle.loads(content)

    def rows(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Gather a tensor from each member of the island, in rank order.

        Raises:
            PeerLost: a rank was lost.
        """
        rows = [torch.empty_like(row) for _ in range(self.getSize())]
        self.allgather([rows], [row]).wait()
        return rows


_group: IslandGroup | None = None


def island_group() -> IslandGroup:
    """Return the process group of this worker's island, for ``DistributedDataParallel(model, process_group=...)``.

    Pass the DDP model to `elastic.DiLoCo`. An island is a host, or all hosts of one ``--islands`` rule. The group is
    the same object for the lifetime of the process: its ranks are those of the current world. The first call is
    collective over all ranks, and must precede ``elastic.run``.

    Raises:
        NotInitialized: ``init()`` was not called.
        Invalid: the first call is in the function under ``elastic.run``. A joining worker has not reached this call
            when the other workers exchange their islands.
    """
    global _group
    if _group is None or _group not in _known.pg_map:
        if names.generation:
            raise Invalid(
                "elastic.island_group() was first called under elastic.run: call it before, where the model is built"
            )
        _group = IslandGroup()
        _known.pg_map[_group] = (NAME, None)
        _known.pg_names[_group] = PURPOSE
        # DTensors find the group of their mesh by its name.
        _group.setGroupName(PURPOSE)
        _register_process_group(cast(Any, PURPOSE), _group)
        _known.pg_backend_config[_group] = f"cpu:{NAME},cuda:{NAME}"
        _known.pg_group_ranks[_group] = {
            rank: index for index, rank in enumerate(_group.islands.members)
        }
    return _group


_known: Any = torchs_groups


def _exchanged_names(
    rt: WorkerRuntime, then: Callable[[list[bytes]], None] | None = None
) -> ByteExchange | None:
    """Start to exchange the names of the ranks' islands.

    Collective, except on a worker that has not joined a world yet or is alone in it, where None is returned.
    """
    if rt.provisional or rt.place.size == 1:
        return None
    return rt.start_exchange(ISLANDS, _own_name(rt).encode(), then)


def _islands_of(rt: WorkerRuntime, names: ByteExchange | None) -> Islands:
    """Return the islands of the world, given the result of `_exchanged_names`.

    Raises:
        PeerLost: a rank was lost.
    """
    place = rt.place
    if rt.provisional:
        return Islands.apart(place.size, place.rank)
    if names is None:
        return Islands((_own_name(rt),), 0)
    with rt.guard("names of the islands"):
        return _named_islands(names.wait(), place.rank)


def _named_islands(names: Sequence[bytes], rank: int) -> Islands:
    return Islands(tuple(name.decode() for name in names), rank)


def _own_name(rt: WorkerRuntime) -> str:
    host = socket.gethostname() if rt.env.driver is None else rt.env.worker.host
    return island_of(host, rt.env.islands)
