"""DistributedOptimizer, under the path that some scripts import it from."""

from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.wrapped_optimizer import Distributed

_DistributedOptimizer = Distributed  # for isinstance(): every optimizer that was wrapped is one

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
