"""`horovod.tensorflow`, on every rank of a world: eagerly and in a ``tf.function``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from elastic.errors import TensorMismatch, Unsupported
from elastic.tensorflow.original_errors import unwrapped
from harness import wording

INTEGERS = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64]
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]


def ways(function):
    """Return functions that call it: eagerly, and as a graph, twice."""
    graph = tf.function(function)
    return [function, graph, graph]


def wide(tensor):
    return np.asarray(tensor).astype(np.float64)


# ---- allreduce


def test_allreduce_supports_every_dtype_and_op(rank, size):
    folds: dict[Any, Any] = {
        hvd.Sum: np.sum,
        hvd.Min: np.min,
        hvd.Max: np.max,
        hvd.Product: np.prod,
    }
    for dtype in INTEGERS + FLOATS:
        every = [wide((np.arange(6) + 2 * r) % 3 + 1).reshape(2, 3) for r in range(size)]
        tensor = tf.cast(every[rank], dtype)
        for op, fold in folds.items():
            result = hvd.allreduce(tensor, op=op)
            assert result.dtype == dtype
            np.testing.assert_allclose(wide(result), fold(every, axis=0), rtol=1e-2)
        mean = wide(hvd.allreduce(tensor))
        wanted = np.mean(every, axis=0)
        np.testing.assert_allclose(
            mean, wanted if dtype.is_floating else np.trunc(wanted), rtol=1e-2
        )


def test_allreduce_in_eager_mode_and_in_graphs_is_equal(rank, size):
    tensor = tf.constant([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
    total = size * (size + 1) / 2
    for call in ways(lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum")):
        np.testing.assert_allclose(call(tensor), np.array([[1, 2], [3, 4]]) * total)
    for call in ways(lambda x: hvd.allreduce(x, average=False)):
        np.testing.assert_allclose(call(tensor), np.array([[1, 2], [3, 4]]) * total)


def test_allreduce_accepts_scalars_empty_tensors_variables_and_lists(rank, size):
    assert float(hvd.allreduce(tf.constant(3.0), op=hvd.Sum)) == 3 * size
    assert hvd.allreduce(tf.zeros([0, 3])).shape == (0, 3)
    assert float(hvd.allreduce(tf.Variable(2.0), op=hvd.Sum)) == 2 * size
    assert hvd.allreduce([1.0, 2.0], op=hvd.Sum).numpy().tolist() == [size, 2 * size]


def test_unknown_dimension_in_a_graph_is_kept(rank, size):
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def sums(x):
        made = hvd.allreduce(x, op=hvd.Sum)
        assert made.shape.as_list() == [None, 2]
        return made

    for rows in (1, 3):
        np.testing.assert_allclose(sums(tf.ones([rows, 2])), np.full([rows, 2], size))


def test_prescale_and_postscale_factors_are_applied(rank, size):
    result = hvd.allreduce(tf.ones(3), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    np.testing.assert_allclose(result, [1.5 * size] * 3)


def test_compression_gives_back_the_dtype(rank, size):
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(tf.fill([4], 1.5), op=hvd.Sum, compression=compression)
        assert result.dtype == tf.float32
        np.testing.assert_allclose(result, [1.5 * size] * 4)


def test_grouped_allreduce_accepts_several_dtypes(rank, size):
    tensors = [tf.ones(2), tf.ones([2, 2], tf.float64), tf.ones(3, tf.int32)]
    for call in ways(lambda *xs: hvd.grouped_allreduce(list(xs), op=hvd.Sum)):
        for made, given in zip(call(*tensors), tensors, strict=True):
            assert made.dtype == given.dtype
            np.testing.assert_allclose(made, np.full(given.shape, size))
    assert hvd.grouped_allreduce([]) == []


def test_grouped_tensors_of_all_sizes_are_returned_in_order(rank, size):
    shapes = [[3], [], [0, 2], [2, 2], [5000], [1, 1, 3], [4], [2, 0], [9], [100, 100], [7]]
    tensors = [
        tf.cast(tf.fill(shape, place + rank), dtype)
        for place, shape in enumerate(shapes)
        for dtype in (tf.float32, tf.int64)
    ]
    for op, wanted in ((hvd.Sum, lambda each: sum(range(each, each + size))), (hvd.Min, int)):
        for call in ways(lambda *xs, op=op: hvd.grouped_allreduce(list(xs), op=op)):
            for place, (made, given) in enumerate(zip(call(*tensors), tensors, strict=True)):
                assert (made.dtype, made.shape) == (given.dtype, given.shape)
                np.testing.assert_allclose(made, np.full(given.shape, wanted(place // 2)))


def test_adasum_weighs_each_tensor_of_a_group_separately(rank, size):
    if size == 3:
        with pytest.raises(Unsupported, match="2, 4, 8"):
            hvd.allreduce(tf.ones(3), op=hvd.Adasum)
        return
    tensors = [tf.one_hot([(rank + place) % 6], 6) * (place + 1.0) for place in range(6)]
    alone = [hvd.allreduce(tensor, op=hvd.Adasum) for tensor in tensors]
    for call in ways(lambda *xs: hvd.grouped_allreduce(list(xs), op=hvd.Adasum)):
        for made, wanted in zip(call(*tensors), alone, strict=True):
            np.testing.assert_allclose(made, wanted, rtol=1e-6)


def test_sparse_gradients_are_gathered(rank, size):
    slices = tf.IndexedSlices(tf.ones([2, 3]) * (rank + 1), tf.constant([0, rank]), [5, 3])
    summed = hvd.allreduce(slices, op=hvd.Sum)
    assert isinstance(summed, tf.IndexedSlices) and summed.values.shape == (2 * size, 3)
    wanted = np.zeros([5, 3])
    for r in range(size):
        wanted[0] += r + 1
        wanted[r] += r + 1
    np.testing.assert_allclose(tf.convert_to_tensor(summed), wanted)
    np.testing.assert_allclose(tf.convert_to_tensor(hvd.allreduce(slices)), wanted / size)
    with pytest.raises(NotImplementedError):
        hvd.allreduce(slices, op=hvd.Adasum)


def test_the_gradient_of_a_reduction_is_that_reduction(rank, size):
    x = tf.Variable([1.0, 2.0])
    for call in ways(lambda: _gradient(lambda: hvd.allreduce(x, op=hvd.Sum) * (rank + 1.0), x)):
        np.testing.assert_allclose(call(), [size * (size + 1) / 2] * 2)
    for call in ways(lambda: _gradient(lambda: hvd.allreduce(x) * (rank + 1.0), x)):
        np.testing.assert_allclose(call(), [(size + 1) / 2] * 2)
    for call in ways(
        lambda: _gradient(lambda: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1] * 2.0, x)
    ):
        np.testing.assert_allclose(call(), [2.0 * size] * 2)


def _gradient(compute, x):
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(compute())
    return tape.gradient(y, x)


# ---- what moves data


def test_allgather_concatenates_different_numbers_of_rows(rank, size):
    own = tf.fill([rank + 1, 2], float(rank))
    wanted = np.concatenate([np.full([r + 1, 2], float(r)) for r in range(size)])
    for call in ways(lambda x: hvd.allgather(x)):
        np.testing.assert_allclose(call(own), wanted)
    for dtype in [*INTEGERS, *FLOATS, tf.bool, tf.complex64]:
        made = hvd.allgather(tf.cast(tf.ones([1]), dtype))
        assert made.dtype == dtype and made.shape == (size,)
    first, second = hvd.grouped_allgather([own, tf.ones([1, 3])])
    np.testing.assert_allclose(first, wanted)
    assert second.shape == (size, 3)


def test_the_gradient_of_a_gathering_is_the_average_of_its_rows(rank, size):
    x = tf.Variable(tf.ones([rank + 1, 2]))
    rows = size * (size + 1) // 2

    def weighted():
        weights = tf.reshape(tf.range(rows, dtype=tf.float32), [rows, 1])
        return hvd.allgather(x) * weights

    begin = rank * (rank + 1) // 2
    wanted = [[float(row)] * 2 for row in range(begin, begin + rank + 1)]
    for call in ways(lambda: _gradient(weighted, x)):
        np.testing.assert_allclose(call(), wanted)


def test_broadcast_and_its_gradient(rank, size):
    root = size - 1
    for call in ways(lambda x: hvd.broadcast(x, root)):
        np.testing.assert_allclose(call(tf.fill([2], float(rank))), [root, root])
    x = tf.Variable([1.0, 1.0])
    for call in ways(lambda: _gradient(lambda: hvd.broadcast(x, root), x)):
        np.testing.assert_allclose(call(), [1.0, 1.0] if rank == root else [0.0, 0.0])
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast(tf.ones(1), size)


def test_broadcast_variables_sets_the_values_of_the_root(rank, size):
    variables = [
        tf.Variable(tf.fill([2, 2], float(rank))),
        tf.Variable(rank, dtype=tf.int64),
        tf.Variable(tf.cast(tf.fill([3], rank), tf.bfloat16)),
    ]
    hvd.broadcast_variables(variables, root_rank=1)
    assert all(np.all(wide(each) == 1) for each in variables)
    for each in variables:
        each.assign(tf.fill(each.shape, tf.cast(rank, each.dtype)))
    assert hvd.broadcast_(variables, 0)[0] is variables[0]
    assert all(np.all(wide(each) == 0) for each in variables)
    with pytest.raises(ValueError, match="differ"):
        hvd.broadcast_variables([tf.Variable(tf.ones([rank + 1]))], root_rank=0)


def test_objects_are_broadcast_and_gathered(rank, size):
    assert hvd.broadcast_object({"from": rank}, 1) == {"from": 1}
    assert hvd.broadcast_object_fn(root_rank=1)(rank) == 1
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(size)]


def test_alltoall_with_and_without_splits(rank, size):
    for call in ways(lambda x: hvd.alltoall(x)):
        np.testing.assert_allclose(call(tf.fill([size, 2], float(rank)))[:, 0], range(size))
    splits = [r + 1 for r in range(size)]
    for call in ways(lambda x: hvd.alltoall(x, splits=splits)):
        made, received = call(tf.fill([sum(splits)], float(rank)))
        assert received.numpy().tolist() == [rank + 1] * size
        np.testing.assert_allclose(made, np.repeat(range(size), rank + 1))
    x = tf.Variable(tf.ones([size, 2]))
    for call in ways(lambda: _gradient(lambda: hvd.alltoall(x) * (rank + 1.0), x)):
        np.testing.assert_allclose(call()[:, 0], np.arange(size) + 1.0)


def test_reducescatter_and_its_gradient_in_all_modes(rank, size):
    given = tf.reshape(tf.range(2.0 * size), [size, 2]) * (rank + 1)
    total = size * (size + 1) / 2
    for call in ways(lambda x: hvd.reducescatter(x, op=hvd.Sum)):
        np.testing.assert_allclose(call(given), [[2 * rank * total, (2 * rank + 1) * total]])
    made = hvd.grouped_reducescatter([given, given * 2])
    np.testing.assert_allclose(made[1], made[0] * 2)
    x = tf.Variable(tf.ones([size, 2]))
    for call in ways(lambda: _gradient(lambda: hvd.reducescatter(x) * (rank + 1.0), x)):
        np.testing.assert_allclose(call()[:, 0], np.arange(size) + 1.0)


# ---- the world


def test_rank_and_size_operations(rank, size):
    for call in ways(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op())):
        assert [int(each) for each in call()] == [rank, size, hvd.local_rank()]
    for call in ways(lambda: (hvd.local_size_op(), hvd.process_set_included_op())):
        assert [int(each) for each in call()] == [hvd.local_size(), 1]


def test_process_set_reduces_over_its_ranks_only(rank, size):
    members = size - 1
    some = hvd.add_process_set(range(members))
    assert some.process_set_id is not None
    try:
        if rank < members:
            for call in ways(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=some)):
                np.testing.assert_allclose(call(tf.ones(2)), [members] * 2)
        included = hvd.process_set_included_op(some.process_set_id)
        assert bool(included) is (rank < members)
        assert int(hvd.size_op(some.process_set_id)) == members
    finally:
        hvd.remove_process_set(some)


def test_joined_ranks_contribute_zeros(rank, size):
    if rank == 0:
        hvd.allreduce(tf.ones(2), op=hvd.Sum, name="before")
    else:
        hvd.allreduce(tf.ones(2), op=hvd.Sum, name="before")
        made = hvd.allreduce(tf.ones(2), op=hvd.Sum, name="after")
        np.testing.assert_allclose(made, [size - 1] * 2)
    assert int(hvd.join()) in range(size)


# ---- what does not fit


def test_shapes_that_differ_are_named_on_every_rank(rank, size):
    tensor = tf.ones([rank + 1])
    with pytest.raises(hvd.HorovodInternalError, match="rank"):
        hvd.allreduce(tensor, name="differs")
    with pytest.raises(tf.errors.OpError, match="rank"):
        tf.function(lambda x: hvd.allreduce(x, name="differs too"))(tensor)
    np.testing.assert_allclose(hvd.allreduce(tf.ones(2), op=hvd.Sum), [size, size])


def test_mismatch_error_lists_the_call_of_each_rank(rank, size):
    with pytest.raises(TensorMismatch) as raised:
        hvd.allreduce(tf.ones([rank + 1]), name="one of each size")
    assert isinstance(raised.value, tf.errors.OpError)
    assert [(each.rank, each.tensors) for each in raised.value.calls] == [
        (each, f"float32 [{each + 1}]") for each in range(size)
    ]


def test_error_raised_in_a_graph_is_converted_back_to_its_type(rank, size):
    with pytest.raises(TensorMismatch, match="rank") as raised, unwrapped():
        tf.function(lambda x: hvd.allreduce(x, name="in a graph"))(tf.ones([rank + 1]))
    assert str(raised.value.__cause__).count("Traceback") <= 1  # TensorFlow logs it, twice
    with pytest.raises(tf.errors.UnknownError, match="of others"), unwrapped():
        raise tf.errors.UnknownError(None, None, "of others")


def test_different_or_unsupported_dtypes_are_refused(rank, size):
    with pytest.raises(hvd.HorovodInternalError, match="float64"):
        hvd.allreduce(tf.ones(2, tf.float64 if rank else tf.float32), name="dtypes")
    for given in (tf.constant(["text"]), tf.constant([True])):
        with pytest.raises(TypeError):
            hvd.allreduce(given)
    with pytest.raises(ValueError, match="IndexedSlices"):
        hvd.grouped_allreduce([tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))])
    with pytest.raises(ValueError, match="op"):
        hvd.allreduce(tf.ones(1), average=True, op=hvd.Sum)


# ---- gradients


def test_distributed_tape_averages_gradients(rank, size):
    x, y = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    unused = tf.Variable(1.0)
    mean = (size + 1) / 2

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * x) * (rank + 1.0) + y * (rank + 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [x, y, unused])

    for call in ways(gradients):
        of_x, of_y, of_unused = call()
        np.testing.assert_allclose(of_x, [2 * mean, 4 * mean])
        np.testing.assert_allclose(of_y, mean)
        assert of_unused is None


def test_tape_accepts_one_source_a_nest_and_a_finished_tape(rank, size):
    x = tf.Variable(2.0)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        y = x * x * (rank + 1.0)
    np.testing.assert_allclose(tape.gradient(y, x), 2.0 * (size + 1))
    np.testing.assert_allclose(tape.gradient(y, {"x": [x]})["x"][0], 2.0 * (size + 1))
    assert isinstance(tape, tf.GradientTape)
    with pytest.raises(ValueError, match="once"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(ValueError, match="GradientTape"):
        hvd.DistributedGradientTape(x)


def test_tape_options_are_applied_and_checked(rank, size):
    x = tf.Variable([1.0, 1.0])
    table = tf.Variable(tf.ones([4, 2]))

    def gradients(sources, **options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x) * (rank + 1.0)
            loss += tf.reduce_sum(tf.gather(table, [rank, 0])) * (rank + 1.0)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, sources)

    total = size * (size + 1) / 2
    np.testing.assert_allclose(gradients(x, op=hvd.Sum), [total] * 2)
    np.testing.assert_allclose(gradients(x, gradient_predivide_factor=2.0), [total / size] * 2)
    np.testing.assert_allclose(gradients(x, compression=hvd.Compression.fp16), [total / size] * 2)
    wanted = np.zeros([4, 2])
    for r in range(size):
        wanted[r] += r + 1
        wanted[0] += r + 1
    sparse = gradients(table)
    assert isinstance(sparse, tf.IndexedSlices)
    np.testing.assert_allclose(tf.convert_to_tensor(sparse), wanted / size)
    dense = gradients(table, sparse_as_dense=True)
    assert not isinstance(dense, tf.IndexedSlices)
    np.testing.assert_allclose(dense, wanted / size)
    for wrong in ({"op": hvd.Min}, {"gradient_predivide_factor": 0.0}, {"compression": 3}):
        with pytest.raises(ValueError):
            gradients(x, **wrong)
    with pytest.raises(ValueError, match="Average"):
        gradients(x, op=hvd.Sum, gradient_predivide_factor=2.0)


def test_tape_with_local_sources_does_not_reduce_them(rank, size):
    x, local = tf.Variable(1.0), tf.Variable(1.0)

    def gradients(scale):
        with tf.GradientTape() as tape:
            loss = (x + local) * (rank + 1.0)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(local)
        return tape.gradient(loss, [x, local])

    np.testing.assert_allclose(gradients(False), [(size + 1) / 2, rank + 1.0])
    np.testing.assert_allclose(gradients(True), [(size + 1) / 2, (rank + 1.0) / size])


def test_ranks_outside_of_a_process_set_keep_their_gradients(rank, size):
    members = size - 1
    some = hvd.add_process_set(range(members))
    x, table = tf.Variable(1.0), tf.Variable(tf.ones([2, 1]))

    def gradients():
        with tf.GradientTape() as tape:
            loss = (x + tf.reduce_sum(tf.gather(table, [0]))) * (rank + 1.0)
        return hvd.DistributedGradientTape(tape, process_set=some).gradient(loss, [x, table])

    own = rank + 1.0 if rank >= members else (members + 1) / 2
    try:
        for call in ways(gradients):
            of_x, of_table = call()
            np.testing.assert_allclose(of_x, own)
            np.testing.assert_allclose(tf.convert_to_tensor(of_table), [[own], [0.0]])
    finally:
        hvd.remove_process_set(some)


def test_partial_tape_does_not_average_gradients_of_local_layers(rank, size):
    import keras

    own = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), own, shared])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones([1, 1]))) * (rank + 1.0)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=[own], scale_local_gradients=False)
    made = tape.gradient(loss, model.trainable_weights)
    np.testing.assert_allclose(np.ravel(made), [rank + 1.0, (size + 1) / 2])


def test_thousand_gradients_are_reduced_in_one_call(rank, size):
    from unittest import mock

    from elastic.negotiation import submission

    variables = [tf.Variable([float(number)]) for number in range(1000)]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(each) for each in variables]) * (rank + 1.0)
    tape = hvd.DistributedGradientTape(tape)
    with mock.patch.object(
        submission, "start_allreduce", wraps=submission.start_allreduce
    ) as started:
        made = tape.gradient(loss, variables)
    assert started.call_count == 1
    assert all(float(each[0]) == (size + 1) / 2 for each in made)


def test_gradients_of_several_passes_are_reduced_once(rank, size):
    from unittest import mock

    from elastic.negotiation import submission

    for wrap in (lambda function: function, tf.function):
        x = tf.Variable([1.0, 2.0])
        unused = tf.Variable(1.0)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        helper = hvd.LocalGradientAggregationHelper(
            backward_passes_per_step=3,
            allreduce_func=lambda grads, vars: [
                None if each is None else hvd.allreduce(each, name="aggregated") for each in grads
            ],
            sparse_as_dense=False,
            average_aggregated_gradients=True,
        )

        def one(factor, helper=helper, optimizer=optimizer, x=x, unused=unused):
            made = helper.compute_gradients([factor * tf.ones([2]), None], [x, unused])
            pairs = [(made[0], x)]
            helper.apply_gradients(lambda: optimizer.apply_gradients(pairs), optimizer, pairs)
            return made[1]

        step = wrap(one)
        with mock.patch.object(
            submission, "start_allreduce", wraps=submission.start_allreduce
        ) as started:
            for number in range(6):
                assert step(tf.constant(rank + 1.0)) is None
                done = (number + 1) // 3
                np.testing.assert_allclose(x, np.array([1.0, 2.0]) - done * (size + 1) / 2)
                assert started.call_count == done
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        hvd.LocalGradientAggregationHelper(0, lambda grads, vars: grads, False, False)
    sparse = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([2, 2]))
    with pytest.raises(ValueError, match="sparse_as_dense"):
        helper.compute_gradients([sparse], [x])


# ---- large tensors


def test_large_tensors_of_several_dtypes_and_odd_sizes(rank, size):
    shapes = [(1000, 300), (7,), (333, 1001), (512, 512), (1,)]
    dtypes = [tf.float32, tf.float32, tf.float64, tf.float32, tf.float64]
    for call in ways(lambda *given: hvd.grouped_allreduce(given, name="large")):
        kept = []
        for step in range(3):
            given = [
                tf.cast(tf.reshape(tf.range(np.prod(shape)) % 97, shape), dtype) * (rank + 1 + step)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            made = call(*given)
            kept.append((step, made))
        # All at the end: kept values are not overwritten by the steps after it.
        for step, made in kept:
            factor = (size + 1) / 2 + step
            for each, shape, dtype in zip(made, shapes, dtypes, strict=True):
                assert each.shape == shape and each.dtype == dtype
                wanted = np.arange(np.prod(shape)).reshape(shape) % 97 * factor
                np.testing.assert_allclose(each, wanted, rtol=1e-5)


def test_released_memory_is_reused(rank, size):
    @tf.function
    def reduced(x):
        return tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, name="again"))

    from elastic.collectives.shared_memory import arena

    x = tf.ones([1 << 19])
    for _ in range(3):
        float(reduced(x))
    own = arena.mine()
    assert own is not None
    before = own.lent
    for _ in range(8):
        assert float(reduced(x)) == size * (1 << 19)
    assert own.lent == before


# ---- normalization


def test_sync_batch_norm_equals_batch_norm_over_all_ranks(rank, size):
    import keras

    every = np.random.RandomState(0).rand(size * 4, 3).astype("float32")
    own = tf.constant(every[rank * 4 : rank * 4 + 4])
    synced, whole = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    with tf.GradientTape() as tape:
        tape.watch(own)
        made = synced(own, training=True)
        loss = tf.reduce_sum(made * made * made)
    of_own = tape.gradient(loss, own)
    of_all = tf.constant(every)
    with tf.GradientTape() as tape:
        tape.watch(of_all)
        wanted = whole(of_all, training=True)
        loss = tf.reduce_sum(wanted * wanted * wanted)
    mine = slice(rank * 4, rank * 4 + 4)
    np.testing.assert_allclose(made, wanted[mine], atol=1e-5)
    np.testing.assert_allclose(of_own, tape.gradient(loss, of_all)[mine], atol=1e-3)
    for one, other in zip(synced.weights, whole.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


# ---- TensorFlow 1


def test_tensorflow_1_graph_reduces_and_trains(rank, size):
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=float(rank), use_resource=True)
        sums = hvd.grouped_allreduce([tf.constant(1.0)] * 20, op=hvd.Sum)
        loss = x * x * (rank + 1.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, global_step=step)
        with tf.control_dependencies([train]):
            after = x.read_value()
        hooks = [hvd.BroadcastGlobalVariablesHook(1), v1.train.StopAtStepHook(last_step=3)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            assert session.run(x) == 1.0
            assert session.run(sums) == [size] * 20
            while not session.should_stop():
                now = session.run(after)
    x = 1.0
    for _ in range(3):
        x -= 0.1 * 2 * x * (size + 1) / 2
    np.testing.assert_allclose(now, x, rtol=1e-5)


def test_tensorflow_1_graph_accumulates_several_passes(rank, size):
    v1 = tf.compat.v1
    for average in (True, False):
        with tf.Graph().as_default():
            x = v1.get_variable("x", initializer=1.0)
            fed = v1.placeholder(tf.float32)
            optimizer = hvd.DistributedOptimizer(
                v1.train.MomentumOptimizer(0.1, 0.0),
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
            )
            step = v1.train.get_or_create_global_step()
            train = optimizer.minimize(x * fed, global_step=step)
            with v1.train.MonitoredTrainingSession() as session:
                wanted = 1.0
                for number in range(4):
                    session.run(train, {fed: (rank + 1.0) * (number + 1)})
                    if number % 2:
                        both = (2 * number + 1) * (size + 1) / 2
                        wanted -= 0.1 * (both / 2 if average else both)
                    np.testing.assert_allclose(session.run(x), wanted, rtol=1e-5, atol=1e-7)
                    assert session.run(step) == number + 1


def test_session_state_is_committed_restored_and_synchronized(rank, size):
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=[float(rank), 1.0])
        add = x.assign_add([1.0, 1.0])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(session=session, batch=rank)
            state.sync()
            assert session.run(x).tolist() == [0.0, 1.0] and state.batch == 0
            session.run(add)
            state.save()
            session.run(add)
            state.restore()
            assert session.run(x).tolist() == [1.0, 2.0]
            assert hvd.elastic.TensorFlowState([x]).layout() == state.layout()
        with pytest.raises(ValueError, match=wording.NEEDS_SESSION):
            hvd.elastic.TensorFlowState([x])


def test_functions_that_need_a_graph_raise_an_error(rank, size):
    with pytest.raises(RuntimeError, match="eager"):
        hvd.broadcast_global_variables(0)
