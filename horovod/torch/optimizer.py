"""DistributedOptimizer, under the path that some scripts import it from."""

from __future__ import annotations

from elastic.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
