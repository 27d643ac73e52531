"""Horovod's API for torch: ``import horovod.torch as hvd``. The implementation is in `elastic`."""

from __future__ import annotations

import warnings
from importlib import metadata

from elastic.api import broadcasting as _broadcasting
from elastic.api import ops as _ops
from elastic.api.broadcasting import *  # noqa: F403
from elastic.api.compression import Compression
from elastic.api.ops import *  # noqa: F403
from elastic.api.sync_batch_norm import SyncBatchNorm
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from horovod.common import common_api as _door
from horovod.common.built_with import check_has_gpu as _check_has_gpu
from horovod.common.common_api import *  # noqa: F403
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch import elastic, mpi_ops
from horovod.torch.mpi_ops import *  # noqa: F403


def _warn_of_another_horovod() -> None:
    """Warn if two installed distributions provide the package ``horovod``.

    The order of their installation determines which one a script imports.
    """
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"Horovod {version} is installed too, but `import horovod` loads hvd-elastic; run `pip uninstall horovod`, or"
        " keep the two in separate environments",
        stacklevel=3,
    )


_warn_of_another_horovod()

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "_check_has_gpu",
    "elastic",
]
# mpi_ops has all of these names, but type checkers cannot detect this.
__all__ += mpi_ops.__all__
__all__ += _broadcasting.__all__
__all__ += _ops.__all__
__all__ += _door.__all__
