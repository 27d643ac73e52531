"""Horovod's API for TensorFlow: ``import horovod.tensorflow as hvd``.

The implementation is in `elastic.tensorflow` and `elastic.keras`.
"""

from horovod.unavailable import need as _need
from horovod.unavailable import need_keras as _need_keras

_need("tensorflow", __name__)
_need_keras(__name__)

from elastic.keras.tensorflow_optimizer import DistributedOptimizer
from elastic.tensorflow import ops as _ops
from elastic.tensorflow.broadcasting import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from elastic.tensorflow.compression import Compression
from elastic.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from elastic.tensorflow.ops import *  # noqa: F403
from elastic.tensorflow.sync_batch_norm import SyncBatchNormalization
from elastic.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from horovod.common import common_api as _door
from horovod.common.common_api import *  # noqa: F403
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from horovod.tensorflow import elastic, mpi_ops
from horovod.tensorflow.mpi_ops import *  # noqa: F403

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LocalGradientAggregationHelper",
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
# mpi_ops has all of these names, but type checkers cannot detect this.
__all__ += mpi_ops.__all__
__all__ += _ops.__all__
__all__ += _door.__all__
