"""``hvd.elastic`` for TensorFlow: the run loop and states."""

from elastic.keras.state import KerasState
from elastic.state import ObjectState, State
from elastic.tensorflow.run import run
from elastic.tensorflow.state import TensorFlowState


class TensorFlowKerasState(KerasState):
    """`elastic.keras.state.KerasState`, under its name for TensorFlow."""


__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
