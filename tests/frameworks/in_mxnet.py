"""`horovod.mxnet`, on every rank of a world."""

from __future__ import annotations

import importlib
import operator
import pathlib
import pickle
import re
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd
from elastic.errors import Invalid, TensorMismatch, UnsupportedType
from harness import wording

INTEGERS = ["uint8", "int8", "int32", "int64"]
FLOATS = ["float16", "float32", "float64"]


def full(value, shape=(2, 3), dtype="float32"):
    return mx.nd.full(shape, value, dtype=dtype)


def near(array, wanted, rtol=1e-6):
    np.testing.assert_allclose(array.asnumpy(), wanted, rtol=rtol)


# ---- collectives


def test_every_dtype_is_summed_and_averaged(rank, size):
    for dtype in INTEGERS + FLOATS:
        given = full(rank + 1, dtype=dtype)
        total = hvd.allreduce(given, average=False)
        assert total.dtype == given.dtype
        near(total, size * (size + 1) / 2)
        mean = (size + 1) / 2
        near(hvd.allreduce(given), mean if dtype in FLOATS else int(mean), rtol=1e-3)
        near(given, rank + 1)  # not modified


def test_in_place_allreduce_returns_the_given_array(rank, size):
    given = full(rank)
    assert hvd.allreduce_(given, average=False, name="sum") is given
    near(given, size * (size - 1) / 2)


def test_reduction_is_given_by_op_or_by_average_and_not_by_both(rank, size):
    given = full(rank + 1.0)
    near(hvd.allreduce(given, op=hvd.Max), size)
    near(hvd.allreduce(given, op=hvd.Min), 1)
    near(hvd.grouped_allreduce([given], op=hvd.Sum)[0], size * (size + 1) / 2)
    near(hvd.allreduce_(given.copy()), (size + 1) / 2)
    with pytest.raises(ValueError):
        hvd.allreduce(given, average=True, op=hvd.Sum)


def test_allreduce_waits_for_pending_engine_operations(rank, size):
    given = full(1.0, (512, 512))
    for _ in range(5):
        given = mx.nd.dot(given, given) / 512
    near(hvd.allreduce(given, average=False), size, rtol=1e-5)
    after = hvd.allreduce_(given * 2) + 1
    near(after, 3, rtol=1e-5)


def test_slices_and_transposed_arrays_are_reduced(rank, size):
    given = mx.nd.arange(6).reshape((2, 3)) * (rank + 1)
    near(
        hvd.allreduce(given.T, average=False), np.arange(6).reshape(2, 3).T * size * (size + 1) / 2
    )
    whole = full(rank + 1, (4, 2))
    hvd.allreduce_(whole[1:3], average=False)  # a view in MXNet, as in numpy
    near(whole[1:3], size * (size + 1) / 2)
    near(whole[0], rank + 1)


def test_prescale_and_postscale_factors_are_applied(rank, size):
    near(
        hvd.allreduce(full(1.0), average=False, prescale_factor=0.5, postscale_factor=3.0),
        1.5 * size,
    )


def test_grouped_allreduce_reduces_all_arrays(rank, size):
    given = [full(rank, dtype=dtype) for dtype in FLOATS]
    for each in hvd.grouped_allreduce(given, average=False, name="group"):
        near(each, size * (size - 1) / 2)
    assert hvd.grouped_allreduce_(given)[0] is given[0]
    near(given[0], (size - 1) / 2)
    assert hvd.grouped_allreduce([]) == [] and hvd.grouped_allreduce_([]) == []


def test_allgather_accepts_different_numbers_of_rows(rank, size):
    found = hvd.allgather(full(rank, (rank + 1, 2)))
    near(found[:, 0], [r for r in range(size) for _ in range(r + 1)])
    several = hvd.grouped_allgather([full(rank, (1, 2)), full(rank, (2,), "int32")])
    assert [each.shape for each in several] == [(size, 2), (2 * size,)]
    assert hvd.grouped_allgather([]) == []


def test_broadcast_sends_the_array_of_the_root(rank, size):
    given = full(rank)
    near(hvd.broadcast(given, 1), 1)
    near(given, rank)
    assert hvd.broadcast_(given, root_rank=size - 1, name="b") is given
    near(given, size - 1)


def test_alltoall_with_and_without_splits(rank, size):
    near(hvd.alltoall(mx.nd.arange(size) + 10 * rank), [10 * r + rank for r in range(size)])
    splits = mx.nd.array([r + 1 for r in range(size)], dtype="int32")
    rows = mx.nd.full((sum(range(size + 1)),), rank)
    found, received = hvd.alltoall(rows, splits)
    assert received.asnumpy().tolist() == [rank + 1] * size
    near(found, [r for r in range(size) for _ in range(rank + 1)])


def test_reducescatter_of_uneven_rows(rank, size):
    found = hvd.reducescatter(full(rank + 1, (size + 1, 2)), op=hvd.Sum)
    assert found.shape == ((2 if rank == 0 else 1), 2)
    near(found, size * (size + 1) / 2)
    (mean,) = hvd.grouped_reducescatter([full(rank, (size,))])
    near(mean, (size - 1) / 2)
    assert hvd.grouped_reducescatter([]) == []


def test_process_set_reduces_over_its_ranks_only(rank, size):
    others = hvd.add_process_set([1])
    if rank == 1:
        near(hvd.allreduce(full(7.0), average=False, process_set=others), 7)
    hvd.remove_process_set(others)
    assert hvd.global_process_set.size() == size


def test_objects_are_broadcast_and_gathered(rank, size):
    assert hvd.broadcast_object({"rank": rank}, root_rank=1)["rank"] == 1
    assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(size)]


def test_rank_size_and_build_queries(rank, size):
    assert (hvd.rank(), hvd.size(), hvd.local_size()) == (rank, size, size)
    assert hvd.is_initialized() and hvd.gloo_built() and not hvd.mpi_built()


# ---- what does not fit


def test_shape_mismatch_raises_an_error_on_all_ranks(rank, size):
    with pytest.raises(TensorMismatch, match=r"rank 0.*rank 1"):
        hvd.allreduce(full(1.0, (2 + rank,)), name="odd")
    near(hvd.allreduce(full(1.0), average=False), size)  # and the world continues


def test_values_other_than_dense_numeric_arrays_are_refused(rank, size):
    with pytest.raises(TypeError, match="NDArray"):
        hvd.allreduce(np.ones(3))
    with pytest.raises(UnsupportedType, match="tostype"):
        hvd.allreduce(full(1.0).tostype("row_sparse"))
    with pytest.raises(UnsupportedType, match="bool"):
        hvd.allreduce(full(1, dtype="bool"))


# ---- training


def data():
    random = np.random.default_rng(3)
    x = random.normal(size=(24, 5)).astype("float32")
    return x, (x @ random.normal(size=(5, 1)).astype("float32") + 0.5)


def net_of(seed, layers=(4, 1)):
    mx.random.seed(seed)
    net = mx.gluon.nn.Sequential(prefix="net_")
    with net.name_scope():
        for width in layers:
            net.add(mx.gluon.nn.Dense(width, activation="tanh" if width > 1 else None))
    net.initialize(mx.init.Normal(0.5))
    return net


def weights(net):
    return [each.data().asnumpy() for _, each in sorted(net.collect_params().items())]


def steps(net, trainer, x, y, batch, count=6):
    loss_of = mx.gluon.loss.L2Loss()
    for _ in range(count):
        with mx.autograd.record():
            loss = loss_of(net(mx.nd.array(x)), mx.nd.array(y))
        loss.backward()
        trainer.step(batch)


def test_gluon_trainer_equals_one_worker_with_the_whole_batch(rank, size):
    x, y = data()
    tried: list[tuple[Any, dict[str, Any]]] = [
        (("sgd", {"learning_rate": 0.1, "momentum": 0.9}), {}),
        (("adam", {"learning_rate": 0.05}), {"num_groups": 2}),
        (("sgd", {"learning_rate": 0.1}), {"gradient_predivide_factor": 2.0}),
    ]
    for optimizer, more in tried:
        alone = net_of(7)
        alone(mx.nd.array(x))
        steps(
            alone, mx.gluon.Trainer(alone.collect_params(), *optimizer, kvstore=None), x, y, len(x)
        )
        net = net_of(7 + rank)
        net(mx.nd.array(x))
        start = net_of(7)
        start(mx.nd.array(x))
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
        for mine, first in zip(weights(net), weights(start), strict=True):
            np.testing.assert_array_equal(mine, first)
        trainer = hvd.DistributedTrainer(net.collect_params(), *optimizer, **more)
        mine = slice(rank, None, size)
        steps(net, trainer, x[mine], y[mine], len(x[mine]))
        for ours, theirs in zip(weights(net), weights(alone), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_module_style_loop_equals_one_worker_with_the_whole_batch(rank, size):
    x, y = data()

    def module():
        out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="fc")
        made = mx.mod.Module(mx.sym.LinearRegressionOutput(out, name="y"), label_names=["y_label"])
        return made

    def fit(x, y, optimizer):
        batches = mx.io.NDArrayIter(x, y, batch_size=len(x), label_name="y_label")
        net = module()
        net.bind(batches.provide_data, batches.provide_label)
        mx.random.seed(11)
        net.init_params(mx.init.Normal(0.1))
        arguments, others = net.get_params()
        hvd.broadcast_parameters(arguments)
        hvd.broadcast_parameters(others, prefix="aux.")
        net.set_params(arguments, others)
        net.init_optimizer(kvstore=None, optimizer=optimizer)
        for _ in range(5):
            batches.reset()
            for batch in batches:
                net.forward_backward(batch)
                net.update()
        return net.get_params()[0]

    plain = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=1 / len(x))
    alone = fit(x, y, plain)
    mine = slice(rank, None, size)
    shared = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=1 / len(x[mine]))
    wrapped = hvd.DistributedOptimizer(shared)
    assert wrapped.rescale_grad == pytest.approx(1 / len(x))
    together = fit(x[mine], y[mine], wrapped)
    for name, value in alone.items():
        np.testing.assert_allclose(together[name].asnumpy(), value.asnumpy(), rtol=1e-5, atol=1e-5)


def test_distributed_optimizer_keeps_the_type_and_attributes_of_the_wrapped_one(rank, size):
    inner = mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(inner)
    assert isinstance(wrapped, mx.optimizer.Optimizer) and wrapped.momentum == 0.9
    wrapped.set_learning_rate(0.5)
    wrapped.lr_mult = {"w": 2.0}
    assert inner.lr == wrapped.learning_rate == 0.5 and inner.lr_mult == {"w": 2.0}
    again = pickle.loads(pickle.dumps(wrapped))
    assert again.lr == 0.5
    with pytest.warns(UserWarning, match="DistributedOptimizer"):
        net = net_of(1, (1,))
        hvd.DistributedTrainer(net.collect_params(), wrapped)


def test_compression_gives_back_the_dtype(rank, size):
    net = net_of(1, (1,))
    net(mx.nd.ones((1, 3)))
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", compression=hvd.Compression.fp16)
    with mx.autograd.record():
        loss = net(full(rank + 1, (1, 3))).sum()
    loss.backward()
    trainer.allreduce_grads()
    gradient = net[0].weight.grad()
    assert gradient.dtype == np.float32
    near(gradient, size * (size + 1) / 2)


def test_parameters_of_deferred_shape_are_broadcast_once_their_shape_is_known(rank, size):
    net = net_of(20 + rank)
    hvd.broadcast_parameters(net.collect_params())
    net(mx.nd.ones((1, 5)))
    first, *others = hvd.allgather_object(weights(net))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_invalid_parameters_and_optimizers_are_refused(rank, size):
    with pytest.raises(ValueError, match="collect_params"):
        hvd.broadcast_parameters([full(1.0)])
    with pytest.raises(ValueError, match="rank"):
        hvd.broadcast_parameters({f"of_{rank}": full(1.0)})
    with pytest.raises(Invalid, match="optimizer"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(Invalid, match="positive"):
        hvd.DistributedOptimizer(mx.optimizer.SGD(), gradient_predivide_factor=0.0)


# ---- elastic


def test_state_is_restored_to_its_commit(rank, size):
    x, y = data()
    for optimizer in (("adam", {"learning_rate": 0.05}), ("sgd", {"momentum": 0.9})):
        net = net_of(3)
        net(mx.nd.array(x))
        trainer = hvd.DistributedTrainer(net.collect_params(), *optimizer)
        state = hvd.elastic.MXNetState(net, trainer, batch=0)
        steps(net, trainer, x, y, len(x), 2)
        state.batch = 2
        state.save()
        steps(net, trainer, x, y, len(x), 3)
        state.batch, ahead = 5, weights(net)
        state.restore()
        assert state.batch == 2
        steps(net, trainer, x, y, len(x), 3)
        for again, before in zip(weights(net), ahead, strict=True):
            np.testing.assert_array_equal(again, before)


def test_uninitialized_net_is_refused_as_a_state(rank, size):
    with pytest.raises(Invalid, match=wording.CALL_ONCE):
        hvd.elastic.MXNetState(net_of(1))
    with pytest.raises(Invalid, match="block"):
        hvd.elastic.MXNetState("net")


# ---- names


def test_documented_names_and_exported_names_agree(rank, size):
    page = pathlib.Path(__file__).parents[2] / "docs" / "horovod.md"
    found = set(re.findall(r"`horovod\.mxnet\.([^`]+)`", page.read_text()))
    for path in ("mpi_ops", "functions", "compression"):
        importlib.import_module(f"horovod.mxnet.{path}")
    for name in found:
        assert operator.attrgetter(name)(hvd) is not None, name
    assert not set(hvd.__all__) - found - {"Compression", "elastic"}
    assert not {f"elastic.{name}" for name in hvd.elastic.__all__} - found
