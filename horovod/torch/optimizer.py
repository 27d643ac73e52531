"""DistributedOptimizer, under Horovod's module name."""

from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.wrapped_optimizer import WrappedOptimizer

_DistributedOptimizer = WrappedOptimizer  # class of every wrapped optimizer, for isinstance()

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
