"""Mistakes of scripts for JAX that are seen in real steps on every rank of a world, and correct scripts without any."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import elastic.jax as ej
from elastic.errors import ScriptMistakes
from elastic.jax.state import JaxState
from elastic.runtime import lifecycle
from elastic.script_checks.mistakes import STEPS, Kind
from harness.observed_script import mistakes_of

ADAM = optax.adam(1e-3)


@jax.jit
def gradients_of(params):
    return jax.grad(lambda p: (p["w"].sum(0) * p["b"]).sum())(params)


@jax.jit
def step_inside(params):
    """Average the gradients inside a compiled function."""
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, ej.allreduce(gradients_of(params)))


def new_params():
    return {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}


def kinds(state, step, *, commits=True, steps=STEPS):
    """Return the mistakes of a script that calls ``step(state)``, and whether JaxState is as before.

    Without commits, the script never mentions them.
    """
    before = JaxState.__setattr__

    def train(state):
        while state.step < steps:
            step(state)
            state.step += 1
            if commits:
                state.commit()

    state.step = 0
    found = mistakes_of(state, train, commits=commits)
    assert JaxState.__setattr__ is before
    return found


def averaged(state):
    gradients = ej.allreduce(gradients_of(state.params))
    updates, state.opt_state = ADAM.update(gradients, state.opt_state)
    state.params = optax.apply_updates(state.params, updates)


def test_correct_scripts_with_momenta_are_not_reported(rank, size):
    params = new_params()
    whole = JaxState(params=params, opt_state=ADAM.init(params), step=0)
    assert kinds(whole, averaged) == set()


def test_correct_scripts_without_momenta_are_not_reported(rank, size):
    def inside(state):
        state.params = step_inside(state.params)

    assert kinds(JaxState(params=new_params(), step=0), inside) == set()

    def packed(state):
        given, unpack = jax.flatten_util.ravel_pytree(gradients_of(state.params))
        state.params = optax.apply_updates(state.params, unpack(ej.allreduce(given)))

    assert kinds(JaxState(params=new_params(), step=0), packed) == set()

    def one_by_one(state):
        state.params = jax.tree.map(ej.allreduce, state.params)

    assert kinds(JaxState(params=new_params(), step=0), one_by_one) == set()


def test_flax_modules_are_reported_only_when_outside_of_the_state(rank, size):
    net = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, ADAM, wrt=nnx.Param)

    def train(state):
        gradients = nnx.grad(lambda net: net(jnp.ones((2, 4))).sum())(net)
        optimizer.update(net, ej.allreduce(gradients))

    assert kinds(JaxState(net=net, optimizer=optimizer, step=0), train) == set()
    assert kinds(JaxState(net=net, step=0), train) == {Kind.OPTIMIZER_NOT_IN_STATE}
    assert kinds(JaxState(step=0), train) == {Kind.MODEL_NOT_IN_STATE, Kind.OPTIMIZER_NOT_IN_STATE}


def test_params_outside_of_the_state_are_reported_when_momenta_are_in_the_state(rank, size):
    params = new_params()

    def train(state):
        nonlocal params
        updates, state.opt_state = ADAM.update(ej.allreduce(gradients_of(params)), state.opt_state)
        params = optax.apply_updates(params, updates)

    state = JaxState(opt_state=ADAM.init(params), step=0)
    assert kinds(state, train) == {Kind.MODEL_NOT_IN_STATE}


def test_missing_commits_are_reported_after_the_first_steps(rank, size):
    params = new_params()
    state = JaxState(params=params, opt_state=ADAM.init(params), step=0)
    assert kinds(state, averaged, commits=False, steps=STEPS - 1) == set()
    assert kinds(state, averaged, commits=False) == {Kind.NO_COMMIT}


def test_gradients_that_are_not_averaged_are_reported(rank, size):
    def alone(state):
        state.params = optax.apply_updates(state.params, gradients_of(state.params))

    def loss_only(state):
        alone(state)
        ej.allreduce(jnp.float32(1.0))

    def inside_loss_only(state):
        alone(state)
        jax.jit(ej.allreduce)(jnp.float32(1.0)).block_until_ready()

    assert kinds(JaxState(params=new_params(), step=0), alone) == {Kind.NEVER_REDUCED}
    assert kinds(JaxState(params=new_params(), step=0), loss_only) == {Kind.ONLY_LOSS_REDUCED}
    state = JaxState(params=new_params(), step=0)
    assert kinds(state, inside_loss_only) == {Kind.ONLY_LOSS_REDUCED}


def test_state_of_a_job_without_training_has_no_mistakes(rank, size):
    assert kinds(JaxState(step=0), lambda state: None) == set()
    assert kinds(JaxState(params=new_params(), step=0), lambda state: None) == set()


def test_strict_mode_ends_the_training_at_the_first_mistake(rank, size):
    rt = lifecycle.current()
    state = JaxState(params=new_params(), step=0)
    with mock.patch.object(rt, "env", replace(rt.env, strict=True)), pytest.raises(ScriptMistakes):
        kinds(state, lambda state: None, commits=False)
