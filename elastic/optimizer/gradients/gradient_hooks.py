"""Autograd hooks that run for each gradient of an optimizer's parameters, and at the end of each backward pass.

The hooks only notify listeners, which make all decisions.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class OptimizerParameters:
    """Parameters of one optimizer, and their names."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        # A weak reference, so that the hooks of a dropped optimizer are removed before the next garbage collection.
        self._optimizer = weakref.ref(optimizer)
        self._names = names

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer, or None if it was garbage-collected."""
        return self._optimizer()

    def all(self) -> list[torch.Tensor]:
        """Return the current parameters in the optimizer's order."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def name(self, parameter: torch.Tensor, otherwise: str = "a parameter without a name") -> str:
        return self._names.get(parameter, otherwise)


class GradientListener(Protocol):
    """Interface of objects that are notified of new gradients."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient that a backward pass has added to ``parameter.grad``."""


class BackwardEndListener(Protocol):
    """Interface of objects that are notified at the end of a backward pass that has produced one of their gradients.

    The methods are called in the thread that ends the pass. backward() raises their exceptions.
    """

    number: int  # sort key for the order of the calls, equal on all ranks

    def backward_ended(self, inner: bool) -> None:
        """Handle the end of a backward pass.

        This method may communicate with other ranks, but must not wait for their gradients.

        Args:
            inner: whether the pass ran within another backward pass, as with re-entrant checkpointing.
        """

    def wait_after_backward(self) -> None:
        """Wait for results. This method is called after `backward_ended` of all listeners of the pass has returned."""


class _Pass:
    """One backward pass, with the listeners to notify at its end."""

    def __init__(self) -> None:
        self.waiters: weakref.WeakSet[BackwardEndListener] = weakref.WeakSet()

    def ended(self) -> None:
        waiters = sorted(self.waiters, key=lambda waiter: waiter.number)
        inner = torch._C._current_autograd_node() is not None
        # Let all listeners start their work before any of them blocks: other ranks may wait in a different order.
        for waiter in waiters:
            waiter.backward_ended(inner)
        for waiter in waiters:
            waiter.wait_after_backward()


# passes by the ID of autograd's graph task; only autograd references them, and it drops passes that fail
_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # needed because autograd runs one backward thread per device


def notify_end(waiter: BackwardEndListener) -> None:
    """Register a listener for the end of the current backward pass. Idempotent. Call this in a gradient hook."""
    number = torch._C._current_graph_task_id()
    with _lock:
        current = _passes.get(number)
        if current is None:
            current = _passes[number] = _Pass()
            torch.autograd.Variable._execution_engine.queue_callback(current.ended)
        current.waiters.add(waiter)


class GradientHooks:
    """Gradient hooks of one listener. They hold a weak reference to it, and are removed together with it."""

    def __init__(self, follower: GradientListener) -> None:
        self._call = functools.partial(_call, weakref.ref(follower))
        # parameter and hook, by the ID of the parameter
        self._hooks: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}
        weakref.finalize(follower, _remove, self._hooks).atexit = False

    def install(self, parameters: Iterable[torch.Tensor]) -> None:
        """Install hooks on exactly those of the given parameters that require a gradient. Idempotent."""
        wanted = {id(parameter): parameter for parameter in parameters}
        for key, parameter in wanted.items():
            if parameter.requires_grad and key not in self._hooks:
                handle = parameter.register_post_accumulate_grad_hook(self._call)
                self._hooks[key] = (parameter, handle)
        for key in self._hooks.keys() - wanted.keys():
            self._hooks.pop(key)[1].remove()


def _call(reference: weakref.ref[GradientListener], parameter: torch.Tensor) -> None:
    follower = reference()
    if follower is not None:
        follower.on_gradient(parameter)


def _remove(hooks: dict[int, tuple[torch.Tensor, RemovableHandle]]) -> None:
    for _, handle in hooks.values():
        handle.remove()
