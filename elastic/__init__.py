"""Elastic, fault-tolerant data-parallel training for PyTorch, with Horovod's API.

Names are loaded at first use: importing ``elastic`` starts nothing and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "elastic.basics": (
        "init shutdown is_initialized rank size local_rank local_size cross_rank cross_size"
        " is_homogeneous long_phase"
    ),
    "elastic.run_loop": "run",
    "elastic.state": "State ObjectState TorchState ElasticSampler",
    "elastic.optimizer": "DistributedOptimizer",
    "elastic.compression": "Compression",
    "elastic.sync_batch_norm": "SyncBatchNorm",
    "elastic.broadcasting": (
        "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object"
    ),
    "elastic.ops": (
        "allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_"
        " grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async allgather"
        " allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_"
        " broadcast_async broadcast_async_ alltoall alltoall_async reducescatter"
        " reducescatter_async grouped_reducescatter grouped_reducescatter_async barrier poll"
        " synchronize global_process_set Average Sum Adasum Min Max Product"
    ),
    "elastic.process_sets": "ProcessSet add_process_set remove_process_set",
    "elastic.joining": "join",
    "elastic.tracing": "start_timeline stop_timeline",
    "elastic.launching": "launch",
    "elastic.reporting": "report Report",
    "elastic.errors": (
        "ElasticError Interrupted JobFailed NotInitialized PeerLost RetriesExhausted StateMismatch"
        " TensorMismatch TooFewWorkers WorldChanging"
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from elastic.basics import *  # noqa: F403
    from elastic.broadcasting import *  # noqa: F403
    from elastic.compression import Compression as Compression
    from elastic.errors import *  # noqa: F403
    from elastic.joining import join as join
    from elastic.launching import launch as launch
    from elastic.ops import *  # noqa: F403
    from elastic.optimizer import DistributedOptimizer as DistributedOptimizer
    from elastic.process_sets import ProcessSet as ProcessSet
    from elastic.process_sets import add_process_set as add_process_set
    from elastic.process_sets import remove_process_set as remove_process_set
    from elastic.reporting import Report as Report
    from elastic.reporting import report as report
    from elastic.run_loop import run as run
    from elastic.state import ElasticSampler as ElasticSampler
    from elastic.state import ObjectState as ObjectState
    from elastic.state import State as State
    from elastic.state import TorchState as TorchState
    from elastic.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from elastic.tracing import start_timeline as start_timeline
    from elastic.tracing import stop_timeline as stop_timeline


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
