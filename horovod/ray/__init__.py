"""Horovod's API for Ray: ``from horovod.ray import RayExecutor``. The implementation is in `elastic.ray`.

Names are imported when they are first used. Importing this package neither imports Ray nor joins a cluster.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("ray") is None:
    raise ImportError(
        "horovod.ray needs Ray, which is not installed: run pip install 'hvd-elastic[ray]'",
        name="ray",
    )

if TYPE_CHECKING:
    from horovod.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
    from horovod.ray.elastic_v2 import RayHostDiscovery as RayHostDiscovery
    from horovod.ray.elastic_v2 import TestDiscovery as TestDiscovery
    from horovod.ray.runner import RayExecutor as RayExecutor
    from horovod.ray.settings import MiniSettings as MiniSettings
    from horovod.ray.worker import BaseHorovodWorker as BaseHorovodWorker

_HOME = {
    "BaseHorovodWorker": "worker",
    "ElasticRayExecutor": "elastic",
    "MiniSettings": "settings",
    "RayExecutor": "runner",
    "RayHostDiscovery": "elastic_v2",
    "TestDiscovery": "elastic_v2",
}

__all__ = [
    "BaseHorovodWorker",
    "ElasticRayExecutor",
    "MiniSettings",
    "RayExecutor",
    "RayHostDiscovery",
    "TestDiscovery",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(
                f"module 'horovod.ray' has no attribute {name!r}: see dir(horovod.ray)"
            )
        return getattr(importlib.import_module(f"horovod.ray.{_HOME[name]}"), name)
