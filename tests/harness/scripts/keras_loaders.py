"""Keras `fit` for very long, with batches that two processes of each worker load."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

import horovod.keras

hvd: Any = horovod.keras


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self):
        return 50

    def __getitem__(self, index):
        time.sleep(0.01)
        return np.ones((4, 8), "float32"), np.ones((4, 1), "float32")


def main() -> None:
    hvd.init()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.001))
    model.compile(loss="mse", optimizer=optimizer)

    def report(batch, logs):
        if batch == 1:
            print(f"rank {hvd.rank()} has committed", flush=True)

    @hvd.elastic.run
    def train(state):
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
            keras.callbacks.LambdaCallback(on_train_batch_end=report),
        ]
        batches = Batches(workers=2, use_multiprocessing=True)
        model.fit(batches, epochs=1000, callbacks=callbacks, shuffle=False, verbose=0)

    train(hvd.elastic.KerasState(model, batch=0, epoch=0))


if __name__ == "__main__":
    main()
