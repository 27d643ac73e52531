"""`horovod.keras` on each of Keras's backends, on every rank of a job with KERAS_BACKEND."""

from unittest import mock

import keras
import numpy as np

import horovod.keras as hvd
from elastic.negotiation import submission


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
    return np.concatenate([np.ravel(keras.ops.convert_to_numpy(each)) for each in weights])


def accumulating(rate, average, **options):
    return hvd.DistributedOptimizer(
        keras.optimizers.SGD(rate, **options),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )


def test_gradients_of_several_passes_are_accumulated_before_a_reduction(rank, size):
    x, y, all_x, all_y = data(rank, size)
    for average, rate in ((True, 0.1), (False, 0.05)):
        alone, together = model(), model()
        alone.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        alone.fit(all_x, all_y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        together.compile(optimizer=accumulating(rate, average, momentum=0.9), loss="mse")
        with mock.patch.object(
            submission, "start_allreduce", wraps=submission.start_allreduce
        ) as started:
            # Each of four batches of 6 is divided between the ranks.
            together.fit(x, y, batch_size=6 // size, epochs=2, shuffle=False, verbose=0)
        assert started.call_count == 4
        np.testing.assert_allclose(flat(together.weights), flat(alone.weights), atol=1e-5)


def test_collectives_return_tensors_of_the_backend_with_values_of_all_ranks(rank, size):
    rows = np.full([size, 2], float(rank), "float32")
    for made, wanted in (
        (hvd.allreduce(rows), np.full([size, 2], (size - 1) / 2)),
        (hvd.allreduce(keras.ops.convert_to_tensor(rows)), np.full([size, 2], (size - 1) / 2)),
        (hvd.allgather(rows)[::size], np.arange(size)[:, None] * np.ones([1, 2])),
        (hvd.broadcast(rows, 1), np.ones([size, 2])),
        (hvd.reducescatter(rows), np.full([1, 2], (size - 1) / 2)),
        (hvd.allreduce(float(rank)), (size - 1) / 2),
    ):
        assert keras.ops.is_tensor(made)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(made), wanted)


def test_collectives_of_scalars_run_within_a_step_compiled_by_jax(rank, size):
    if keras.backend.backend() != "jax":
        return
    import jax

    np.testing.assert_allclose(jax.jit(hvd.allreduce)(jax.numpy.float32(rank)), (size - 1) / 2)
    for reshapes in (hvd.allgather, hvd.reducescatter):
        try:
            jax.jit(reshapes)(jax.numpy.ones([size, 2]))
        except ValueError:
            continue
        raise AssertionError("a shape that is not known yet")


def test_loss_scale_skips_a_step_on_all_ranks_when_one_rank_overflows(rank, size):
    x, y, all_x, all_y = data(rank, size, 12)
    wrong = x.copy()
    wrong[0, 0] = np.inf if rank == 0 else 1
    kinds = keras.optimizers
    for distributed in (
        lambda: kinds.LossScaleOptimizer(hvd.DistributedOptimizer(kinds.SGD(0.1)), 4.0),
        lambda: hvd.DistributedOptimizer(kinds.LossScaleOptimizer(kinds.SGD(0.1), 4.0)),
    ):
        alone, together = model(), model()
        alone.compile(optimizer=kinds.SGD(0.1), loss="mse")
        alone.fit(all_x, all_y, batch_size=12, epochs=2, verbose=0)
        together.compile(optimizer=distributed(), loss="mse")
        together.fit(x, y, batch_size=12, epochs=1, verbose=0)
        together.fit(wrong, y, batch_size=12, epochs=1, verbose=0)
        together.fit(x, y, batch_size=12, epochs=1, verbose=0)
        scale = keras.ops.convert_to_numpy(together.optimizer.dynamic_scale)
        np.testing.assert_array_equal(scale, 2.0)
        np.testing.assert_allclose(flat(together.weights), flat(alone.weights), atol=1e-5)


if __name__ == "__main__":
    hvd.init()
    for name, function in list(globals().items()):
        if name.startswith("test_"):
            function(hvd.rank(), hvd.size())
            print(f"passed {name}", flush=True)
