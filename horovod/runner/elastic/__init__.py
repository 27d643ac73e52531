"""Horovod's path to what a worker hears of its hosts: see `horovod.runner.elastic.worker`."""
