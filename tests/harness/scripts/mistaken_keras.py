"""Trains 30 steps of Keras or TensorFlow with one mistake, ``CASE``, or without one where the case is none of WRONG.

A case that begins with "loop" has a loop of its own around a tf.function, one with "eager" around eager steps.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

import horovod.keras

CASE = os.environ["CASE"]
STEPS = 30
WRONG = {
    "fit, plain optimizer": {"gradients-never-reduced"},
    "fit, only metrics reduced": {"only-the-loss-reduced"},
    "fit, nothing in the state": {"model-not-in-state", "optimizer-not-in-state"},
    "fit, other model in the state": {"model-not-in-state", "optimizer-not-in-state"},
    "fit, other optimizer in the state": {"optimizer-not-in-state"},
    "loop, plain tape": {"gradients-never-reduced"},
    "loop, only the loss reduced": {"only-the-loss-reduced"},
    "loop, commit on rank 0": {"commit-on-some-ranks"},
    "loop, no optimizer": {"optimizer-not-in-state"},
    "loop, second model": {"model-not-in-state"},
    "loop, kept shard": {"rank-kept"},
    "eager, plain tape": {"gradients-never-reduced"},
    "eager, no model": {"model-not-in-state"},
}
keras: Any = __import__("tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") else "keras")
BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf

hvd: Any = importlib.import_module(
    "horovod.tensorflow" if BACKEND == "tensorflow" else "horovod.keras"
)

hvd.init()


def network() -> Any:
    layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
    if CASE == "loop, embedding":
        layers = [keras.layers.Embedding(500, 1), keras.layers.Flatten()]
        return keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    return keras.Sequential([keras.Input((4,)), *layers])


model, second = network(), network()
second_is_trained = CASE in ("loop, second model", "loop, two models")
weights = model.trainable_variables + (second.trainable_variables if second_is_trained else [])
plain = CASE in (
    *("fit, plain optimizer", "fit, only metrics reduced", "loop, plain tape", "eager, plain tape"),
    "loop, only the loss reduced",
)
kind = keras.optimizers.SGD if CASE == "fit, plain SGD" else keras.optimizers.Adam
optimizer: Any = kind(0.01)
if CASE == "fit, loss scale":
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
if not plain and (CASE.startswith("fit") or "DistributedOptimizer" in CASE):
    passes = 2 if CASE == "fit, accumulation" else 1
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
x = np.ones((8 * STEPS, 4), "int32" if CASE == "loop, embedding" else "float32")
y = np.ones((8 * STEPS, 1), "float32")


class MetricEachBatch(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch, logs=None):
        horovod.keras.allreduce(np.float32(logs["loss"]))


@horovod.keras.elastic.run
def fit(state):
    commits = [horovod.keras.elastic.CommitStateCallback(state)]
    if CASE == "fit, commits once per epoch":
        commits = [horovod.keras.elastic.CommitStateCallback(state, 10_000)]
    if CASE == "fit, only metrics reduced":
        commits.append(MetricEachBatch())
    model.fit(x, y, batch_size=8, epochs=1 - state.epoch, callbacks=commits, verbose=0)
    state.epoch = 1


def step(samples, labels):
    with tf.GradientTape() as tape:
        error = model(samples) - labels
        if second_is_trained:
            error += second(samples)
        loss = tf.reduce_mean(error**2)
    if not plain and "DistributedOptimizer" not in CASE and not tracing:
        tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    return hvd.allreduce(loss) if CASE == "loop, only the loss reduced" else loss


tracing = CASE == "loop, traced before"
if CASE.startswith("loop"):
    if tracing:
        tf.function(step)(tf.constant(x[:8]), tf.constant(y[:8]))
        tracing = False
    step = tf.function(step)


def shard(samples):
    return samples.shard(hvd.size(), hvd.rank()) if "shard" in CASE else samples


def samples() -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)


before: Any = shard(samples()) if BACKEND == "tensorflow" else None


def batches(state) -> Any:
    data = shard(samples()) if CASE == "loop, shard in training" else before
    return data.prefetch(1).take(STEPS - state.batch)


@horovod.keras.elastic.run
def loop(state):
    for data, labels in batches(state):
        step(data, labels)
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()


@horovod.keras.elastic.run
def loop_on_rank_0(state):
    for data, labels in batches(state):
        step(data, labels)
        state.batch += 1
        if hvd.rank() == 0:
            state.commit()


if CASE.startswith("fit"):
    model.compile(optimizer=optimizer, loss="mse")
else:
    optimizer.build(weights)
State: Any = horovod.keras.elastic.KerasState
if CASE == "fit, nothing in the state":
    from elastic.state.state import ObjectState

    state: Any = ObjectState(epoch=0)
elif CASE == "fit, other model in the state":
    second.compile(optimizer=keras.optimizers.Adam(), loss="mse")
    state = State(second, epoch=0)
elif CASE == "fit, other optimizer in the state":
    other = keras.optimizers.Adam()
    other.build(model.trainable_variables)
    state = State(model, other, epoch=0)
elif "list of variables" in CASE:
    state = hvd.elastic.TensorFlowState([*model.variables, *optimizer.variables], batch=0)
elif CASE == "loop, no optimizer":
    state = hvd.elastic.TensorFlowState(model.variables, batch=0)
elif CASE == "eager, no model":
    state = hvd.elastic.TensorFlowState(list(optimizer.variables), batch=0)
elif CASE == "loop, two models":
    state = State(model, optimizer, batch=0, second=second)
else:
    state = State(model, optimizer, batch=0, epoch=0)
if CASE == "loop, shard anew in a reset callback":
    state.register_reset_callbacks([lambda: globals().update(before=shard(samples()))])
if CASE.startswith("fit"):
    fit(state)
elif CASE == "loop, commit on rank 0":
    loop_on_rank_0(state)
else:
    loop(state)
