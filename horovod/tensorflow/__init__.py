"""``import horovod.tensorflow as hvd``: Horovod's names for what `elastic.tensorflow` and `elastic.keras` do."""

from __future__ import annotations

from horovod.absent import need as _need

_need("tensorflow", __name__)

from elastic.keras.any_optimizer import DistributedOptimizer
from elastic.tensorflow.compression import Compression
from elastic.tensorflow.sync_batch_norm import SyncBatchNormalization
from elastic.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from elastic.tensorflow.variables import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.tensorflow import elastic, mpi_ops
from horovod.tensorflow.mpi_ops import *  # noqa: F403


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether so many ranks can use Adasum."""
    from horovod.common.util import num_rank_is_power_2

    return num_rank_is_power_2(num_rank)


__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "elastic",
]
__all__ += mpi_ops.__all__
