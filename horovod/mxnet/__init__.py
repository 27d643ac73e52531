"""Horovod's API for MXNet: ``import horovod.mxnet as hvd``. The implementation is in `elastic.mxnet`."""

from horovod.unavailable import need as _need

_need("mxnet", __name__)

from elastic.mxnet import ops as _ops
from elastic.mxnet.compression import Compression
from elastic.mxnet.ops import *  # noqa: F403
from elastic.mxnet.optimizer import DistributedOptimizer, DistributedTrainer
from elastic.mxnet.parameters import broadcast_parameters
from horovod.common import common_api as _door
from horovod.common.common_api import *  # noqa: F403
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.mxnet import elastic, mpi_ops
from horovod.mxnet.functions import allgather_object, broadcast_object
from horovod.mxnet.mpi_ops import *  # noqa: F403

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "elastic",
]
# mpi_ops has all of these names, but type checkers cannot detect this.
__all__ += mpi_ops.__all__
__all__ += _ops.__all__
__all__ += _door.__all__
