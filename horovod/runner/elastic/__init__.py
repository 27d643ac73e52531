"""Horovod's package for notifications of host changes. See `horovod.runner.elastic.worker`."""
