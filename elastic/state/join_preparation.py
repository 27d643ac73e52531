"""Preparation of a joining worker before it reports ready, so that the others do not wait in its first world. Acts."""

from __future__ import annotations

import torch

from elastic.collectives import group_factory
from elastic.collectives.shared_memory import arena
from elastic.state.snapshots import preallocated_memory
from elastic.state.state import ObjectState, State, parts_of


def prepare(state: State, *, native: bool, step_input: bytes = b"") -> None:
    """Loads what makes groups: where ``native``, the C++ library, and NCCL where the state is on a GPU. Touches the
    memory of what it will be sent, of its copies, and of its gradients; see `preallocated_memory`. Builds the first
    step, where ``step_input`` says of what a batch consists and the framework can.

    To be followed by `preallocated_memory.leave` once the state has been saved.
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
    # What is sent is copied at once, as the commit from which this worker goes on.
    preallocated_memory.make(2 * sum(part.bytes_to_come() for part in parts))
    gradients = sum(part.bytes_of_gradients() for part in parts)
    mine = arena.mine() if gradients else None
    if mine is not None:
        mine.touch(gradients)
