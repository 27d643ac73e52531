"""DistributedOptimizer, under a path from which some scripts import it."""

from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.wrapped_optimizer import WrappedOptimizer

_DistributedOptimizer = WrappedOptimizer  # for isinstance(): the class of every wrapped optimizer

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
