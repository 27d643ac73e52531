"""``hvd.elastic`` for MXNet, which Horovod does not have: the run loop and states."""

from elastic.mxnet.state import MXNetState
from elastic.run_loop import run
from elastic.state import ObjectState, State

__all__ = ["MXNetState", "ObjectState", "State", "run"]
