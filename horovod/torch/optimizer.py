"""DistributedOptimizer, under Horovod's module name."""

from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.wrapped_optimizer import WrappedOptimizer

# class of all wrapped optimizers, for use with isinstance()
_DistributedOptimizer = WrappedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
