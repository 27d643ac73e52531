"""``torch.distributed.ProcessGroup`` that remains usable when the world changes.

Rank and size are computed at each use, because torch's C++ code does not cache them. Each collective runs on the group
of the world in which it is called.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _world as torchs_groups

from elastic.collectives.interface import Collectives
from elastic.errors import CollectiveFailed, Fixed, Invalid, NotElastic
from elastic.monitoring import moved_tensors
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.sharding import unsupported_sharding
from elastic.torch_backend.collective_calls import CollectiveCall
from elastic.torch_backend.collectives_before_joining import MirrorCollectives
from elastic.torch_backend.group_names import names
from elastic.torch_backend.point_to_point import AT_ONCE, PointToPointMessages
from elastic.torch_backend.works import ElasticWork, Futures, joined, recorded

NAME = "elastic"
# untyped, because torch's stubs have other argument names and additional overloads
_TorchProcessGroup: Any = distributed.ProcessGroup


class FollowingGroup(_TorchProcessGroup):  # type: ignore[misc]
    """Process group whose ranks and size change with the worlds of an elastic job.

    Args:
        store: torch's store.
        purpose: name that distinguishes the group from other groups of the same ranks.
        ranks: ranks of the world in group order, or None for all ranks of any world.
        timeout_s: timeout of a collective in seconds. None means the job's own limit.
    """

    group_name = group_desc = ""
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(
        self, store: Any, purpose: str, ranks: tuple[int, ...] | None, timeout_s: float | None
    ) -> None:
        rt = lifecycle.current()
        place = rt.place
        members = range(place.size) if ranks is None else ranks
        super().__init__(members.index(place.rank), len(members))
        self.purpose = purpose
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.futures = Futures(self)
        self.messages = PointToPointMessages(f"{purpose} messages", ranks)
        self._store = store
        self._groups: dict[str, tuple[int, Collectives]] = {}  # (generation, group) by device type
        self._submitting = threading.Lock()
        self._together: list[ElasticWork] | None = None
        self._count = 0
        self._of = place.size
        self._born = names.generation  # generation at creation, or 0 before elastic.run
        self._outlived = False
        if rt.elastic:
            self.messages.expect(rt)
        elif 1 < len(members) <= AT_ONCE:
            # Connect now, while all ranks of the group are in this call: a later connection would not be limited by
            # this group's timeout.
            self._group(rt, torch.device("cpu"))
            self.messages.connect(rt)

    # ---- place of this rank --------------------------------------------------------------------------------------

    def getRank(self) -> int:
        rank = lifecycle.place().rank
        if self.ranks is None:
            return rank
        return self.ranks.index(rank) if rank in self.ranks else -1

    def getSize(self) -> int:
        return lifecycle.place().size if self.ranks is None else len(self.ranks)

    rank, size = getRank, getSize

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    def setGroupName(self, name: str) -> None:
        self.group_name = name

    def setGroupDesc(self, text: str) -> None:
        self.group_desc = text

    def get_group_store(self) -> Any:
        return self._store

    def device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def registered_device_types(self) -> list[torch.device]:
        """Return the device types, or an empty list until torch has registered the group.

        torch 2.15 attaches its flight recorder to each new group with devices, and fails if the group is not in C++.
        """
        return self.device_types() if self in torchs_groups.pg_map else []

    def backend_of(self, device: torch.device) -> FollowingGroup:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Drop the groups of the world, because they end with the world."""
        self._groups.clear()

    abort = shutdown

    # ---- coalescing ----------------------------------------------------------------------------------------------

    def start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def end_coalescing(self, device: torch.device) -> ElasticWork:
        works, self._together = self._together or [], None
        return joined(self, "coalesced collectives", works, self.futures)

    def reset_sequence_number(self) -> None:
        self._count = 0

    def sequence_number(self) -> int:
        return self._count

    # ---- calls ---------------------------------------------------------------------------------------------------

    def guard(self, name: str) -> AbstractContextManager[None]:
        return lifecycle.current().guard(name)

    def fits(self, size: int) -> bool:
        """Return whether the group is valid in the current world of ``size`` ranks."""
        if self._outlived or (self._born != names.generation and self._born):
            return False
        return self.ranks is None or size == self._of

    def outlive(self) -> bool:
        """Invalidate the group if it was created before elastic.run for only some of the ranks.

        This method is called when the world in which it was created has ended.

        Returns:
            Whether the group is invalid from now on.
        """
        self._outlived = self._born == 0 and self.ranks is not None
        return self._outlived

    def metadata(self, rt: WorkerRuntime) -> dict[str, str]:
        """Return the metadata that `enter` uses in the next world. Only subclasses have some."""
        return {}

    def enter(self, rt: WorkerRuntime) -> None:
        """Adopt the ranks of a new world. This method is called on all ranks in the same order."""
        self.messages.expect(rt)

    def settle(self, rt: WorkerRuntime) -> None:
        """Complete the exchange with other ranks that `enter` has started. Only subclasses start one."""

    def generation(self) -> int:
        return lifecycle.current().generation

    def in_world(self, rank: int) -> int:
        return rank if self.ranks is None else self.ranks[rank]

    def broke(self, error: CollectiveFailed, generation: int) -> None:
        rt = lifecycle.active()
        if rt is not None:
            rt.mark_broken(generation, str(error))

    def settles(self) -> bool:
        return lifecycle.current().training.in_user_code

    def call(
        self,
        name: str,
        on: torch.Tensor | torch.device,
        begin: Callable[[Collectives], CollectiveCall],
        results: list[torch.Tensor],
        opts: Any,
    ) -> ElasticWork:
        """Begin a collective on the group for this device. Calls of one process group begin in the order they are made.

        Raises:
            PeerLost: a rank was lost.
            CollectiveFailed: a rank was lost, in a job of fixed size.
        """
        device = on.device if isinstance(on, torch.Tensor) else on
        rt = lifecycle.current()
        group = self._group(rt, device)
        moved_tensors.took(results)
        with rt.guard(name), recorded(name), self._submitting:
            begun = begin(group)
            self._count += 1
        work = self.under_way(name, begun, results, opts)
        if self._together is not None:
            self._together.append(work)
        elif begun.thens and opts is not None and opts.asyncOp:
            work.get_future()  # the results are then stored even if the script drops the work
        return work

    def under_way(
        self, name: str, begun: CollectiveCall, results: list[torch.Tensor], opts: Any = None
    ) -> ElasticWork:
        asked_s = opts.timeout.total_seconds() if opts is not None else -1.0
        limit_s = asked_s if asked_s > 0 else self.timeout_s
        later = opts is not None and bool(opts.asyncOp)
        return ElasticWork(self, name, begun, results, limit_s, self.futures, read_later=later)

    def with_others(self, name: str) -> WorkerRuntime:
        """Return the runtime, for an exchange with other ranks.

        Raises:
            Invalid: the world has no other rank.
        """
        rt = lifecycle.current()
        if rt.provisional or self.getSize() == 1:
            raise Invalid(
                f"{name} needs another rank, but this rank is the only one in the current world: check"
                " get_world_size() before the call, or start more workers"
            )
        return rt

    def _group(self, rt: WorkerRuntime, device: torch.device) -> Collectives:
        generation = rt.generation
        known = self._groups.get(device.type)
        if known is not None and known[0] == generation and not rt.broken:
            return known[1]
        if not self.fits(rt.place.size):
            raise NotElastic(
                f"a process group of ranks {list(self.ranks or range(self._of))} was created in an earlier world of"
                f" {self._of} workers: create it with new_group() at the beginning of the function under elastic.run",
                Fixed.PROCESS_GROUP,
            )
        if rt.provisional:
            return MirrorCollectives(self.getRank(), self.getSize())
        group = rt.group(self.purpose, device, self.ranks)
        self._groups[device.type] = (generation, group)
        return group


def follow(rt: WorkerRuntime, *, first: bool) -> None:
    """Update torch.distributed's process groups to a new world.

    Groups that were created under elastic.run in an earlier world are destroyed. So are the groups of meshes of fully
    sharded models, since these receive another mesh.

    Args:
        rt: the runtime.
        first: whether this worker enters elastic.run together with all other workers, in the world in which it created
            its groups.

    Raises:
        NotElastic: a group of some of the ranks was created before elastic.run, and ranks have moved since. Raised on
            every rank.
    """
    size = rt.place.size
    names.enter(rt.generation)
    if not first:
        unsupported_sharding.enter_world()
    others = [*(Counter(names.before) - Counter(unsupported_sharding.followed_groups()))]
    if others and not first:
        raise NotElastic(
            f"a process group of ranks {list(others[0])} was created before elastic.run, but its ranks were"
            " reassigned in the current world: create the group with new_group() or init_device_mesh() at the"
            " beginning of the function under elastic.run, which is called again in every world",
            Fixed.PROCESS_GROUP,
        )
    known: Any = torchs_groups
    for group in list(known.pg_map):
        if not isinstance(group, FollowingGroup):
            continue
        if not first and group.outlive():
            continue  # later calls of this group raise an error that states the reason
        if not group.fits(size):
            distributed.destroy_process_group(group)
            continue
        group.enter(rt)
        _register_ranks(group, size)


def metadata(rt: WorkerRuntime) -> dict[str, str]:
    """Return the metadata with which groups adapt to the next world. See `WorkerRuntime.start_exchange`."""
    known: Any = torchs_groups
    found: dict[str, str] = {}
    for group in known.pg_map:
        if isinstance(group, FollowingGroup):
            found |= group.metadata(rt)
    return found


def settle(rt: WorkerRuntime) -> None:
    """Complete `follow`, after other exchanges that could run at the same time.

    Raises:
        PeerLost: a rank was lost.
    """
    known: Any = torchs_groups
    for group in list(known.pg_map):
        if isinstance(group, FollowingGroup):
            group.settle(rt)
            _register_ranks(group, rt.place.size)


def _register_ranks(group: FollowingGroup, size: int) -> None:
    known: Any = torchs_groups
    ranks = range(size) if group.ranks is None else group.ranks
    known.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}


# Aliases that torch's own code uses.
for _theirs, _ours in {
    "_set_group_name": FollowingGroup.setGroupName,
    "_set_group_desc": FollowingGroup.setGroupDesc,
    "_device_types": property(FollowingGroup.registered_device_types),
    "_get_backend": FollowingGroup.backend_of,
    "_set_default_timeout": FollowingGroup.set_timeout,
    "_start_coalescing": FollowingGroup.start_coalescing,
    "_end_coalescing": FollowingGroup.end_coalescing,
    "_set_sequence_number_for_group": FollowingGroup.reset_sequence_number,
    "_get_sequence_number_for_group": FollowingGroup.sequence_number,
}.items():
    setattr(FollowingGroup, _theirs, _ours)
