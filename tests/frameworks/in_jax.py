"""`elastic.jax`, on every rank of a world."""

from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import elastic
import elastic.jax as ej
from elastic.errors import Fixed, Invalid, NotElastic, TensorMismatch, UnsupportedType
from elastic.jax import unsupported_modes
from elastic.jax.compiled import forget_errors
from elastic.negotiation.process_sets import add_process_set, remove_process_set

jax.config.update("jax_num_cpu_devices", 2)  # the second one is for arrays that are refused

REDUCED = ("uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32")
SENT = (*REDUCED, "uint16", "uint32", "bool", "complex64", "float8_e4m3fn")


class Point(NamedTuple):
    x: jax.Array
    y: list


def test_an_allreduce_keeps_structure_shapes_and_dtypes(rank, size):
    tree = {
        "a": Point(jnp.full((2, 3), rank, "float32"), [jnp.float32(rank), np.full(4, rank, "f4")]),
        "b": (rank, None, jnp.zeros((0, 2))),
    }
    found = ej.allreduce(tree, ej.Sum)
    total = sum(range(size))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert isinstance(found["a"], Point) and found["a"].x.shape == (2, 3)
    assert all(isinstance(each, jax.Array) for each in jax.tree.leaves(found))
    assert all((each == total).all() for each in jax.tree.leaves(found))
    assert ej.allreduce({}) == {}
    for dtype in REDUCED:
        made = ej.allreduce(jnp.full((5,), rank + 1, dtype), ej.Max)
        assert made.dtype == dtype and (made == size).all(), dtype
    with pytest.raises(UnsupportedType):
        ej.allreduce(jnp.zeros(3, "uint32"))
    with pytest.raises(TypeError):
        ej.allreduce({"a": "text"})
    with pytest.raises(UnsupportedType):
        ej.allreduce(jax.random.key(0))


def test_average_over_all_ranks_is_correct_with_each_option(rank, size):
    value = jnp.arange(6.0) + rank
    mean = np.arange(6.0) + (size - 1) / 2
    np.testing.assert_allclose(ej.allreduce(value), mean)
    np.testing.assert_allclose(ej.allreduce(value, compression=ej.Compression.fp16), mean)
    np.testing.assert_allclose(
        ej.allreduce(value, ej.Sum, prescale_factor=2.0, postscale_factor=0.5), mean * size
    )


def test_a_process_set_reduces_over_its_ranks_only(rank, size):
    alone = add_process_set([1])
    if rank == 1:
        assert ej.allreduce(jnp.float32(rank), ej.Sum, process_set=alone) == 1.0
    remove_process_set(alone)


def test_a_broadcast_sends_every_dtype_and_keys(rank, size):
    for dtype in SENT:
        found = ej.broadcast({"a": jnp.full((3,), rank, dtype)}, 1)["a"]
        assert found.dtype == dtype and (found.astype("complex64") == 1).all(), dtype
    keys = ej.broadcast(jax.random.split(jax.random.key(rank), 2), 0)
    assert (
        jax.random.key_data(keys) == jax.random.key_data(jax.random.split(jax.random.key(0)))
    ).all()
    with pytest.raises(ValueError):
        ej.broadcast(jnp.zeros(2 + rank))


def test_an_allgather_concatenates_rows_of_different_numbers(rank, size):
    found = ej.allgather({"a": jnp.full((rank + 1, 2), rank, "int32")})["a"]
    wanted = np.concatenate([np.full((each + 1, 2), each) for each in range(size)])
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(Invalid):
        jax.jit(ej.allgather)(jnp.zeros((2, 2)))


def test_results_are_unchanged_by_later_collectives(rank, size):
    first = ej.allreduce(jnp.full(100_000, 1.0 + rank))
    before = np.array(first)
    ej.allreduce(jnp.full(100_000, 7.0))
    np.testing.assert_array_equal(first, before)


def test_arrays_may_be_donated_after_a_collective_and_a_commit(rank, size):
    give = jax.jit(lambda a: a + 1, donate_argnums=0)
    params = jnp.full(1000, 1.0 + rank)
    state = ej.JaxState(params=params, step=0)
    reduced = ej.allreduce(params)
    state.params = give(state.params)
    assert params.is_deleted()
    state.step = 1
    state.restore()
    assert state.step == 0
    np.testing.assert_array_equal(state.params, np.full(1000, 1.0 + rank))
    np.testing.assert_array_equal(reduced, np.full(1000, (size + 1) / 2))
    give(state.params)
    with pytest.raises(Invalid):
        state.save()


def test_a_compiled_function_runs_its_collectives_each_time(rank, size):
    @jax.jit
    def double(a):
        return ej.allreduce({"a": a}, ej.Sum)["a"] * 2 + ej.broadcast(a, 1)

    for value in (1.0, 2.0):
        found = double(jnp.full(3, value * rank))
        np.testing.assert_allclose(found, np.full(3, value * (size - 1) * size + value))


def test_collective_in_an_unsupported_jax_transformation_is_refused(rank, size):
    for function in (
        lambda: jax.vmap(ej.allreduce)(jnp.zeros((2, 2))),
        lambda: jax.grad(lambda a: ej.allreduce(a).sum())(jnp.zeros(2)),
        lambda: jax.jit(ej.broadcast)(jax.random.key(0)),
    ):
        with pytest.raises(Invalid):
            function()


def test_error_in_a_compiled_function_is_raised_with_its_own_type(rank, size):
    @ej.run
    def train(state):
        return jax.block_until_ready(jax.jit(ej.allreduce)(jnp.zeros(2 + rank)))

    with pytest.raises(TensorMismatch):
        train(ej.JaxState(params=jnp.zeros(1)))


def test_compiled_function_runs_after_an_error_with_pending_inputs(rank, size):
    reduce = jax.jit(ej.allreduce)

    @ej.run
    def train(state):
        pending = jax.jit(lambda a: (a @ a @ a @ a)[0, : 2 + rank])(jnp.ones((1500, 1500)))
        return jax.block_until_ready(reduce(pending))

    with pytest.raises(TensorMismatch):
        train(ej.JaxState(params=jnp.zeros(1)))
    forget_errors()
    np.testing.assert_allclose(reduce(jnp.ones(3)), np.ones(3))


def test_an_optimizer_averages_gradients_inside_and_outside_of_compiled_functions(rank, size):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    optimizer = ej.distributed_gradients(inner)
    params = {"w": jnp.ones(4), "b": jnp.zeros(())}
    gradients = {"w": jnp.full(4, 1.0 + rank), "b": jnp.float32(rank)}
    mean = {"w": jnp.full(4, (size + 1) / 2), "b": jnp.float32((size - 1) / 2)}
    wanted, _ = inner.update(mean, inner.init(params), params)
    for update in (optimizer.update, jax.jit(optimizer.update)):
        found, state = update(gradients, optimizer.init(params), params)
        assert jax.tree.structure(state) == jax.tree.structure(inner.init(params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)
    with pytest.raises(Invalid):
        ej.distributed_gradients("adam")


class Network(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def bits(tree):
    def of(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes(), str(leaf.dtype), leaf.shape

    return [of(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def test_a_restore_sets_exactly_the_committed_bits_of_every_kind_of_tree(rank, size):
    key = jax.random.key(rank)
    network = Network(nnx.Rngs(3))
    optimizer = nnx.Optimizer(network, optax.adam(1e-2), wrt=nnx.Param)
    mlp = equinox.nn.MLP(2, 1, 4, 1, key=jax.random.key(5))
    trees = {
        "params": {"w.0": jnp.arange(3.0), "w": [jnp.ones((2, 2), "bfloat16")]},
        "opt_state": optax.adam(1e-3).init({"a": jnp.ones(3)}),
        "keys": (key, jax.random.PRNGKey(4)),
        "mixed": Point(jnp.asarray(1.5), [np.arange(3), 7, "name", True, len, None]),
        "odd": (jnp.float32(jnp.nan), jnp.float32(-0.0), jnp.broadcast_to(2.0, (3,))),
        "mlp": mlp,
    }
    state = ej.JaxState(**trees, network=network, optimizer=optimizer, epoch=3)
    before = {name: bits(getattr(state, name)) for name in trees}
    modules = bits(nnx.state(network)), bits(nnx.state(optimizer))
    weak = [each.weak_type for each in (state.odd[0], state.odd[2], state.mixed.x)]
    for name in ("params", "opt_state", "mlp"):
        changed = jax.tree.map(
            lambda leaf: leaf + 1 if isinstance(leaf, jax.Array) else leaf, getattr(state, name)
        )
        setattr(state, name, changed)
    state.keys = jax.random.split(key)  # another structure, as if interrupted in the middle
    state.mixed = state.mixed._replace(x=jnp.asarray(9.0))
    optimizer.update(network, nnx.grad(lambda m: m(jnp.ones((5, 3))).sum())(network))
    assert (bits(nnx.state(network)), bits(nnx.state(optimizer))) != modules
    state.epoch = 4
    state.restore()
    assert state.epoch == 3
    assert {name: bits(getattr(state, name)) for name in trees} == before
    assert (bits(nnx.state(network)), bits(nnx.state(optimizer))) == modules
    assert state.network is network and state.optimizer is optimizer
    assert isinstance(state.mixed, Point) and state.mixed.y[1:] == [7, "name", True, len, None]
    assert isinstance(state.mixed.y[0], np.ndarray) and state.mlp.activation is mlp.activation
    assert weak == [each.weak_type for each in (state.odd[0], state.odd[2], state.mixed.x)]
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(trees["opt_state"])


def test_sync_makes_trees_equal_to_the_trees_of_rank_0(rank, size):
    state = ej.JaxState(
        params={"w": jnp.full(5, float(rank)), "scale": rank, "act": len},
        key=jax.random.key(rank),
        network=Network(nnx.Rngs(rank)),
        epoch=rank,
    )
    state.sync()
    assert (state.params["w"] == 0).all() and state.params["scale"] == 0 == state.epoch
    assert state.params["act"] is len
    assert bits(state.key) == bits(jax.random.key(0))
    assert bits(nnx.state(state.network)) == bits(nnx.state(Network(nnx.Rngs(0))))


def test_a_tree_of_another_layout_is_refused_with_its_path(rank, size):
    state = ej.JaxState(params={"a": {"b": jnp.ones(3)}, "n": 1}, step=0)
    for other in (
        {"a": {"b": jnp.ones(4)}, "n": 1},
        {"a": {"b": jnp.ones(3, "float16")}, "n": 1},
        {"a": {"b": jnp.ones(3)}, "n": 1.0},
        {"a": {"c": jnp.ones(3)}, "n": 1},
        {"a": {"b": jnp.ones(3)}, "n": 1, "more": jnp.ones(1)},
    ):
        state.params = other
        with pytest.raises(Invalid) as refused:
            state.save()
        assert "state.params." in str(refused.value)
        state.restore()  # the last complete commit
    assert bits(state.params) == bits({"b": jnp.ones(3)})
    state.save()


def test_flax_objects_within_trees_stay_the_same_objects_after_a_restore(rank, size):
    network, rngs = Network(nnx.Rngs(3)), nnx.Rngs(5)
    optimizer = nnx.Optimizer(network, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    state = ej.JaxState(
        rng=rngs,
        metrics=metrics,
        trained=(network, optimizer),
        nets={"a": network, "ema": jnp.ones(2)},
    )
    held = rngs, metrics, network, optimizer
    before = [bits(nnx.state(each)) for each in held]
    rngs.params()
    metrics.update(loss=jnp.float32(3.0))
    optimizer.update(network, nnx.grad(lambda m: m(jnp.ones((5, 3))).sum())(network))
    state.nets = {"a": network, "ema": jnp.zeros(2)}
    assert all(bits(nnx.state(each)) != was for each, was in zip(held, before, strict=True))
    state.restore()
    assert [bits(nnx.state(each)) for each in held] == before
    assert state.rng is rngs and state.metrics is metrics and state.nets["a"] is network
    assert state.trained[0] is network and state.trained[1] is optimizer
    assert (state.nets["ema"] == 1).all()
    state.commit()


def test_numpy_and_complex_numbers_in_a_tree_are_sent(rank, size):
    tree = {"w": jnp.ones(2), "f": np.float32(rank), "b": np.bool_(rank == 0), "c": rank + 1j}
    state = ej.JaxState(tree=tree, key=jax.random.key(rank), rng=jax.random.key(rank))
    state.sync()
    found = state.tree
    assert found["f"] == 0 and type(found["f"]) is np.float32
    assert found["b"] and type(found["b"]) is np.bool_
    assert found["c"] == 1j
    assert bits(state.rng) == bits(state.key) == bits(jax.random.key(0))


def test_run_decorates_only_functions(rank, size):
    wrong: tuple[Any, ...] = (3, None, jnp.ones(2))
    for each in wrong:
        with pytest.raises(Invalid):
            ej.run(each)


def test_values_that_a_state_cannot_hold_are_refused_with_their_path(rank, size):
    one, both = jnp.ones(4), jax.make_mesh((2,), ("x",))
    divided = jax.device_put(one, jax.NamedSharding(both, jax.P("x")))
    for leaf, error in (
        (divided, Invalid),
        (torch.ones(2), Invalid),
        (np.array(["a"]), UnsupportedType),
        (np.ones(2, ">f8"), UnsupportedType),
    ):
        with pytest.raises(error, match=r"state\.params\.a"):
            ej.JaxState(params={"a": leaf, "b": one})
    state = ej.JaxState(params={"a": one}, log={1: 2, "mixed": 3})
    state.params = {"a": divided}
    with pytest.raises(Invalid, match=r"state\.params\.a"):
        state.save()
    with pytest.raises(Invalid):
        jax.jit(lambda a: ej.JaxState(params=a))(one)
    with pytest.raises(TypeError):
        ej.JaxState({"a": one})  # type: ignore[call-arg]


def test_layouts_are_equal_only_for_equal_trees(rank, size):
    def layout(**values):
        return ej.JaxState(**values).layout()

    one = {"a": jnp.ones(3), "f": len}
    assert layout(p=one) == layout(p={"a": jnp.zeros(3), "f": max})
    assert layout(p=one) != layout(p={"a": jnp.ones(4), "f": len})
    assert layout(k=jax.random.key(0)) != layout(k=jax.random.PRNGKey(0))


def test_jax_distributed_is_refused_in_an_elastic_job(rank, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "is_initialized", lambda: True)
        with pytest.raises(NotElastic) as refused:
            ej.JaxState(a=jnp.ones(1))
        assert refused.value.kind is Fixed.JAX_PROGRAM
        patch.undo()
        patch.setenv("ELASTIC_DRIVER", "127.0.0.1:1")
        patch.setenv("ELASTIC_WORKER", "localhost:0#1")
        patch.setenv("ELASTIC_SECRET", "00")
        with pytest.raises(NotElastic):
            jax.distributed.initialize()
    unsupported_modes.check_not_distributed()
    assert elastic.size() == size
