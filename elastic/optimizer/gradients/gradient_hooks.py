"""Has backward call whoever follows the gradients of an optimizer's parameters, also when it ends. Decides nothing."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class OptimizerParameters:
    """The parameters of one optimizer, and what they are called."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        # Weak, so that an optimizer that is dropped takes its hooks with it, without waiting for the collector.
        self._optimizer = weakref.ref(optimizer)
        self._names = names

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """None once it is gone."""
        return self._optimizer()

    def all(self) -> list[torch.Tensor]:
        """Those that it has now, in its order."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def name(self, parameter: torch.Tensor, otherwise: str = "a parameter without a name") -> str:
        return self._names.get(parameter, otherwise)


class GradientListener(Protocol):
    """Who is told."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """``parameter.grad`` has received one backward pass."""


class Waiter(Protocol):
    """Who is told when a backward pass ends that gave it a gradient, in the thread that ends it.

    What either method raises, backward() raises.
    """

    number: int  # equal on all ranks; they are told in this order

    def backward_ended(self, inner: bool) -> None:
        """The first call: it may meet other ranks, but waits for no gradients of theirs.

        ``inner``: it was within another backward pass, as with a checkpoint that is re-entrant.
        """

    def wait_after_backward(self) -> None:
        """Called when all waiters of the pass have had the first call."""


class _Pass:
    """One run of autograd's engine."""

    def __init__(self) -> None:
        self.waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()

    def ended(self) -> None:
        waiters = sorted(self.waiters, key=lambda waiter: waiter.number)
        inner = torch._C._current_autograd_node() is not None
        # All start what they have before any waits: another rank may wait for them in another order.
        for waiter in waiters:
            waiter.backward_ended(inner)
        for waiter in waiters:
            waiter.wait_after_backward()


# By the engine's number for it. The engine alone keeps them, and drops those that end by an error.
_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # each device has its own backward thread


def tell_end(waiter: Waiter) -> None:
    """Tell it once when the present backward pass has ended. For hooks."""
    number = torch._C._current_graph_task_id()
    with _lock:
        current = _passes.get(number)
        if current is None:
            current = _passes[number] = _Pass()
            torch.autograd.Variable._execution_engine.queue_callback(current.ended)
        current.waiters.add(waiter)


class GradientHooks:
    """Of one follower, which is held weakly: with it, its hooks are gone, without waiting for the collector."""

    def __init__(self, follower: GradientListener) -> None:
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


def _call(reference: weakref.ref[GradientListener], parameter: torch.Tensor) -> None:
    follower = reference()
    if follower is not None:
        follower.on_gradient(parameter)


def _remove(hooks: dict[int, tuple[torch.Tensor, RemovableHandle]]) -> None:
    for _, handle in hooks.values():
        handle.remove()
