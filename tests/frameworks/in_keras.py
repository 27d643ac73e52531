"""`horovod.keras` and `horovod.tensorflow.keras`, on every rank of a world, with Keras on TensorFlow."""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import pathlib
import re
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod.keras as hvd
import horovod.tensorflow as of_tensorflow
import horovod.tensorflow.keras as other_door
from elastic.errors import WorldChanging
from elastic.keras import trace_before_first_step
from elastic.monitoring import step_count
from elastic.negotiation import submission
from frameworks.in_each_backend import accumulating, data, flat, model
from harness import wording


def following(state):
    """Return callbacks that update the state during training."""
    return [
        hvd.elastic.CommitStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]


def test_fit_on_parts_of_a_batch_equals_fit_on_the_whole(rank, size):
    x, y, all_x, all_y = data(rank, size)
    for make in (lambda: keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam):
        alone, together = model(), model()
        alone.compile(optimizer=make(), loss="mse")
        alone.fit(all_x, all_y, batch_size=len(all_x), epochs=4, verbose=0)
        together.compile(optimizer=hvd.DistributedOptimizer(make()), loss="mse")
        together.fit(x, y, batch_size=len(x), epochs=4, verbose=0)
        np.testing.assert_allclose(flat(together.weights), flat(alone.weights), atol=1e-5)


def test_eager_fit_and_a_custom_loop_equal_training_on_the_whole_batch(rank, size):
    x, y, all_x, all_y = data(rank, size)
    alone, eager, loop = model(), model(), model()
    alone.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    alone.fit(all_x, all_y, batch_size=len(all_x), epochs=2, verbose=0)
    eager.compile(
        optimizer=other_door.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        loss="mse",
        run_eagerly=True,
    )
    eager.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    optimizer = of_tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(loop(x, training=True) - y))
        gradients = tape.gradient(loss, loop.trainable_variables)
        optimizer.apply_gradients(zip(gradients, loop.trainable_variables, strict=True))

    step()
    step()
    np.testing.assert_allclose(flat(eager.weights), flat(alone.weights), atol=1e-5)
    np.testing.assert_allclose(flat(loop.weights), flat(alone.weights), atol=1e-5)


def test_a_wrapped_optimizer_keeps_its_class_for_isinstance(rank, size):
    plain = keras.optimizers.Adam(0.01)
    config = plain.get_config()
    made = hvd.DistributedOptimizer(plain)
    assert isinstance(made, keras.optimizers.Adam) and type(made).__name__ == "Adam"
    assert made.get_config() == config
    with pytest.raises(ValueError, match="once"):
        hvd.DistributedOptimizer(made)
    with pytest.raises(ValueError, match=wording.OPTIMIZER_KERAS):
        hvd.DistributedOptimizer("adam")
    for wrong in (
        {"op": hvd.Max},
        {"gradient_predivide_factor": -1},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 0},
    ):
        with pytest.raises(ValueError):
            hvd.DistributedOptimizer(keras.optimizers.SGD(), **wrong)


def test_requested_xla_is_disabled_with_a_warning(rank, size):
    x, y, *_ = data(rank, size)
    made = model()
    made.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse", jit_compile=True
    )
    with pytest.warns(UserWarning, match="XLA"):
        made.fit(x, y, verbose=0)
    assert made.jit_compile is False
    others = model()
    others.compile(optimizer="sgd", loss="mse", jit_compile=True)
    assert others.jit_compile is True


def test_gradients_of_several_passes_are_accumulated_before_a_reduction(rank, size):
    x, y, *_ = data(rank, size)
    half = len(x) // 2
    rows = [np.concatenate([data(r, size)[i][:half] for r in range(size)]) for i in (0, 1)]
    later = [np.concatenate([data(r, size)[i][half:] for r in range(size)]) for i in (0, 1)]
    for average, rate in ((True, 0.1), (False, 0.05)):
        alone, together = model(), model()
        alone.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        alone.train_on_batch(
            np.concatenate([rows[0], later[0]]), np.concatenate([rows[1], later[1]])
        )
        together.compile(optimizer=accumulating(rate, average), loss="mse")
        with mock.patch.object(
            submission, "start_allreduce", wraps=submission.start_allreduce
        ) as started:
            together.train_on_batch(x[:half], y[:half])
            assert started.call_count == 0
            together.train_on_batch(x[half:], y[half:])
            assert started.call_count == 1
        np.testing.assert_allclose(flat(together.weights), flat(alone.weights), atol=1e-5)


def test_gradients_of_local_layers_are_not_reduced_with_several_passes(rank, size):
    x, y, *_ = data(rank, size)
    made = model()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, local_layers=made.layers[0]
    )
    made.compile(optimizer=optimizer, loss="mse")
    made.fit(x, y, batch_size=len(x) // 2, verbose=0)
    own, shared = flat(made.layers[0].weights), flat(made.layers[1].weights)
    assert not np.allclose(hvd.allreduce(own), own)
    np.testing.assert_allclose(hvd.allreduce(shared), shared, atol=1e-6)


def test_accumulated_gradients_are_local_to_each_worker(rank, size):
    x, y, *_ = data(rank, size)
    made = model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    made.compile(optimizer=optimizer, loss="mse")
    state = hvd.elastic.KerasState(made)
    made.train_on_batch(x, y)
    state.save()
    accumulated = flat(optimizer._accumulated_gradients)
    assert not np.allclose(hvd.allreduce(accumulated), accumulated)
    part = state._parts()["optimizer"]
    equal = part.equal_everywhere(part.snapshot.bank.extra[0])
    assert equal is not None
    assert 0 < len(equal) == len(optimizer.variables) - len(made.weights)
    made.train_on_batch(x, y)
    state.restore()
    np.testing.assert_array_equal(flat(optimizer._accumulated_gradients), accumulated)


def test_partial_optimizer_does_not_average_gradients_of_local_layers(rank, size):
    x, y, *_ = data(rank, size)
    made = model()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=made.layers[0], scale_local_gradients=False
    )
    made.compile(optimizer=optimizer, loss="mse")
    made.fit(x, y, batch_size=len(x), verbose=0)
    own, shared = flat(made.layers[0].weights), flat(made.layers[1].weights)
    assert not np.allclose(hvd.allreduce(own), own)
    np.testing.assert_allclose(hvd.allreduce(shared), shared, atol=1e-6)


def test_saved_model_loads_as_a_distributed_one_with_its_optimizer_variables(rank, size):
    x, y, *_ = data(rank, size)
    made = model()
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    made.fit(x, y, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        made.save(path)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer) is keras.optimizers.Adam
        loaded = hvd.load_model(path)
    assert type(loaded.optimizer) is not keras.optimizers.Adam
    np.testing.assert_allclose(
        flat(loaded.optimizer.variables), flat(made.optimizer.variables), atol=1e-6
    )
    loaded.fit(x, y, verbose=0)
    np.testing.assert_allclose(hvd.allreduce(flat(loaded.weights)), flat(loaded.weights), atol=1e-6)


def test_callbacks_make_replicas_and_metrics_equal(rank, size):
    x, y, *_ = data(rank, size)
    made = model(seed=rank)
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = made.fit(x, y, batch_size=2, epochs=2, callbacks=callbacks, verbose=0)
    np.testing.assert_allclose(hvd.allreduce(flat(made.weights)), flat(made.weights), atol=1e-6)
    losses = np.array(history.history["loss"])
    np.testing.assert_allclose(hvd.allreduce(losses), losses, atol=1e-6)


def test_learning_rate_follows_warm_up_and_schedule(rank, size):
    x, y, *_ = data(rank, size)
    rates = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    def fit(callback, epochs):
        rates.clear()
        made = model()
        made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        made.fit(x, y, batch_size=4, epochs=epochs, callbacks=[callback, Look()], verbose=0)
        return made.history.history

    steps = -(-len(x) // 4)
    logs = fit(hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2), 3)
    done = np.arange(1, 2 * steps + 1) / steps  # epochs, at the end of each batch
    wanted = 0.1 / size * (done * (size - 1) / 2 + 1)
    np.testing.assert_allclose(rates, [*wanted, *[0.1] * steps], rtol=1e-5)
    np.testing.assert_allclose(logs["lr"][-1], 0.1, rtol=1e-5)
    fit(
        hvd.callbacks.LearningRateScheduleCallback(
            0.1, multiplier=lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3
        ),
        4,
    )
    np.testing.assert_allclose(rates[::steps], [0.1, 0.05, 0.025, 0.025], rtol=1e-5)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)  # type: ignore[arg-type]


def test_local_variables_stay_local_to_each_rank(rank, size):
    x, y, *_ = data(rank, size)
    for one in (False, True):
        made = model(seed=rank + 1)
        made.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        own = made.layers[0].kernel
        local = own if one else [own]
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)
        made.fit(x, y, epochs=1, verbose=0, callbacks=[callback])
        rows = [np.ravel(each.numpy())[None] for each in made.weights]
        same = [np.ptp(np.asarray(hvd.allgather(each)), axis=0).max() == 0 for each in rows]
        assert same == [each is not own for each in made.weights]
    with pytest.raises(ValueError):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])


def test_collectives_accept_python_and_numpy_values(rank, size):
    assert float(hvd.allreduce(float(rank))) == pytest.approx((size - 1) / 2)
    np.testing.assert_allclose(hvd.allgather(np.full([1, 2], rank)), [[r, r] for r in range(size)])
    assert hvd.broadcast(rank, 1) == 1
    made = hvd.reducescatter(np.ones([size, 2], "float32"), op=hvd.Sum)
    np.testing.assert_allclose(made, [[size, size]])


def test_values_are_tensors_and_symbolic_in_a_function(rank, size):
    rows, total = tf.fill([size, 2], float(rank)), size * (size - 1) / 2
    gathered = np.repeat(np.arange(size), size)[:, None] * np.ones([1, 2])
    for door in (hvd, other_door):
        calls = {
            "allreduce": (lambda: door.allreduce(rows, op=door.Sum), np.full([size, 2], total)),  # noqa: B023
            "allgather": (lambda: door.allgather(rows), gathered),  # noqa: B023
            "broadcast": (lambda: door.broadcast(rows, 1), np.ones([size, 2])),  # noqa: B023
            "reducescatter": (
                lambda: door.reducescatter(rows, op=door.Sum),  # noqa: B023
                np.full([1, 2], total),
            ),
        }
        for kind, (call, wanted) in calls.items():
            in_function = _traced(call)
            for made in (call(), in_function):
                assert tf.is_tensor(made), kind
                np.testing.assert_allclose(made.numpy(), wanted, err_msg=kind)


def _traced(call):
    """What ``call`` gives in a ``tf.function``, where it has to be symbolic."""
    symbolic = []

    @tf.function
    def traced():
        made = call()
        symbolic.append(tf.is_tensor(made) and not hasattr(made, "numpy"))
        return made

    made = traced()
    assert symbolic == [True]
    return made


def test_a_number_in_a_graph_of_tensorflow_1_has_its_result_at_once(rank, size):
    with tf.Graph().as_default():
        assert float(hvd.allreduce(float(rank))) == pytest.approx((size - 1) / 2)


def test_state_is_restored_to_its_commit(rank, size):
    x, y, *_ = data(rank, size)
    made = model()
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    state = hvd.elastic.KerasState(made, batch=0, epoch=0)
    made.fit(x, y, verbose=0)
    state.batch = 7
    state.save()
    weights, slots = flat(made.weights), flat(made.optimizer.variables)
    made.fit(x, y, verbose=0)
    state.batch = 8
    assert not np.allclose(flat(made.weights), weights)
    state.restore()
    np.testing.assert_array_equal(flat(made.weights), weights)
    np.testing.assert_array_equal(flat(made.optimizer.variables), slots)
    assert state.batch == 7


def test_steps_are_counted_at_commits_without_a_line_in_the_script(rank, size):
    x, y, *_ = data(rank, size)
    made = model()
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    state = hvd.elastic.KerasState(made, batch=0, epoch=0)
    state.commit()
    before = int(made.optimizer.iterations.numpy()), step_count.steps
    made.fit(x, y, verbose=0, callbacks=[hvd.elastic.CommitStateCallback(state, 1)])
    taken = int(made.optimizer.iterations.numpy())
    assert taken > before[0] and before[1] is not None
    assert (step_count.state_step, step_count.steps) == (taken, before[1] + taken - before[0])
    variables = of_tensorflow.elastic.TensorFlowState([*made.optimizer.variables], step=3)
    made.fit(x, y, verbose=0)
    variables.commit()
    assert step_count.state_step == 3
    assert step_count.steps == before[1] + int(made.optimizer.iterations.numpy()) - before[0]


def test_state_of_variables_is_synchronized_from_rank_0(rank, size):
    variables = [tf.Variable([float(rank)]), tf.Variable(rank, dtype=tf.int64)]
    state = of_tensorflow.elastic.TensorFlowState(variables, batch=rank)
    state.sync()
    assert [float(variables[0][0]), int(variables[1]), state.batch] == [0.0, 0, 0]
    for wrong in ({"variables": None}, {"variables": [3]}, {"variables": variables, "session": 1}):
        with pytest.raises(ValueError):
            of_tensorflow.elastic.TensorFlowState(**wrong)


def test_the_state_of_a_model_is_broadcast_and_requirements_are_checked(rank, size):
    made = model(seed=rank)
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    state = of_tensorflow.elastic.TensorFlowKerasState(made, epoch=rank)
    state.sync()
    np.testing.assert_allclose(hvd.allreduce(flat(made.weights)), flat(made.weights), atol=1e-6)
    assert state.epoch == 0
    with pytest.raises(ValueError, match=wording.NO_WEIGHTS_YET):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match=r"keras\.Model"):
        hvd.elastic.KerasState(3)


def test_position_in_an_epoch_is_restored_from_the_commit(rank, size):
    x, y, *_ = data(rank, size)
    steps = -(-len(x) // 2)
    elastic = hvd.elastic
    for order in (list, reversed):
        made = model()
        made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        state = elastic.KerasState(made, batch=0, epoch=0)
        seen: list[object] = []

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, state=state, seen=seen):
                seen.append((state.epoch, state.batch))
                if len(seen) == steps + 2:
                    raise KeyboardInterrupt

        callbacks = list(order(following(state)))
        with pytest.raises(KeyboardInterrupt):
            made.fit(x, y, batch_size=2, epochs=3, callbacks=[*callbacks, Stop()], verbose=0)
        state.restore()
        assert (state.epoch, state.batch) == (1, 2)
        callbacks = list(order(following(state)))
        seen.clear()
        made.fit(x, y, batch_size=2, epochs=3 - state.epoch, callbacks=callbacks, verbose=0)
        assert (state.epoch, state.batch) == (3, 0)
        assert int(made.optimizer.iterations) == 3 * steps


def test_reused_callbacks_follow_the_steps_of_the_present_fit(rank, size):
    """As in Horovod's example, which creates them once, and gives fit as many steps as the world allows."""
    x, y, *_ = data(rank, size)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(2)
    made = model()
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = hvd.elastic.KerasState(made, batch=0, epoch=0)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1)
    committed: list[object] = []
    object.__setattr__(state, "commit", lambda: committed.append((state.epoch, state.batch)))
    callbacks = [*reversed(following(state)), warm_up]
    for steps in (2, 4):
        made.fit(batches, steps_per_epoch=steps, callbacks=callbacks, verbose=0)
        assert warm_up.steps_per_epoch == steps
    assert committed == [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]


def test_resumed_epoch_ends_at_its_last_batch_when_steps_per_execution_is_3(rank, size):
    elastic, steps, at_once = hvd.elastic, 10, 3
    done: list[list[int]] = []

    class Batches(keras.utils.PyDataset):
        first = 0

        def on_epoch_begin(self):
            self.first = state.batch

        def __len__(self):
            return steps

        def __getitem__(self, index):
            number = (self.first + index) % steps
            return np.full([1, 4], number, "float32"), np.zeros([1, 1], "float32")

    class Counted(keras.Sequential):
        def train_step(self, data):
            tf.py_function(lambda x: done[-1].append(int(x[0, 0])), [data[0]], [])
            return super().train_step(data)

    made = Counted([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.001))
    made.compile(optimizer=optimizer, loss="mse", steps_per_execution=at_once)
    state = elastic.KerasState(made, batch=0, epoch=0)
    state.batch = 3
    callbacks = [
        *following(state),
        keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: done.append([])),
    ]
    made.fit(Batches(), epochs=2, callbacks=callbacks, shuffle=False, verbose=0)
    assert [sorted(each) for each in done] == [list(range(3, steps)), list(range(steps))]
    assert (state.epoch, state.batch, int(optimizer.iterations)) == (2, 0, 2 * steps - 3)


def test_world_change_after_the_last_batch_of_an_epoch_repeats_no_batch(rank, size):
    x, y, *_ = data(rank, size)
    steps = -(-len(x) // 2)
    elastic = hvd.elastic
    made = model()
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = elastic.KerasState(made, batch=0, epoch=0)
    commit, done = state.commit, []

    def changes():
        done.append((state.epoch, state.batch))
        commit()
        # The last commit of the first epoch, and one in the second.
        if len(done) in (steps, steps + 2):
            raise WorldChanging("a worker joins")

    object.__setattr__(state, "commit", changes)
    while state.epoch < 3:
        callbacks = following(state)
        with contextlib.suppress(WorldChanging):
            made.fit(x, y, batch_size=2, epochs=3 - state.epoch, callbacks=callbacks, verbose=0)
    backup = keras.callbacks.BackupAndRestore("unused")
    with pytest.raises(ValueError, match="--checkpoint-dir"):
        made.fit(x, y, callbacks=[backup, elastic.CommitStateCallback(state)], verbose=0)
    assert done == [(e + (b == steps), b % steps) for e in range(3) for b in range(1, steps + 1)]
    assert int(made.optimizer.iterations) == 3 * steps


def test_prebuilt_first_step_gives_the_same_training_without_a_second_trace(rank, size):
    x, y, *_ = data(rank, size)
    traced: list[object] = []
    traces: list[int] = []

    class Counted(keras.Sequential):
        def train_step(self, data):
            traced.append(data)
            return super().train_step(data)

    def fitted(kind, ahead):
        keras.utils.set_random_seed(1)
        layers = keras.layers
        made = kind(
            [keras.Input((4,)), layers.Dense(3), layers.Dropout(0.5, seed=1), layers.Dense(1)]
        )
        kinds = keras.optimizers
        made.compile(
            optimizer=hvd.DistributedOptimizer(kinds.Adam(0.1, weight_decay=0.1)),
            loss="mse",
            metrics=["mae"],
        )
        part = hvd.elastic.KerasState(made)._parts()["model"]
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
        if ahead:
            part.build_step(b"no such thing")
            assert not traced
            part.build_step(trace_before_first_step._step_input(iter(batches)))
            traces.append(len(traced))
            assert int(made.optimizer.iterations) == 0
        return made.fit(batches, epochs=2, verbose=0).history, flat(made.weights)

    (wanted, weights), (history, others) = fitted(keras.Sequential, False), fitted(Counted, True)
    assert traces[0] > 0 and len(traced) == traces[0] and history == wanted
    np.testing.assert_array_equal(weights, others)


def test_documented_names_and_exported_names_agree(rank, size):
    page = pathlib.Path(__file__).parents[2] / "docs" / "horovod.md"
    found = {}
    for line in page.read_text().splitlines():
        if not line.startswith("| `"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(horovod\.(?:tensorflow|keras)\.[^`]+)`", cells[0]):
            assert len(cells) == 3, line
            found[name] = cells[1]
    for name, said in found.items():
        module, _, rest = name.partition(".")[2].partition(".")
        value = {"tensorflow": of_tensorflow, "keras": hvd}[module]
        if said == "absent":
            with pytest.raises(AttributeError):
                operator.attrgetter(rest)(value)
            continue
        for path in ("mpi_ops", "functions", "compression", "data.compute_worker"):
            importlib.import_module(f"horovod.tensorflow.{path}")
        assert operator.attrgetter(rest)(value) is not None, name
    modules = {"elastic", "callbacks", "Compression", "mpi_ops"}
    for door in (of_tensorflow, of_tensorflow.elastic):
        missing = {f"{door.__name__}.{name}" for name in door.__all__ if name not in modules}
        assert not missing - found.keys()
    known = {name.rpartition(".")[2] for name in found}
    assert not {name for name in other_door.__all__ if name not in modules} - known
