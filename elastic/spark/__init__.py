"""Elastic training on a Spark cluster: ``elastic.spark.run(train, num_proc=4, min_num_proc=2)``.

Spark tasks run the workers, the job's driver forms the world, and workers send gradients directly to each other.
Importing this package does not import pyspark.
"""

from elastic.spark.spark_run import active_context, run, sizes

__all__ = ["active_context", "run", "sizes"]
