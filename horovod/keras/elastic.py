"""Elastic training with Keras, available as ``hvd.elastic``: run loop, model state, and callbacks for the state."""

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
