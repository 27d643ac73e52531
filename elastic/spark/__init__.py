"""Elastic training on a Spark cluster: ``elastic.spark.run(train, num_proc=4, min_num_proc=2)``.

Tasks of Spark hold the workers; the driver decides the world; gradients are sent between workers. Importing this does
not import pyspark.
"""

from elastic.spark.spark_run import active_context, run, sizes

__all__ = ["active_context", "run", "sizes"]
