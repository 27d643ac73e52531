"""Gradients, orders and errors of TensorFlow's collectives: eagerly, in a ``tf.function`` and in a session."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from elastic.errors import Invalid, TensorMismatch
from elastic.tensorflow.graphs import async_op
from elastic.tensorflow.original_errors import unwrapped
from harness.gradient_table import CASES, MOVING, WIDTH, Case, sets

TOLERANCE = {tf.float16: 2e-3, tf.bfloat16: 1e-2}
DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64]
ONE_THREAD = tf.compat.v1.ConfigProto(
    inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
)


# ---- gradients


def gradients(case: Case, dtype: Any, members: list[int], among: Any) -> list[Any]:
    place, size = members.index(hvd.rank()), len(members)
    given = [tf.ones([case.rows(place, size), WIDTH], dtype) for _ in range(case.count)]
    upstream = tf.constant(case.upstream(place, size))
    weights = [tf.cast(upstream * (at + 1), dtype) for at in range(case.count)]
    if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
        return tf.gradients(case.call(hvd, given, members, among), given, weights)
    with tf.GradientTape() as tape:
        for each in given:
            tape.watch(each)
        results = case.call(hvd, given, members, among)
    return tape.gradient(results, given, weights)


def of_all(cases: list[Case], dtype: Any, members: list[int], among: Any) -> list[Any]:
    return [gradients(case, dtype, members, among) for case in cases]


def in_a_session(cases: list[Case], dtype: Any, members: list[int], among: Any) -> list[Any]:
    with tf.Graph().as_default():
        made = of_all(cases, dtype, members, among)
        with tf.compat.v1.Session(config=ONE_THREAD) as session:
            return session.run(made)


IN_GRAPHS = {  # building them takes seconds
    "eagerly": DTYPES,
    "tf.function": [tf.float32, tf.complex64],
    "session": [tf.bfloat16],
}
WAYS = {"eagerly": of_all, "tf.function": tf.function(of_all), "session": in_a_session}


def test_gradients_equal_horovods_gradients(rank, size):
    for ranks in (None, *sets(size)):
        among = hvd.global_process_set if ranks is None else hvd.add_process_set(ranks)
        members = list(range(size)) if ranks is None else ranks
        if rank in members:
            for dtype in DTYPES:
                cases = MOVING if dtype.is_complex else CASES
                for way, call in WAYS.items():
                    if dtype not in IN_GRAPHS[way]:
                        continue
                    made = call(cases, dtype, members, among)
                    for case, found in zip(cases, made, strict=True):
                        wanted = case.wanted(members.index(rank), len(members))
                        for at, each in enumerate(found):
                            np.testing.assert_allclose(
                                np.asarray(each).astype(np.complex128),
                                wanted * (at + 1),
                                rtol=TOLERANCE.get(dtype, 1e-6),
                                err_msg=f"{case.name}, {way}, {dtype.name}, ranks {members}",
                            )
        if ranks is not None:
            hvd.remove_process_set(among)


# ---- many at once


def collective(kind: str, number: int, size: int) -> tuple[Any, Any]:
    """A collective and the begin of its result."""
    x = tf.fill([2 * size], float(hvd.rank() + number))
    total = sum(rank + number for rank in range(size))
    match kind:
        case "allreduce":
            return hvd.allreduce(x, op=hvd.Sum, name=f"many.{number}"), total
        case "allgather":
            return hvd.allgather(x, name=f"many.{number}"), number
        case "broadcast":
            return hvd.broadcast(x, size - 1, name=f"many.{number}"), size - 1 + number
        case "alltoall":
            return hvd.alltoall(x, name=f"many.{number}"), number
    return hvd.reducescatter(x, op=hvd.Sum, name=f"many.{number}"), total


def test_many_collectives_in_one_run_complete_on_a_single_thread(rank, size):
    """On each rank in another order, on a pool of one thread."""
    kinds = ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]
    order = list(range(64))
    random.Random(rank).shuffle(order)
    with tf.Graph().as_default():
        made = {number: collective(kinds[number % 5], number, size) for number in order}
        results = [made[number][0] for number in range(64)]
        with tf.compat.v1.Session(config=ONE_THREAD) as session:
            for _ in range(3):
                for number, result in enumerate(session.run(results)):
                    assert result[0] == made[number][1], number


def test_graph_uses_the_asynchronous_operation(rank, size):
    assert async_op.available()
    with tf.Graph().as_default():
        made = hvd.allreduce(tf.ones(1))
        kinds = {operation.type for operation in made.graph.get_operations()}
    assert async_op.OP in kinds and "PyFunc" not in kinds


def test_empty_tensors_and_every_dtype_in_graphs(rank, size):
    dtypes = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.bool, *DTYPES, tf.complex128]

    @tf.function
    def moved() -> list[Any]:
        found = []
        for dtype in dtypes:
            for shape in ([0, 3], [2], [1, 2]):
                found.append(hvd.allgather(tf.cast(tf.ones(shape), dtype)))
            found.append(hvd.broadcast(tf.cast(tf.fill([], rank), dtype), size - 1))
        return found

    made = iter(moved())
    for dtype in dtypes:
        for shape in ((0, 3), (2,), (1, 2)):
            each = next(made)
            assert each.dtype == dtype and each.shape == (shape[0] * size, *shape[1:])
            assert np.all(np.asarray(each) == np.ones(1).astype(dtype.as_numpy_dtype))
        assert next(made).numpy() == np.array(size - 1).astype(dtype.as_numpy_dtype)


# ---- errors


def wrong(rank: int, size: int, others: Any) -> dict[str, tuple[Any, type, type]]:
    """Calls, what TensorFlow's error of each is in Horovod, and ours. All ranks of ``others`` call all of them."""
    precondition, argument = tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError
    calls: dict[str, tuple[Any, type, type]] = {
        "shapes": (lambda: hvd.allreduce(tf.ones([rank + 1])), precondition, TensorMismatch),
        "dtypes": (
            lambda: hvd.allgather(tf.ones(1, tf.float64 if rank else tf.float32)),
            precondition,
            TensorMismatch,
        ),
        "roots": (lambda: hvd.broadcast(tf.ones(1), min(rank, 1)), precondition, TensorMismatch),
        "root": (lambda: hvd.broadcast(tf.ones(1), size), argument, ValueError),
        "splits": (lambda: hvd.alltoall(tf.ones(1), [2] * size), argument, ValueError),
        "dtype": (lambda: hvd.allreduce(tf.constant([True])), argument, Invalid),
    }
    if rank == 0:
        calls["member"] = (lambda: hvd.allreduce(tf.ones(1), process_set=others), argument, Invalid)
    return calls


def test_errors_have_tensorflows_classes_as_in_horovod(rank, size):
    others = hvd.add_process_set(list(range(1, size)))
    try:
        for name, (call, of_tensorflow, ours) in wrong(rank, size, others).items():
            with pytest.raises(of_tensorflow) as eager:
                call()
            assert isinstance(eager.value, ours), name
            with pytest.raises(of_tensorflow):
                tf.function(call)()
            with pytest.raises(ours), unwrapped():
                tf.function(call)()
            with (
                tf.Graph().as_default(),
                tf.compat.v1.Session() as session,
                pytest.raises(of_tensorflow),
            ):
                session.run(call())
        assert float(hvd.allreduce(tf.ones([]), op=hvd.Sum)) == size
    finally:
        hvd.remove_process_set(others)


def test_translated_error_survives_pickling(rank, size):
    import pickle

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        hvd.broadcast(tf.ones(1), size)
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is type(raised.value) and str(again) == str(raised.value)


def test_a_tensorflow_without_the_operation_uses_numpy_functions(rank, size):
    from unittest import mock

    with mock.patch.object(async_op, "available", return_value=False):
        made = tf.function(lambda: hvd.allreduce(tf.ones(2), op=hvd.Sum))()
        np.testing.assert_allclose(made, [size] * 2)
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.function(lambda: hvd.broadcast(tf.ones(1), size))()
