"""Horovod's API for Keras 3 on TensorFlow, torch or JAX: ``import horovod.keras as hvd``.

The implementation is in `elastic.keras`.
"""

from __future__ import annotations

from horovod.unavailable import need_keras as _need

_need(__name__)

from typing import Any

from elastic.api.compression import Compression
from elastic.keras import backends as _tensors
from elastic.keras.distributed_optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from elastic.keras.value_collectives import allgather, allreduce, broadcast, reducescatter
from horovod.common import common_api as _door
from horovod.common.common_api import *  # noqa: F403
from horovod.keras import callbacks, elastic


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that broadcasts all global variables of a TensorFlow 1 graph from rank ``root_rank``.

    Raises:
        RuntimeError: there is no such graph, because Keras 3 has no global variables. Use the callback
            `BroadcastGlobalVariablesCallback` instead.
    """
    if _tensors.backend() != "tensorflow":
        raise RuntimeError(
            "Keras has no global variables on this backend: use hvd.callbacks.BroadcastGlobalVariablesCallback"
        )
    from elastic.tensorflow import broadcasting

    return broadcasting.broadcast_global_variables(root_rank)


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _door.__all__
