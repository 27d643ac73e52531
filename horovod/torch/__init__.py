"""``import horovod.torch as hvd``: Horovod's names for what `elastic` does, and the quirks that only scripts know."""

from __future__ import annotations

import warnings
from importlib import metadata
from typing import Any

from elastic.broadcasting import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from elastic.compression import Compression
from elastic.horovod_errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
)
from elastic.optimizer import DistributedOptimizer
from horovod.torch import elastic
from horovod.torch.built_with import check_has_gpu as _check_has_gpu
from horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    rocm_built,
    shutdown,
    size,
    sparse_allreduce_async,
    synchronize,
)

# Horovod's names that nothing stands behind yet.
_NOT_YET = {
    "ProcessSet",
    "SyncBatchNorm",
    "add_process_set",
    "join",
    "remove_process_set",
    "start_timeline",
    "stop_timeline",
}


def __getattr__(name: str) -> Any:
    if name in _NOT_YET:
        raise AttributeError(f"horovod.torch.{name} is not available in hvd-elastic yet")
    raise AttributeError(f"module 'horovod.torch' has no attribute {name!r}")


def _warn_of_another_horovod() -> None:
    """Two distributions with one import name: which one a script gets depends on the order of installation."""
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"Horovod {version} is installed beside hvd-elastic, which `import horovod` means here;"
        " run `pip uninstall horovod`, or keep the two in separate environments",
        stacklevel=3,
    )


_warn_of_another_horovod()

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "Product",
    "Sum",
    "_check_has_gpu",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]
