"""The `stepper` job with Keras: a small model under ``fit``, with Horovod's callbacks, a commit after each batch.

It trains one endless epoch, because at the end of an epoch TensorFlow may take seconds to destroy an iterator.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import horovod.keras as hvd
from stepper import StepLog

BATCH, BATCHES = 16, 1000  # samples; batches, repeated


class Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """Log each step, and end the training at the step whose number is in ``stop``."""

    def __init__(self, directory: str, state: Any, log: StepLog) -> None:
        super().__init__()
        self._state = state
        self._stop = Path(directory, "stop")
        self._log = log

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = self._state.batch
        self._log.made(step)
        if self._stop.exists() and step >= int(self._stop.read_text()):
            self.model.stop_training = True


def main(directory: str, steps: int, width: int) -> None:
    hvd.init()
    keras.utils.set_random_seed(0)
    drawn = np.random.RandomState(0)
    x = drawn.randn(BATCH * BATCHES, 64).astype("float32")
    y = drawn.randint(0, 10, BATCH * BATCHES)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(10, "softmax")]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    log = StepLog(directory)

    @hvd.elastic.run
    def train(state: Any) -> None:
        model.fit(
            data,
            steps_per_epoch=steps,
            callbacks=[
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                Steps(directory, state, log),
                hvd.elastic.CommitStateCallback(state),
            ],
            verbose=0,
        )

    train(state)
    log.ended(model.get_weights())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
