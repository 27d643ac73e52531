"""Simulation of memory faults for `elastic.failpoints`: flips a bit in a tensor of a state."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import torch

from elastic.failpoints import actions
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.state import ObjectState, State, parts_of

Found = Iterator[tuple[str, torch.Tensor]]


def offer(state: State) -> None:
    """Register this state's tensors with the failpoint action ``flip``."""
    if isinstance(state, ObjectState):
        for kind, find in FINDERS.items():
            actions.flippers[kind] = functools.partial(flip, state, find)


def flip(state: ObjectState, find: Callable[[ObjectState], Found], seed: int) -> str:
    """Flip one bit in one of the tensors. Every byte is equally likely to be chosen.

    The tensor's version counter does not change.

    Returns:
        A description of the flipped bit, or an empty string if there are no tensors.
    """
    drawn = random.Random(seed)
    tensors = {name: tensor for name, tensor in find(state) if tensor.nbytes}
    if not tensors:
        return ""
    [name] = drawn.choices([*tensors], [each.nbytes for each in tensors.values()])
    content = tensors[name].data.view(-1).view(torch.uint8)
    at, bit = drawn.randrange(content.numel()), drawn.randrange(8)
    content[at] ^= 1 << bit
    element, byte = divmod(at, tensors[name].element_size())
    return f"{name}, element {element}, bit {8 * byte + bit}"


def _weights(state: ObjectState) -> Found:
    for name, part in parts_of(state).items():
        if not isinstance(part, OptimizerStateHandler):
            structure, tensors = part.live()
            equal = part.equal_everywhere(structure)
            for key, tensor in tensors.items():
                if tensor.is_contiguous() and (equal is None or key in equal):
                    yield f"{name}.{key}", tensor


def _moments(state: ObjectState) -> Found:
    for name, part in parts_of(state).items():
        if isinstance(part, OptimizerStateHandler):
            for key, tensor in part.live()[1].items():
                if tensor.is_contiguous():
                    yield f"{name}.{key}", tensor


def _gradients(state: ObjectState) -> Found:
    for name, part in parts_of(state).items():
        if isinstance(part, OptimizerStateHandler):
            for number, parameter in enumerate(
                each for group in part.value.param_groups for each in group["params"]
            ):
                if parameter.grad is not None and parameter.grad.is_contiguous():
                    yield f"the gradient of {name}.{number}", parameter.grad


FINDERS = {"weights": _weights, "moments": _moments, "gradients": _gradients}
