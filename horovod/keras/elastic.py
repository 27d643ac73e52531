"""``hvd.elastic`` for Keras: the run loop, the state of a model, and callbacks that maintain it."""

from elastic.keras.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from elastic.keras.run import run
from elastic.keras.state import KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
