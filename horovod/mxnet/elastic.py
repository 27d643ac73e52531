"""Elastic training with MXNet, available as ``hvd.elastic``: run loop and states. Horovod has no such module."""

from elastic.mxnet.state import MXNetState
from elastic.run_loop import run
from elastic.state import ObjectState, State

__all__ = ["MXNetState", "ObjectState", "State", "run"]
