"""Elastic training on a Ray cluster: ``elastic.ray.run(train_fn, config, num_workers=4, min_workers=2)``.

Ray provides hosts, placement and supervision. The job's driver decides which workers form the world. Workers send
gradients directly to each other. Importing this package does not import Ray.
"""

from elastic.protocol.report_values import Report
from elastic.ray.executor import Executor, Result, attach, run, stop

__all__ = ["Executor", "Report", "Result", "attach", "run", "stop"]
