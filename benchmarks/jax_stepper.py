"""The `stepper` job with JAX: a small MLP, its gradients averaged between two compiled functions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One thread per worker, as the other jobs have.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import elastic
import elastic.jax
from stepper import StepLog

Params = list[tuple[jax.Array, jax.Array]]


def loss_of(params: Params, inputs: jax.Array) -> jax.Array:
    (first, bias), (last, end) = params
    return jnp.mean((jax.nn.relu(inputs @ first + bias) @ last + end) ** 2)


def main(directory: str, steps: int, width: int) -> None:
    elastic.init()
    keys = jax.random.split(jax.random.key(0))
    shapes = (64, width), (width, 10)
    params = [
        (jax.random.normal(key, shape) / 8, jnp.zeros(shape[1]))
        for key, shape in zip(keys, shapes, strict=True)
    ]
    optimizer = optax.sgd(0.01, momentum=0.9)

    def updated(
        params: Params, opt_state: optax.OptState, gradients: Params
    ) -> tuple[Params, optax.OptState]:
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    gradients_of, update = jax.jit(jax.grad(loss_of)), jax.jit(updated)
    state = elastic.jax.JaxState(params=params, opt_state=optimizer.init(params), step=0)
    # A joining worker compiles before other workers wait for it.
    update(params, state.opt_state, gradients_of(params, np.zeros((16, 64), "float32")))
    stop, log = Path(directory, "stop"), StepLog(directory)

    @elastic.jax.run
    def train(state: elastic.jax.JaxState) -> None:
        log.entered(state.step)
        last = steps
        while state.step < last:
            if last == steps and stop.exists():
                last = int(stop.read_text())
                continue
            drawn = np.random.default_rng(state.step * 1000 + elastic.rank())
            inputs = drawn.standard_normal((16, 64), dtype=np.float32)
            gradients = elastic.jax.allreduce(gradients_of(state.params, inputs))
            state.params, state.opt_state = update(state.params, state.opt_state, gradients)
            jax.block_until_ready(state.params)
            state.step += 1
            log.made(state.step)
            state.commit()

    log.ready()
    train(state)
    log.ended(np.array(each) for each in jax.tree.leaves(state.params))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
