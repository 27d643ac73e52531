"""``import horovod.keras as hvd``: for Keras 3, on TensorFlow, torch or JAX. The work is done in `elastic.keras`."""

from __future__ import annotations

from horovod.absent import need as _need

_need("keras", __name__)

from typing import Any

from elastic.api.ops import Adasum, Average, Max, Min, Product, Sum
from elastic.keras import tensors as _tensors
from elastic.keras.distributed_optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from elastic.keras.values import allgather, allreduce, broadcast, reducescatter
from elastic.monitoring.tracing import start_timeline, stop_timeline
from elastic.negotiation.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from elastic.runtime.basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from horovod.keras import callbacks, elastic
from horovod.keras.compression import Compression
from horovod.torch.built_with import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)


def broadcast_global_variables(root_rank: int) -> Any:
    """In a graph of TensorFlow 1: an operation that makes all global variables those of rank ``root_rank``. Raises
    RuntimeError elsewhere: Keras 3 has no global variables; use the callback.
    """
    if _tensors.backend() != "tensorflow":
        raise RuntimeError(
            "Keras has no global variables on this backend;"
            " use hvd.callbacks.BroadcastGlobalVariablesCallback"
        )
    from elastic.tensorflow import variables

    return variables.broadcast_global_variables(root_rank)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
