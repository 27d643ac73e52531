"""Elastic training with TensorFlow, available as ``hvd.elastic``: run loop and states."""

from elastic.keras.state import KerasState
from elastic.state import ObjectState, State
from elastic.tensorflow.run import run
from elastic.tensorflow.state import TensorFlowState


class TensorFlowKerasState(KerasState):
    """State of a Keras model: `elastic.keras.state.KerasState` under Horovod's name for TensorFlow."""


__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
