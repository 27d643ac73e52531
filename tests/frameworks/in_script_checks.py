"""Which mistakes are seen in real steps of Keras and TensorFlow, on every rank of a world, and in which there are none.

A script is a model, an optimizer, a state and a function; `kinds` says what its first steps show.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import horovod.keras as keras_door
import horovod.tensorflow as hvd
from elastic.script_checks.mistakes import STEPS, Kind
from elastic.state.state import ObjectState
from harness.observed_script import mistakes_of as kinds

X = np.ones((8 * (STEPS + 5), 4), "float32")
Y = np.ones((8 * (STEPS + 5), 1), "float32")
BOTH = {Kind.MODEL_NOT_IN_STATE, Kind.OPTIMIZER_NOT_IN_STATE}


def network():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def compiled(model, optimizer, **options):
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def fitting(model, *callbacks):
    def train(state):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=list(callbacks))

    return train


def distributed(optimizer=None, **options):
    return hvd.DistributedOptimizer(optimizer or keras.optimizers.Adam(), **options)


def test_correct_scripts_that_call_fit_are_not_reported(rank, size):
    optimizers = [
        distributed(),
        distributed(keras.optimizers.SGD()),
        distributed(backward_passes_per_step=2),
        distributed(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())),
    ]
    for optimizer in optimizers:
        model = compiled(network(), optimizer)
        assert kinds(hvd.elastic.TensorFlowKerasState(model), fitting(model)) == set()
    eager = compiled(network(), distributed(), run_eagerly=True)
    assert kinds(keras_door.elastic.KerasState(eager, epoch=0), fitting(eager)) == set()


def test_fit_with_one_mistake_is_reported(rank, size):
    model = compiled(network(), distributed())
    state = keras_door.elastic.KerasState(model)
    assert kinds(state, fitting(model), commits=False) == {Kind.NO_COMMIT}
    assert kinds(ObjectState(epoch=0), fitting(model)) == BOTH
    other = compiled(network(), distributed())
    assert kinds(keras_door.elastic.KerasState(other), fitting(model)) == BOTH
    state = keras_door.elastic.KerasState(model, keras.optimizers.Adam())
    assert kinds(state, fitting(model)) == {Kind.OPTIMIZER_NOT_IN_STATE}


def test_fit_whose_gradients_are_never_reduced_is_reported(rank, size):
    class Averages(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            hvd.allreduce(tf.constant(logs["loss"]))

    for run_eagerly in (False, True):
        model = compiled(network(), keras.optimizers.Adam(), run_eagerly=run_eagerly)
        state = keras_door.elastic.KerasState(model)
        assert kinds(state, fitting(model)) == {Kind.NEVER_REDUCED}
        assert kinds(state, fitting(model, Averages())) == {Kind.ONLY_LOSS_REDUCED}


class Loop:
    """A custom loop over ``data``, around a step that is a graph or runs eagerly."""

    def __init__(self, *, graph=True, tape=True, optimizer=None, models=1, reduce_loss=False):
        self.optimizer = optimizer or keras.optimizers.Adam()
        self.models = [network() for _ in range(models)]
        self.weights = [each for model in self.models for each in model.trainable_variables]
        self.optimizer.build(self.weights)
        self.tape, self.reduce_loss = tape, reduce_loss
        self.step = tf.function(self._step) if graph else self._step

    def _step(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((sum(model(x) for model in self.models) - y) ** 2)
        if self.tape:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, self.weights)
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        return hvd.allreduce(loss) if self.reduce_loss else loss

    def over(self, data):
        def train(state):
            for x, y in data() if callable(data) else data:
                self.step(x, y)

        return train

    def state(self, **others):
        return hvd.elastic.TensorFlowKerasState(self.models[0], self.optimizer, batch=0, **others)


def test_correct_loops_have_no_mistakes(rank, size):
    for graph in (True, False):
        loop = Loop(graph=graph)
        assert kinds(loop.state(), loop.over(batches)) == set()
        wrapped = Loop(graph=graph, tape=False, optimizer=distributed())
        assert kinds(wrapped.state(), wrapped.over(batches)) == set()
        variables = [*loop.models[0].variables, *loop.optimizer.variables]
        listed = hvd.elastic.TensorFlowState(variables, batch=0)
        assert kinds(listed, loop.over(batches)) == set()
    two = Loop(models=2)
    assert kinds(two.state(second=two.models[1]), two.over(batches)) == set()
    alone = Loop(optimizer=keras.optimizers.SGD())
    listed = hvd.elastic.TensorFlowState(alone.models[0].variables, batch=0)
    assert kinds(listed, alone.over(batches)) == set()  # it keeps no reference to the variables


def test_graph_loop_with_one_mistake_is_reported(rank, size):
    each_mistake(graph=True)


def test_eager_loop_with_one_mistake_is_reported(rank, size):
    each_mistake(graph=False)


def each_mistake(graph):
    loop = Loop(graph=graph)
    assert kinds(loop.state(), loop.over(batches), commits=False) == {Kind.NO_COMMIT}
    assert kinds(ObjectState(batch=0), loop.over(batches)) == BOTH
    listed = hvd.elastic.TensorFlowState(loop.models[0].variables)
    assert kinds(listed, loop.over(batches)) == {Kind.OPTIMIZER_NOT_IN_STATE}
    two = Loop(graph=graph, models=2)
    assert kinds(two.state(), two.over(batches)) == {Kind.MODEL_NOT_IN_STATE}
    plain = Loop(graph=graph, tape=False)
    assert kinds(plain.state(), plain.over(batches)) == {Kind.NEVER_REDUCED}
    loss = Loop(graph=graph, tape=False, reduce_loss=True)
    assert kinds(loss.state(), loss.over(batches)) == {Kind.ONLY_LOSS_REDUCED}


def test_unreduced_step_is_reported_when_traced_before(rank, size):
    loop = Loop(tape=False)
    loop.step(X[:8], Y[:8])
    assert kinds(ObjectState(batch=0), loop.over(batches)) == {*BOTH, Kind.NEVER_REDUCED}


def test_gradients_of_embedding_rows_are_recognized(rank, size):
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), keras.layers.Embedding(500, 1), keras.layers.Flatten()]
    )
    model = compiled(model, distributed())
    state = keras_door.elastic.KerasState(model)
    whole = X.astype("int32")
    assert kinds(state, lambda _: model.fit(whole, X, batch_size=8, verbose=0)) == set()


def test_fixed_share_of_the_data_is_reported(rank, size):
    def shared():
        return batches().shard(hvd.size(), hvd.rank()).repeat().prefetch(1).take(STEPS + 5)

    loop, kept = Loop(), shared()
    assert kinds(loop.state(), loop.over(kept)) == {Kind.RANK_KEPT}
    assert kinds(loop.state(), loop.over(shared)) == set()
    anew = loop.state()
    anew.register_reset_callbacks([lambda: None])  # which may create it again
    assert kinds(anew, loop.over(kept)) == set()
    other = batches().shard(size + 1, 0).repeat().take(STEPS + 5)  # a part, not a rank's share
    assert kinds(loop.state(), loop.over(other)) == set()


def test_no_function_remains_wrapped_after_the_check(rank, size):
    function = type(tf.function(lambda: None))
    before = function.__call__, keras.optimizers.Adam.apply
    loop = Loop()

    def train(state):
        loop.over(batches)(state)
        assert (function.__call__, keras.optimizers.Adam.apply) == before

    assert kinds(loop.state(), train) == set()
