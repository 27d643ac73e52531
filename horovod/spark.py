"""Placeholder for Horovod on Spark, which is not supported: the import raises ImportError."""

from horovod.unavailable import refuse

raise refuse("spark", "start workers with horovodrun or horovod.run, or keep the job on horovod")
