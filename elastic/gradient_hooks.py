"""Has backward call whoever follows the gradients of an optimizer's parameters. Decides nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class Follower(Protocol):
    """Who is told."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """``parameter.grad`` has received one backward pass."""


class GradientHooks:
    """Of one follower, which is held weakly: with it, its hooks are gone, without waiting for the collector."""

    def __init__(self, follower: Follower) -> None:
        self._call = functools.partial(_call, weakref.ref(follower))
        self._hooks: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}  # by id of the parameter
        weakref.finalize(follower, _remove, self._hooks).atexit = False

    def install(self, parameters: Iterable[torch.Tensor]) -> None:
        """On all that require a gradient, and on no others. Safe to repeat."""
        wanted = {id(parameter): parameter for parameter in parameters}
        for key, parameter in wanted.items():
            if parameter.requires_grad and key not in self._hooks:
                handle = parameter.register_post_accumulate_grad_hook(self._call)
                self._hooks[key] = (parameter, handle)
        for key in self._hooks.keys() - wanted.keys():
            self._hooks.pop(key)[1].remove()


def _call(reference: weakref.ref[Follower], parameter: torch.Tensor) -> None:
    follower = reference()
    if follower is not None:
        follower.on_gradient(parameter)


def _remove(hooks: dict[int, tuple[torch.Tensor, RemovableHandle]]) -> None:
    for _, handle in hooks.values():
        handle.remove()
