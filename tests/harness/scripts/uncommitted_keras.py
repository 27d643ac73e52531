"""Trains 30 steps of Keras and never calls commit(): the first kind of mistake."""

from __future__ import annotations

import keras
import numpy as np

import horovod.keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")


@hvd.elastic.run
def train(state):
    model.fit(np.ones((240, 4)), np.ones((240, 1)), batch_size=8, verbose=0)


train(hvd.elastic.KerasState(model))
