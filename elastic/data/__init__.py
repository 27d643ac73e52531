"""Elastic data loading: committed steps use each sample once per epoch. Names are imported on first access."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "DataLoader": "elastic.data.loader",
    "ElasticSampler": "elastic.data.sampler",
    "ShardedFiles": "elastic.data.sharded_files",
    "from_torch": "elastic.data.conversion",
    "sample_seed": "elastic.data.seeds",
}

__all__ = ["DataLoader", "ElasticSampler", "ShardedFiles", "from_torch", "sample_seed"]

if TYPE_CHECKING:
    from elastic.data.conversion import from_torch as from_torch
    from elastic.data.loader import DataLoader as DataLoader
    from elastic.data.sampler import ElasticSampler as ElasticSampler
    from elastic.data.seeds import sample_seed as sample_seed
    from elastic.data.sharded_files import ShardedFiles as ShardedFiles


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(
                f"module 'elastic.data' has no attribute {name!r}: see dir(elastic.data)"
            )
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
