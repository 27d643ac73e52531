"""Elastic, fault-tolerant data-parallel training for PyTorch, with Horovod's API.

Names are imported on first access. Importing ``elastic`` starts no threads or processes and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic.conflicting_packages import warn_of_conflicts as _warn_of_others
from elastic.version import __version__ as __version__

_warn_of_others(__name__, __path__[0])

_MODULES = {
    "elastic.runtime.basics": (
        "init shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous long_phase"
    ),
    "elastic.run_loop": "run",
    "elastic.checkpoints.checkpoints_api": "Checkpoints",
    "elastic": "data",
    "elastic.state": "State ObjectState TorchState ElasticSampler",
    "elastic.exact.shards": "Shards",
    "elastic.diloco.diloco": "DiLoCo LocalSGD",
    "elastic.diloco.island_group": "island_group",
    "elastic.diloco.sharded": "island_mesh",
    "elastic.optimizer.distributed_optimizer": "DistributedOptimizer",
    "elastic.api.compression": "Compression",
    "elastic.api.sync_batch_norm": "SyncBatchNorm",
    "elastic.api.broadcasting": (
        "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object"
    ),
    "elastic.api.ops": (
        "allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_"
        " grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async"
        " grouped_allgather grouped_allgather_async broadcast broadcast_ broadcast_async broadcast_async_ alltoall"
        " alltoall_async reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async barrier"
        " poll synchronize global_process_set Average Sum Adasum Min Max Product"
    ),
    "elastic.negotiation.process_sets": "ProcessSet add_process_set remove_process_set",
    "elastic.optimizer.join": "join",
    "elastic.monitoring.timeline_transfer": "start_timeline stop_timeline",
    "elastic.launcher.launch_function": "launch",
    "elastic.launcher.running_job": "Job",
    "elastic.monitoring.reporting": "report Report",
    "elastic.monitoring.goodput": "goodput Goodput",
    "elastic.errors": (
        "ElasticError Interrupted JobFailed NotElastic NotInitialized PeerLost RequestRefused StaleValueWarning"
        " StateMismatch TensorMismatch WorldChanging"
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from elastic import data as data
    from elastic.api.broadcasting import *  # noqa: F403
    from elastic.api.compression import Compression as Compression
    from elastic.api.ops import *  # noqa: F403
    from elastic.api.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from elastic.checkpoints.checkpoints_api import Checkpoints as Checkpoints
    from elastic.diloco.diloco import DiLoCo as DiLoCo
    from elastic.diloco.diloco import LocalSGD as LocalSGD
    from elastic.diloco.island_group import island_group as island_group
    from elastic.diloco.sharded import island_mesh as island_mesh
    from elastic.errors import *  # noqa: F403
    from elastic.exact.shards import Shards as Shards
    from elastic.launcher.launch_function import launch as launch
    from elastic.launcher.running_job import Job as Job
    from elastic.monitoring.goodput import Goodput as Goodput
    from elastic.monitoring.goodput import goodput as goodput
    from elastic.monitoring.reporting import Report as Report
    from elastic.monitoring.reporting import report as report
    from elastic.monitoring.timeline_transfer import start_timeline as start_timeline
    from elastic.monitoring.timeline_transfer import stop_timeline as stop_timeline
    from elastic.negotiation.process_sets import ProcessSet as ProcessSet
    from elastic.negotiation.process_sets import add_process_set as add_process_set
    from elastic.negotiation.process_sets import remove_process_set as remove_process_set
    from elastic.optimizer.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
    from elastic.optimizer.join import join as join
    from elastic.run_loop import run as run
    from elastic.runtime.basics import *  # noqa: F403
    from elastic.runtime.basics import long_phase as long_phase
    from elastic.state import ElasticSampler as ElasticSampler
    from elastic.state import ObjectState as ObjectState
    from elastic.state import State as State
    from elastic.state import TorchState as TorchState


# Hidden from type checkers, which would otherwise accept any attribute of the module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'elastic' has no attribute {name!r}: see dir(elastic)")
        home = _HOME[name]
        value = (
            importlib.import_module(f"{home}.{name}")
            if home == __name__
            else getattr(importlib.import_module(home), name)
        )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
