"""`horovod.tensorflow.keras` with legacy Keras, on every rank of a job with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

import sys
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as of_tensorflow
import horovod.tensorflow.keras as hvd
from elastic.negotiation import submission
from harness import wording

keras: Any = tf.keras


def data(rank, size, rows=24):
    drawn = np.random.RandomState(3)
    x, y = drawn.rand(rows, 4).astype("float32"), drawn.rand(rows, 1).astype("float32")
    return x[rank::size], y[rank::size], x, y


def model(seed=1):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    )


def flat(weights):
    return np.concatenate([np.ravel(each.numpy()) for each in weights])


def variables(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def following(state):
    """Return callbacks that update the state during training."""
    return [
        hvd.elastic.CommitStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]


def test_keras_is_legacy_keras(rank, size):
    assert keras.optimizers.Adam.__module__.startswith("tf_keras.")


def test_fit_on_parts_of_a_batch_equals_fit_on_the_whole(rank, size):
    x, y, all_x, all_y = data(rank, size)
    kinds = keras.optimizers
    for make in (
        lambda: kinds.SGD(0.1, momentum=0.9),
        kinds.Adam,
        lambda: kinds.legacy.SGD(0.1, momentum=0.9),
        kinds.legacy.Adam,
    ):
        alone, together = model(), model()
        alone.compile(optimizer=make(), loss="mse")
        alone.fit(all_x, all_y, batch_size=len(all_x), epochs=4, verbose=0)
        optimizer = of_tensorflow.DistributedOptimizer(make())
        together.compile(optimizer=optimizer, loss="mse")
        together.fit(x, y, batch_size=len(x), epochs=4, verbose=0)
        np.testing.assert_allclose(flat(together.weights), flat(alone.weights), atol=1e-5)


def test_gradients_of_several_passes_are_accumulated_before_a_reduction(rank, size):
    x, y, *_ = data(rank, size)
    half = len(x) // 2
    rows = [np.concatenate([data(r, size)[i][:half] for r in range(size)]) for i in (0, 1)]
    later = [np.concatenate([data(r, size)[i][half:] for r in range(size)]) for i in (0, 1)]
    for kind in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        for average, rate in ((True, 0.1), (False, 0.05)):
            alone, together = model(), model()
            alone.compile(optimizer=kind(0.1), loss="mse")
            alone.train_on_batch(
                np.concatenate([rows[0], later[0]]), np.concatenate([rows[1], later[1]])
            )
            optimizer = hvd.DistributedOptimizer(
                kind(rate), backward_passes_per_step=2, average_aggregated_gradients=average
            )
            together.compile(optimizer=optimizer, loss="mse")
            state = hvd.elastic.KerasState(together)
            with mock.patch.object(
                submission, "start_allreduce", wraps=submission.start_allreduce
            ) as started:
                together.train_on_batch(x[:half], y[:half])
                assert started.call_count == 0
                state.save()
                together.train_on_batch(x[half:], y[half:])
                assert started.call_count == 1
            np.testing.assert_allclose(flat(together.weights), flat(alone.weights), atol=1e-5)
            assert int(optimizer.iterations) == 2
            state.restore()  # the sums of the first pass too
            together.train_on_batch(x[half:], y[half:])
            np.testing.assert_allclose(flat(together.weights), flat(alone.weights), atol=1e-5)


def test_saved_model_loads_as_a_distributed_one(rank, size):
    x, y, *_ = data(rank, size)
    made = model()
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    made.fit(x, y, verbose=0)
    for suffix in ("keras", "h5"):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.{suffix}"
            made.save(path)
            plain = keras.models.load_model(path)
            loaded = hvd.load_model(path)
        assert type(plain.optimizer) is keras.optimizers.Adam
        np.testing.assert_allclose(
            flat(variables(loaded.optimizer)), flat(variables(made.optimizer)), rtol=1e-6
        )
        loaded.fit(x * (rank + 1), y, verbose=0)
        weights = flat(loaded.weights)
        np.testing.assert_allclose(hvd.allreduce(weights), weights, atol=1e-6)


def test_callbacks_synchronize_weights_and_metrics_and_scale_the_learning_rate(rank, size):
    x, y, *_ = data(rank, size)
    made = model(seed=rank)
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    callbacks = hvd.callbacks
    done = made.fit(
        x,
        y,
        batch_size=4,
        epochs=3,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2),
        ],
        verbose=0,
    )
    weights, losses = flat(made.weights), np.array(done.history["loss"])
    np.testing.assert_allclose(hvd.allreduce(weights), weights, atol=1e-6)
    np.testing.assert_allclose(hvd.allreduce(losses), losses, atol=1e-6)
    np.testing.assert_allclose(done.history["lr"][-1], 0.1, rtol=1e-5)


def test_position_in_an_epoch_is_restored_from_the_commit(rank, size):
    x, y, *_ = data(rank, size)
    steps = -(-len(x) // 2)
    elastic = hvd.elastic
    for kind in (keras.optimizers.Adam, keras.optimizers.legacy.Adam):
        made = model(seed=rank)
        made.compile(optimizer=hvd.DistributedOptimizer(kind(0.1)), loss="mse")
        state = elastic.KerasState(made, batch=0, epoch=0)
        state.sync()
        seen: list[object] = []

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, state=state, seen=seen):
                seen.append((state.epoch, state.batch))
                if len(seen) == steps + 2:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            made.fit(x, y, batch_size=2, epochs=3, callbacks=[*following(state), Stop()], verbose=0)
        weights = flat(made.weights)
        np.testing.assert_allclose(hvd.allreduce(weights), weights, atol=1e-6)
        state.restore()
        assert (state.epoch, state.batch) == (1, 2)
        made.fit(x, y, batch_size=2, epochs=3 - state.epoch, callbacks=following(state), verbose=0)
        assert (state.epoch, state.batch) == (3, 0)
        assert int(made.optimizer.iterations) == 3 * steps


def test_resumed_epoch_ends_at_its_last_batch_when_steps_per_execution_is_3(rank, size):
    elastic, made = hvd.elastic, model()
    x, y = np.zeros([10, 4]), np.zeros([10, 1])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    made.compile(optimizer=optimizer, loss="mse", steps_per_execution=3)
    state = elastic.KerasState(made, batch=0, epoch=0)
    state.batch = 3
    made.fit(x, y, batch_size=1, epochs=2, callbacks=following(state), verbose=0)
    assert (state.epoch, state.batch, int(optimizer.iterations)) == (2, 0, 17)


def test_loss_scale_skips_a_step_on_all_ranks_when_one_rank_overflows(rank, size):
    x, y, all_x, all_y = data(rank, size, 12)
    wrong = x.copy()
    wrong[0, 0] = np.inf if rank == 0 else 1
    scaled = keras.mixed_precision.LossScaleOptimizer
    for kind in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        for distributed in (
            lambda kind=kind: scaled(hvd.DistributedOptimizer(kind(0.1)), initial_scale=4),
            lambda kind=kind: hvd.DistributedOptimizer(scaled(kind(0.1), initial_scale=4)),
        ):
            alone, together = model(), model()
            alone.compile(optimizer=kind(0.1), loss="mse")
            alone.fit(all_x, all_y, batch_size=12, epochs=2, verbose=0)
            together.compile(optimizer=distributed(), loss="mse")
            state = hvd.elastic.KerasState(together)
            together.fit(x, y, batch_size=12, verbose=0)
            state.save()
            together.fit(wrong, y, batch_size=12, verbose=0)
            assert float(together.optimizer.loss_scale) == 2
            state.restore()  # of the scale, too
            assert float(together.optimizer.loss_scale) == 4
            together.fit(wrong, y, batch_size=12, verbose=0)
            together.fit(x, y, batch_size=12, verbose=0)
            assert float(together.optimizer.loss_scale) == 2
            np.testing.assert_allclose(flat(together.weights), flat(alone.weights), atol=1e-5)
        passes = hvd.DistributedOptimizer(kind(0.1), backward_passes_per_step=2)
        alone.compile(optimizer=scaled(passes), loss="mse")
        with pytest.raises(Exception, match=wording.LOSS_SCALE_LEGACY_KERAS):
            alone.fit(x, y, verbose=0)


def test_half_precision_model_gets_a_loss_scale_optimizer(rank, size):
    x, y, *_ = data(rank, size)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        made = model()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    assert isinstance(made.optimizer, keras.mixed_precision.LossScaleOptimizer)
    made.fit(x, y, batch_size=4, epochs=3, verbose=0)
    weights = flat(made.weights)
    np.testing.assert_allclose(hvd.allreduce(weights), weights, atol=1e-6)


def test_sync_batch_norm_equals_batch_norm_over_all_ranks(rank, size):
    every = np.random.RandomState(0).rand(size * 4, 2, 2, 3).astype("float32")
    own = tf.constant(every[rank * 4 : rank * 4 + 4])
    synced, whole = of_tensorflow.SyncBatchNormalization(), keras.layers.BatchNormalization()
    made, wanted = synced(own, training=True), whole(tf.constant(every), training=True)
    np.testing.assert_allclose(made, wanted[rank * 4 : rank * 4 + 4], atol=1e-4)


if __name__ == "__main__":
    of_tensorflow.init()
    for name, function in list(globals().items()):
        if name.startswith("test_") and (len(sys.argv) < 2 or name in sys.argv[1:]):
            function(of_tensorflow.rank(), of_tensorflow.size())
            print(f"passed {name}", flush=True)
