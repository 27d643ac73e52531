"""A job that trains with JAX; prints how far its parameters are from those of one undisturbed process.

Usage: jax_job.py STEPS [outside | inside], where the gradients are averaged: outside of compiled functions or in one.
"""

import os
import sys
import time
import zlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import elastic
import elastic.jax

STEPS, WHERE = int(sys.argv[1]), sys.argv[2]
ROWS = 12  # divided by 1, 2, 3 and 4 workers
plain = optax.adam(1e-2)
optimizer = elastic.jax.distributed_gradients(plain) if WHERE == "inside" else plain


def initial():
    keys = jax.random.split(jax.random.key(0))
    shapes = (16, 32), (32, 1)
    params = [jax.random.normal(each, shape) / 4 for each, shape in zip(keys, shapes, strict=True)]
    return {"params": params, "opt_state": plain.init(params), "key": jax.random.key(7)}


def loss_of(params, noise, x):
    hidden = jnp.tanh(x @ params[0] + noise)
    return jnp.mean((hidden @ params[1] - jnp.sin(x).sum(1, keepdims=True)) ** 2)


gradients_of = jax.jit(jax.value_and_grad(loss_of))


def step_of(optimizer):
    def step(params, opt_state, gradients):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step, donate_argnums=(0, 1))


def batch(step, rank, size):
    rows = np.random.default_rng(step).standard_normal((ROWS, 16), dtype=np.float32)
    return rows[rank::size]


elastic.init()
state = elastic.jax.JaxState(**initial(), step=0)
update = step_of(optimizer)


@elastic.jax.run
def train(state):
    while state.step < STEPS:
        state.key, used = jax.random.split(state.key)
        noise = jax.random.normal(used, (32,)) / 100
        rows = batch(state.step, elastic.rank(), elastic.size())
        loss, gradients = gradients_of(state.params, noise, rows)
        if WHERE == "outside":
            gradients = elastic.jax.allreduce(gradients)
        state.params, state.opt_state = update(state.params, state.opt_state, gradients)
        jax.block_until_ready(state.params)
        state.step += 1
        if state.step % 20 == 0:
            print(f"step {state.step} of {elastic.size()}, loss {loss:.4f}", flush=True)
        time.sleep(0.02)
        state.commit()


train(state)
alone, advance = initial(), step_of(plain)
params, opt_state, key = alone["params"], alone["opt_state"], alone["key"]
for number in range(STEPS):
    key, used = jax.random.split(key)
    noise = jax.random.normal(used, (32,)) / 100
    _, gradients = gradients_of(params, noise, batch(number, 0, 1))
    params, opt_state = advance(params, opt_state, gradients)
off = max(float(jnp.abs(a - b).max()) for a, b in zip(params, state.params, strict=True))
bits = zlib.crc32(b"".join(np.asarray(each).tobytes() for each in jax.tree.leaves(state.params)))
same_key = bool((jax.random.key_data(key) == jax.random.key_data(state.key)).all())
print(f"ended off by {off:.1e}, same key {same_key}", flush=True)
total = elastic.jax.allgather(jnp.asarray([[bits >> 1]], "int32"))
print(f"replicas equal {bool((total == total[0]).all())}", flush=True)
