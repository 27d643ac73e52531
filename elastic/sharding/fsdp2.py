"""Utilities for FSDP2 modules: list sharded parameters, check that they are supported, and move them to another mesh.

The module and its optimizer keep their parameter objects. Each DTensor keeps its global size; only its local tensor and
its spec are replaced. Private names of torch are used (see `tested_torch`).
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from elastic.collectives.dtensor import is_dtensor
from elastic.sharding import dtensor_operators, tested_torch


def sharded_states(model: nn.Module) -> list[Any]:
    """Return the FSDP2 states of a model's modules, each once.

    The result is empty if ``fully_shard`` was not applied.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is None:
        return []
    found = [fsdp._get_module_fsdp_state(module) for module in model.modules()]
    return list({id(state): state for state in found if state is not None}.values())


def sharded_params(model: nn.Module) -> dict[str, Any]:
    """Return torch's ``FSDPParam`` objects in module order, keyed by the first name of the parameter in the model."""
    paths = {id(module): path for path, module in reversed([*model.named_modules()])}
    found = {}
    for group in groups(model):
        for param in group.fsdp_params:
            info = param._module_info
            path = paths[id(info.module)]
            found[f"{path}.{info.param_name}" if path else info.param_name] = param
    return found


def parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield those parameters of a model that an optimizer may train: for fully sharded modules, the shards.

    After a forward pass, ``model.parameters()`` may yield gathered tensors instead.
    """
    yield from model.parameters()
    yield from (param.sharded_param for param in sharded_params(model).values())


def groups(model: nn.Module) -> list[Any]:
    """Return torch's ``FSDPParamGroup`` objects of a model's modules."""
    return [group for state in sharded_states(model) for group in state._fsdp_param_groups]


def untested_version() -> str | None:
    """Return the reason why fully sharded models are not supported with this version of torch, or None if they are."""
    return tested_torch.untested("is fully sharded")


def obstacle(model: nn.Module, size: int | None = None) -> str | None:
    """Return the reason why a fully sharded model cannot be moved to another world, or None if it can.

    Args:
        model: the model.
        size: required number of ranks of its mesh (default: all ranks of the world).
    """
    if why := untested_version():
        return why
    # `remesh` needs this module. Importing it only then would add 0.2 s to the first recovery.
    importlib.import_module("torch.distributed.tensor.debug")
    dtensor_operators.remember()
    if size is None:
        size = torch.distributed.get_world_size()
    ours = {id(param.sharded_param) for param in sharded_params(model).values()}
    for group in groups(model):
        if why := _obstacle_of(group, size):
            return why
        if group.mesh_info.mesh.mesh.tolist() != mesh_of(model).mesh.tolist():
            return "is fully sharded over several meshes"
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_dtensor(tensor) and id(tensor) not in ours:
            return f"contains {name}, a DTensor that is not sharded by fully_shard alone"
    return None


def _obstacle_of(group: Any, size: int) -> str | None:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
        HSDPMeshInfo,
    )
    from torch.distributed.tensor import Shard

    info = group.mesh_info
    kind = {1: FSDPMeshInfo, 2: HSDPMeshInfo}.get(info.mesh.ndim)
    if type(info) is DDPMeshInfo:
        return "is replicated by torch's replicate()"
    if type(info) is not kind or info.is_spmd_mesh:
        return "is fully sharded over dimensions other than (shard) or (replicate, shard)"
    if info.mesh.ndim == 2 and info.mesh._get_root_mesh() is not info.mesh:
        return "is fully sharded over two dimensions of a larger mesh"
    if info.mesh.size() != size:
        return f"is fully sharded over {info.mesh.size()} of the {size} ranks"
    if group.post_forward_mesh_info not in (None, info):
        return "is fully sharded with a number of ranks for reshard_after_forward"
    if type(group.offload_policy) not in (OffloadPolicy, CPUOffloadPolicy):
        return "is fully sharded with an offload policy other than torch's CPUOffloadPolicy"
    if (
        info.reduce_scatter_process_group is not None
        or type(group._all_gather_comm) is not DefaultAllGather
        or type(group._reduce_scatter_comm) is not DefaultReduceScatter
        or group._all_reduce_hook is not None
    ):
        return "is fully sharded with custom collectives, hooks or process groups"
    if group.gradient_divide_factor not in (None, 1.0):
        return (
            f"divides gradients by {group.gradient_divide_factor:g} in each world (set_gradient_divide_factor): call it"
            " at the beginning of the function under elastic.run, which is called again in each world, or not at all"
        )
    for param in group.fsdp_params:
        if param.is_dtensor:
            return "is fully sharded and tensor parallel"
        if param.fsdp_placement != Shard(0):
            return "is fully sharded along a dimension other than the first"
        if hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather"):
            return "is fully sharded and has parameters of a tensor subclass"
    return None


def abandon(model: nn.Module) -> None:
    """Discard the gathered parameters and the gradients that an interrupted forward or backward pass has left."""
    for state in sharded_states(model):
        for group in state._fsdp_param_groups:
            group._all_gather_result = None  # waiting for a failed collective would raise an error
            for param in group.fsdp_params:
                # torch 2.15 and later keep the gradient here
                if "unsharded_accumulated_grad" in vars(param):
                    param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
                param.sharded_param.grad = None
        if state._is_root:
            state._reset_iter_state()


def reshard(groups: Iterable[Any]) -> None:
    """Free the parameters that a forward pass has gathered in these groups, and register the shards again."""
    for group in groups:
        if not group.is_sharded:
            group.reshard()


def mesh_of(model: nn.Module) -> Any:
    """Return the mesh over which the model's parameters are sharded."""
    return groups(model)[0].mesh_info.mesh


def shards_of(mesh: Any) -> tuple[int, int]:
    """Return the number of shards of a mesh, and the index of this rank's shard."""
    return mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)


def lines_of(mesh: Any) -> list[tuple[int, ...]]:
    """Return the ranks of each process group of a two-dimensional mesh: first the columns, then the rows."""
    return [tuple(line) for lines in (mesh.mesh.T, mesh.mesh) for line in lines.tolist()]


def is_over_all(model: nn.Module, size: int, shard: int) -> bool:
    """Return whether the mesh has all ``size`` ranks in ascending order, and this rank holds shard ``shard``."""
    mesh = mesh_of(model)
    return bool(mesh.mesh.tolist() == list(range(size)) and mesh.get_local_rank() == shard)


def make_mesh(like: Any, order: Sequence[int]) -> Any:
    """Create a one-dimensional mesh over the current world.

    All ranks must call this function.

    Args:
        like: mesh to copy the device type and the dimension names from.
        order: rank of each shard, in shard order.
    """
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    names = like.mesh_dim_names
    if list(order) == list(range(len(order))):
        return init_device_mesh(like.device_type, (len(order),), mesh_dim_names=names)
    group = distributed.new_group(list(order), sort_ranks=False)
    assert isinstance(group, distributed.ProcessGroup)
    return DeviceMesh.from_group(group, like.device_type, mesh_dim_names=names)


def make_hybrid_mesh(like: Any, order: Sequence[int], shards: int) -> Any:
    """Create a mesh of replicas by shards over the current world.

    All ranks must call this function.

    Args:
        like: mesh to copy the device type from, and the dimension names if it has two dimensions.
        order: rank at each position of the mesh, row by row.
        shards: number of shards.
    """
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh

    places = torch.tensor(order, dtype=torch.int64, device="cpu").view(-1, shards)
    row, column = divmod(list(order).index(distributed.get_rank()), shards)
    groups: list[Any] = [
        distributed.group.WORLD
        if line == list(range(len(order)))
        # The ranks are in mesh order, which differs from rank order if a worker has taken over a shard. With local
        # synchronization, only the members create the group; otherwise all ranks would have to call new_group() for
        # each row and column.
        else distributed.new_group(line, sort_ranks=False, use_local_synchronization=True)
        for line in (places[:, column].tolist(), places[row].tolist())
    ]
    names = like.mesh_dim_names if like.ndim == 2 else ("replicate", "shard")
    return DeviceMesh.from_group(groups, like.device_type, places, mesh_dim_names=names)


@torch.no_grad()
def remesh(model: nn.Module, mesh: Any) -> dict[str, torch.Tensor]:
    """Move the parameters to another mesh, in place.

    Returns:
        The new local tensors by parameter name. They are uninitialized.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # Two meshes of the same ranks compare equal even if this process had another rank in one of them. DTensor's cache
    # would then give the results of operators a mesh of an earlier world, with this process's old position.
    _clear_sharding_prop_cache()
    info = (
        FSDPMeshInfo(mesh, shard_mesh_dim=0)
        if mesh.ndim == 1
        else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    names = {id(param): name for name, param in sharded_params(model).items()}
    found = {}
    for group in groups(model):
        group.mesh_info = info
        if group.post_forward_mesh_info is not None:
            group.post_forward_mesh_info = info
        for param in group.fsdp_params:
            param.post_forward_mesh_info = group.post_forward_mesh_info
            found[names[id(param)]] = _remesh_param(param, info)
    return found


def _remesh_param(param: Any, info: Any) -> torch.Tensor:
    parameter = param.sharded_param
    # On the meta device, torch computes sizes, padding and spec without allocating memory.
    model = nn.Parameter(
        torch.empty(param._orig_size, dtype=parameter.dtype, device="meta"),
        requires_grad=parameter.requires_grad,
    )
    model._fsdp_orig_uid = param._orig_param_uid  # type: ignore[attr-defined]
    # The parameter that torch creates here is not used. Creating it as a DTensor would also propagate its sharding,
    # which takes 1 ms for each shape.
    param.to_sharded_dtensor = lambda local: local
    try:
        param._init_sharded_param(model, param.device, None, info)
    finally:
        del param.to_sharded_dtensor
    if param.post_forward_mesh_info is not None:
        param._init_sharded_post_forward_param_metadata(model)
    padded = torch.empty(
        param.padded_sharded_param_size,
        dtype=parameter.dtype,
        device="cpu" if param.offload_to_cpu else param.device,
        pin_memory=param.pin_memory,
    )
    local = padded.narrow(0, 0, param.sharded_size[0])
    padded[param.sharded_size[0] :].zero_()  # FSDP2 also gathers the padding of the last shard
    param._sharded_param_data = padded.view(-1)
    parameter._local_tensor, parameter._spec = local, param._sharding_spec
    parameter.grad = None
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    for tensor in param.all_gather_outputs:
        tensor.untyped_storage().resize_(0)
    # The next all-gather recreates these outputs and the gathered parameter.
    param.all_gather_outputs = []
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param
    return local


def as_sharded(local: torch.Tensor, like: torch.Tensor, present: Any) -> Any:
    """Return a DTensor that consists of these local rows and is sharded like the parameter ``like``.

    If ``present`` is a DTensor with the same shape and dtype, it is updated in place and returned.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec: Any = like._spec  # type: ignore[attr-defined]
    if local.dtype != like.dtype:
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    if (
        isinstance(present, DTensor)
        and present.dtype == local.dtype
        and present.shape == like.shape
    ):
        untyped: Any = present
        untyped._local_tensor, untyped._spec = local, spec
        return present
    make: Callable[..., Any] = DTensor
    return make(local, spec, requires_grad=False)


def by_rows(tensor: Any) -> bool:
    """Return whether one mesh dimension shards a DTensor along dimension 0, and the other dimensions replicate it."""
    from torch.distributed.tensor import Shard

    *replicated, sharded = tensor.placements
    return (
        len(replicated) < 2
        and all(each.is_replicate() for each in replicated)
        # type() and not isinstance(), because a strided shard is a subclass
        and type(sharded) is Shard
        and sharded.dim == 0
    )
