"""DiLoCo with a model that FSDP2 shards over the ranks of an island.

Each rank holds its rows of the outer parameters and of the outer optimizer's entries, as DTensors over the mesh of the
island. The leader of an island gathers the changes of a fragment from the members, exchanges them with the other
leaders, and sends each member its rows of the mean. Islands of different sizes therefore exchange the same elements in
the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.collectives import object_exchange
from elastic.collectives.dtensor import is_dtensor
from elastic.diloco.island_group import PURPOSE, IslandGroup, island_group
from elastic.errors import Invalid
from elastic.runtime import lifecycle
from elastic.sharding import fsdp2
from elastic.sharding.row_layout import rows_of

_COPY = "outer parameters of another island"
_PIECE = 64 << 20  # maximum size of a broadcast in bytes


def island_mesh(device_type: str | None = None) -> Any:
    """Return the one-dimensional device mesh of this worker's island, for ``fully_shard(module, mesh=...)``.

    Pass the model to `elastic.DiLoCo`. When the world changes, the parameters of the model are moved to the new mesh of
    the island. Like `island_group`, the first call is collective over all ranks, and must precede ``elastic.run``.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``. Default: ``"cuda"`` if torch can use a GPU.

    Returns:
        A ``torch.distributed.device_mesh.DeviceMesh`` with the ranks of the island in ascending order, and the
        dimension ``"shard"``.

    Raises:
        NotInitialized: ``init()`` was not called.
        Invalid: torch.distributed is not initialized, or see `island_group`.
    """
    if not torch.distributed.is_initialized():
        raise Invalid(
            "elastic.island_mesh() needs torch.distributed: call torch.distributed.init_process_group() before"
        )
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return _mesh(island_group(), kind, ("shard",))


def _mesh(group: IslandGroup, device_type: str, names: tuple[str, ...] | None) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type, mesh_dim_names=names)


def sharded_island(model: nn.Module) -> ShardedIsland | None:
    """Return the model's shards in this island, or None if ``fully_shard`` was not applied to the model.

    Raises:
        Invalid: the model is not sharded over the mesh of the island, or has trained parameters that are not sharded.
    """
    if not fsdp2.sharded_states(model):
        return None
    group, why = _group_of(model)
    if why is None and any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        why = "is sharded by fully_shard and contains DistributedDataParallel"
    if why is None:
        for name, each in model.named_parameters():
            if each.requires_grad and not is_dtensor(each):
                why = f"trains {name}, which is not sharded (ignored_params), so ranks of an island would differ"
                break
    if why is not None:
        raise Invalid(
            f"the model {why}: apply fully_shard(module, mesh=elastic.island_mesh()) to the layers and to the model"
        )
    assert group is not None
    return ShardedIsland(model, group)


def _group_of(model: nn.Module) -> tuple[IslandGroup | None, str | None]:
    """Return the group of the model's mesh, and the reason why the model cannot follow its island, or None."""
    if why := fsdp2.untested_version():
        return None, why
    if not fsdp2.sharded_params(model):
        return None, "has no sharded parameter"
    mesh = fsdp2.mesh_of(model)
    group = mesh.get_group() if mesh.ndim == 1 else None
    if not isinstance(group, IslandGroup):
        return None, "is sharded by fully_shard over another mesh than that of the island"
    return group, fsdp2.obstacle(model, group.getSize())


class TensorShape(NamedTuple):
    """Whole tensor whose rows the ranks of an island hold."""

    shape: tuple[int, ...]

    def elements(self, shard: int, shards: int) -> int:
        """Return the number of elements in one shard."""
        row = 1
        for length in self.shape[1:]:
            row *= length
        return len(rows_of(self.shape[0], shard, shards)) * row


def gathered(parts: Sequence[torch.Tensor], shapes: Sequence[TensorShape]) -> torch.Tensor:
    """Return the elements of whole tensors, one after the other, from the shards of all ranks.

    Args:
        parts: for each shard, the elements of its rows of all tensors, 1-dimensional.
        shapes: shapes of the tensors.
    """
    counts = [[each.elements(shard, len(parts)) for each in shapes] for shard in range(len(parts))]
    pieces = [part.split(own) for part, own in zip(parts, counts, strict=True)]
    return torch.cat([rows[number] for number in range(len(shapes)) for rows in pieces])


def divided(
    whole: torch.Tensor, shapes: Sequence[TensorShape], shards: int
) -> list[list[torch.Tensor]]:
    """Return, for each shard, views of the elements of its rows of each tensor. Inverse of `gathered`.

    Args:
        whole: elements of whole tensors, one after the other, 1-dimensional.
        shapes: shapes of the tensors.
        shards: number of shards.
    """
    counts = [each.elements(shard, shards) for each in shapes for shard in range(shards)]
    pieces = whole.split(counts)
    return [list(pieces[shard::shards]) for shard in range(shards)]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor, and any other tensor unchanged."""
    untyped: Any = tensor
    found: torch.Tensor = untyped._local_tensor if is_dtensor(tensor) else tensor
    return found


def with_rows(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a new tensor with these rows that is sharded like ``like``, or ``local`` if ``like`` is not sharded."""
    found: torch.Tensor = fsdp2.as_sharded(local, like, None) if is_dtensor(like) else local
    return found


class ShardedIsland:
    """Shards of a model in one island.

    Args:
        model: model to which ``fully_shard`` was applied, over the mesh of the island.
        group: group of the island.
    """

    def __init__(self, model: nn.Module, group: IslandGroup) -> None:
        self.model, self.group = model, group
        self._groups = fsdp2.groups(model)

    def reshard(self) -> None:
        """Free the parameters that a forward pass has gathered, so that a change of the shards takes effect."""
        fsdp2.reshard(self._groups)

    def follow(self) -> None:
        """Move the parameters to the mesh of the island in the current world. Their rows are then uninitialized."""
        mesh = fsdp2.mesh_of(self.model)
        # get_local_rank() of the mesh is the rank in the current world. The coordinate is that of the mesh's own world.
        if mesh.mesh.tolist() != list(self.group.islands.members) or (
            list(mesh.get_coordinate()) != [self.group.getRank()]
        ):
            fsdp2.remesh(self.model, _mesh(self.group, mesh.device_type, mesh.mesh_dim_names))

    def gather(
        self, rows: Sequence[torch.Tensor], shapes: Sequence[TensorShape], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Gather whole tensors on the leader. Collective in the island.

        Args:
            rows: this rank's rows of each tensor.
            shapes: shapes of the whole tensors.
            dtype: dtype of the result.

        Returns:
            On the leader, the elements of all tensors one after the other. On other ranks, None.

        Raises:
            PeerLost: a rank was lost.
        """
        own = torch.cat([each.reshape(-1).to(dtype) for each in rows])
        size, leads = self.group.getSize(), self.group.islands.leads
        if size == 1:
            return own
        counts = self._counts(shapes)
        found = torch.empty(sum(counts) if leads else 0, dtype=dtype, device=own.device)
        self.group.all_to_all_single(
            found, own, counts if leads else [0] * size, [len(own), *[0] * (size - 1)]
        ).wait()
        return gathered(found.split(counts), shapes) if leads else None

    def scatter(
        self,
        whole: torch.Tensor | None,
        shapes: Sequence[TensorShape],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Send each rank its rows of whole tensors. Inverse of `gather`. Collective in the island.

        Args:
            whole: on the leader, the elements of all tensors one after the other. On other ranks, ignored.
            shapes: shapes of the whole tensors.
            dtype: dtype of ``whole``, equal on all ranks.
            device: device of ``whole``.

        Returns:
            The elements of this rank's rows of all tensors, 1-dimensional.

        Raises:
            PeerLost: a rank was lost.
        """
        size, leads = self.group.getSize(), self.group.islands.leads
        if size == 1:
            assert whole is not None
            return whole
        counts = self._counts(shapes)
        sent = torch.empty(0, dtype=dtype, device=device)
        if leads:
            assert whole is not None
            sent = torch.cat([each for shard in divided(whole, shapes, size) for each in shard])
        own = counts[self.group.getRank()]
        found = torch.empty(own, dtype=dtype, device=device)
        self.group.all_to_all_single(
            found, sent, [own, *[0] * (size - 1)], counts if leads else [0] * size
        ).wait()
        return found

    def _counts(self, shapes: Sequence[TensorShape]) -> list[int]:
        size = self.group.getSize()
        return [sum(each.elements(shard, size) for each in shapes) for shard in range(size)]

    def copy_between(
        self, root: int, lacking: Sequence[int], tensors: Iterable[ShardedRows | torch.Tensor]
    ) -> None:
        """Copy tensors from one island to others, in place. Collective among the ranks of these islands.

        Args:
            root: leader of the island that sends.
            lacking: leaders of the islands that receive.
            tensors: tensors in an order that is equal on all ranks: rows of sharded tensors, or replicated tensors.

        Raises:
            PeerLost: a rank was lost.
        """
        islands = self.group.islands
        leaders = tuple(sorted({root, *lacking}))
        sends = islands.leader == root
        for each in tensors:
            rows = each.rows if isinstance(each, ShardedRows) else each
            whole: torch.Tensor | None = None
            if sends and isinstance(each, ShardedRows):
                whole = self.gather([rows], [each.shape], rows.dtype)
            elif islands.leads:
                elements = rows.numel()
                if isinstance(each, ShardedRows):
                    elements = each.shape.elements(0, 1)
                whole = torch.empty(elements, dtype=rows.dtype, device=rows.device)
                if sends:
                    whole.copy_(rows.reshape(-1))
            if islands.leads:
                assert whole is not None
                whole = _broadcast(whole, root, leaders)
            if sends:
                continue
            if isinstance(each, ShardedRows):
                found = self.scatter(whole, [each.shape], rows.dtype, rows.device)
            else:
                found = rows.new_empty(rows.numel()) if whole is None else whole
                self.group.share(found, islands.leader)
            with torch.no_grad():
                rows.copy_(found.view(rows.shape))

    def copy_object(self, value: Any, root: int, lacking: Sequence[int]) -> Any:
        """Send a picklable value from the leader of one island to the ranks of others, and return it.

        Collective among the leaders and the ranks of the receiving islands. Ranks of the sending island return
        ``value``.

        Raises:
            PeerLost: a rank was lost.
        """
        islands = self.group.islands
        leaders = tuple(sorted({root, *lacking}))
        if islands.leads:
            rt = lifecycle.current()
            with rt.guard(_COPY):
                group = rt.group(PURPOSE, torch.device("cpu"), leaders)
                value = object_exchange.broadcast(group, value, leaders.index(root))
        if islands.leader != root and len(islands.members) > 1:
            value = self.group.broadcast_object(value, islands.leader)
        return value


class ShardedRows(NamedTuple):
    """This rank's rows of a sharded tensor."""

    rows: torch.Tensor
    shape: TensorShape


def _broadcast(whole: torch.Tensor, root: int, leaders: tuple[int, ...]) -> torch.Tensor:
    rt = lifecycle.current()
    moved = whole.cpu()
    content = moved.view(torch.uint8) if moved.numel() else moved
    with rt.guard(_COPY):
        group = rt.group(PURPOSE, torch.device("cpu"), leaders)
        for begin in range(0, len(content), _PIECE):
            group.broadcast(content[begin : begin + _PIECE], leaders.index(root)).wait()
    return moved.to(whole.device)


class OuterEntry(NamedTuple):
    """Entry of the outer optimizer that is sharded like its parameter."""

    parameter: int  # index of the outer parameter
    key: Any
    dtype: torch.dtype
    plain: (
        bool  # whether the optimizer stores this rank's rows as a plain tensor instead of a DTensor
    )


class OuterOptimizer(NamedTuple):
    """Description of the outer optimizer of an island, without its sharded entries."""

    options: list[dict[str, Any]]  # options of the parameter groups
    values: dict[int, dict[Any, Any]]  # entries that are not sharded, by index of the parameter
    sharded: list[OuterEntry]


def described(optimizer: torch.optim.Optimizer, outer: Sequence[torch.Tensor]) -> OuterOptimizer:
    """Describe an outer optimizer.

    Raises:
        Invalid: an entry is neither a scalar nor sharded like its parameter.
    """
    values: dict[int, dict[Any, Any]] = {}
    sharded: list[OuterEntry] = []
    for index, parameter in enumerate(outer):
        if parameter not in optimizer.state:
            continue
        own = values.setdefault(index, {})
        for key, entry in optimizer.state[parameter].items():
            if not isinstance(entry, torch.Tensor) or (not is_dtensor(entry) and not entry.dim()):
                own[key] = copy.deepcopy(entry)
                continue
            plain = not is_dtensor(entry)
            if local_of(entry).shape != local_of(parameter).shape:
                raise Invalid(
                    f"the outer optimizer keeps {key!r} of shape {list(entry.shape)} for a sharded parameter of shape"
                    f" {list(parameter.shape)}: use an optimizer such as SGD, Adam or AdamW"
                )
            sharded.append(OuterEntry(index, key, entry.dtype, plain))
    options = [
        {key: copy.deepcopy(each) for key, each in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return OuterOptimizer(options, values, sharded)


def adopt_outer(
    optimizer: torch.optim.Optimizer,
    outer: Sequence[torch.Tensor],
    theirs: OuterOptimizer,
    indices: Iterable[int],
) -> None:
    """Set the options of an outer optimizer, and its entries of some parameters, to those of another island.

    Sharded entries are created, but keep uninitialized rows.

    Args:
        optimizer: outer optimizer of this rank.
        outer: outer parameters.
        theirs: description of the other island's optimizer.
        indices: indices of the parameters.
    """
    for group, options in zip(optimizer.param_groups, theirs.options, strict=True):
        group.update(copy.deepcopy(options))
    for index in indices:
        parameter = outer[index]
        if index in theirs.values:
            optimizer.state[parameter] = copy.deepcopy(theirs.values[index])
        else:
            optimizer.state.pop(parameter, None)
    wanted = {*indices}
    for entry in theirs.sharded:
        if entry.parameter not in wanted:
            continue
        parameter = outer[entry.parameter]
        rows = torch.empty_like(local_of(parameter).detach(), dtype=entry.dtype)
        made = rows if entry.plain else fsdp2.as_sharded(rows, parameter, None)
        optimizer.state[parameter][entry.key] = made


def outer_rows(
    optimizer: torch.optim.Optimizer,
    outer: Sequence[torch.Tensor],
    theirs: OuterOptimizer,
    indices: Sequence[int],
) -> Iterator[ShardedRows]:
    """Yield the rows of outer parameters and of their entries, in the order of the description."""
    for index in indices:
        yield sharded_rows(outer[index])
    wanted = {*indices}
    for entry in theirs.sharded:
        if entry.parameter in wanted:
            parameter = outer[entry.parameter]
            rows = local_of(optimizer.state[parameter][entry.key])
            yield ShardedRows(rows, TensorShape(tuple(parameter.shape)))


def sharded_rows(tensor: torch.Tensor) -> ShardedRows:
    """Return this rank's rows of a DTensor that is sharded along its first dimension."""
    return ShardedRows(local_of(tensor).detach(), TensorShape(tuple(tensor.shape)))
