"""Preparation of a joining worker before it reports ready, so that other ranks need not wait for it."""

from __future__ import annotations

import torch

from elastic.collectives.groups import group_factory
from elastic.collectives.shared_memory import arena
from elastic.state.snapshots import preallocated_memory
from elastic.state.state import ObjectState, State, parts_of


def prepare(state: State, *, native: bool, step_input: bytes = b"") -> None:
    """Load libraries, allocate memory and build the first training step in advance.

    Memory is allocated for the state to receive, its copies and the gradients. See `preallocated_memory`. Call
    `preallocated_memory.leave` once the state has been saved.

    Args:
        state: the state that the worker will receive.
        native: whether to load the C++ library and, if the state is on a GPU, NCCL.
        step_input: serialized description of an input batch, from which some frameworks build the first step.
    """
    group_factory.prepare(native)
    if not isinstance(state, ObjectState):
        return
    parts = parts_of(state).values()
    if torch.cuda.is_initialized():
        gpus = {each.device for part in parts for each in part.live()[1].values() if each.is_cuda}
        if len(gpus) == 1:
            group_factory.prepare_gpu(gpus.pop())
    for part in parts:
        part.build_step(step_input)
    # Twice the size of the received state, because this worker immediately copies the state for its first commit.
    preallocated_memory.make(2 * sum(part.bytes_to_come() for part in parts))
    gradients = sum(part.bytes_of_gradients() for part in parts)
    mine = arena.mine() if gradients else None
    if mine is not None:
        mine.touch(gradients)
