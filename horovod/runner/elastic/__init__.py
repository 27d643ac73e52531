"""Horovod's path to notifications of host changes: see `horovod.runner.elastic.worker`."""
