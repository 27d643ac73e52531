"""Train a Flax model on handwritten digits with JAX, and continue when workers are lost or join. See docs/jax.md.

elasticrun -np 4 --min-np 2 examples/jax_elastic.py
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastic
import elastic.jax
from elastic.data import DataLoader

IMAGES, DIGITS = load_digits(return_X_y=True)
TRAINING = 1440  # images; the others are for the test

elastic.init()
network = nnx.Sequential(
    nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(64, 10, rngs=nnx.Rngs(1))
)
graph, params = nnx.split(network)
optimizer = optax.adam(3e-3)


def loss_of(params: nnx.State, images: jax.Array, digits: jax.Array) -> jax.Array:
    logits = nnx.merge(graph, params)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()


gradients_of = jax.jit(jax.value_and_grad(loss_of))


def updated(
    params: nnx.State, opt_state: optax.OptState, gradients: nnx.State
) -> tuple[nnx.State, optax.OptState]:
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


update = jax.jit(updated)


def train_and_test(epochs: int) -> None:
    images = torch.from_numpy(IMAGES[:TRAINING]).float() / 16
    dataset = TensorDataset(images, torch.from_numpy(DIGITS[:TRAINING]))
    loader = DataLoader(dataset, batch_size=90, shuffle=True)
    state = elastic.jax.JaxState(
        params=params, opt_state=optimizer.init(params), loader=loader, epoch=0, step=0
    )

    @elastic.jax.run
    def train(state: elastic.jax.JaxState) -> None:
        loss = jnp.nan  # after a loss of a worker, an epoch may have no batch left
        while state.epoch < epochs:
            loader.set_epoch(state.epoch)
            for batch, digits in loader:
                loss, gradients = gradients_of(state.params, batch.numpy(), digits.numpy())
                gradients = jax.tree.map(lambda each: each * loader.weight, gradients)
                gradients = elastic.jax.allreduce(gradients)
                state.params, state.opt_state = update(state.params, state.opt_state, gradients)
                state.step += 1
                state.commit()
            if elastic.rank() == 0:
                print(f"epoch {state.epoch} loss {loss:.4f}, {elastic.size()} workers")
            state.epoch += 1

    train(state)
    logits = nnx.merge(graph, state.params)(IMAGES[TRAINING:] / 16)
    right = (logits.argmax(1) == DIGITS[TRAINING:]).mean()
    print(f"rank {elastic.rank()}: {100 * right:.1f} % of the test images are right")


train_and_test(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
