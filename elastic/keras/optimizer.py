"""Keras 3 optimizers that reduce gradients over all ranks before they apply them, on each of Keras's backends."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.keras import tensors
from elastic.negotiation import submission
from elastic.negotiation.process_sets import ProcessSet, global_process_set, resolve


@dataclass
class KerasOptions:
    """What an optimizer was asked for. ``of_tensorflow``: for its own path, see `elastic.tensorflow.gradients`."""

    op: Op
    compression: Any
    factor: float
    process_set: ProcessSet
    scale_local_gradients: bool
    of_tensorflow: Any = None
    local: set[int] = field(default_factory=set)  # ids of variables


class ReducesGradients:
    """What a distributed optimizer has besides its own methods."""

    _elastic: KerasOptions

    def register_local_var(self, variable: Any) -> None:
        """This variable belongs to this rank: its gradient is not reduced."""
        self._elastic.local.add(id(variable))

    def apply(self, grads: Sequence[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        """As Keras's ``apply``, with gradients reduced over all ranks."""
        grads = list(grads)
        known = (
            getattr(self, "_trainable_variables")  # noqa: B009  Keras's own
            if trainable_variables is None
            else list(trainable_variables)
        )
        local = [id(variable) in self._elastic.local for variable in known]
        local += [False] * (len(grads) - len(local))
        reduced = _reduced(grads, local, self._elastic)
        return super().apply(reduced, trainable_variables)  # type: ignore[misc]


def distribute(optimizer: Any, options: KerasOptions) -> Any:
    """The same optimizer, which reduces from now on. Raises Invalid for what is no Keras optimizer."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise Invalid(f"{type(optimizer).__name__} is no Keras optimizer; wrap one")
    if isinstance(optimizer, ReducesGradients):
        raise Invalid("this optimizer is a DistributedOptimizer already; wrap it only once")
    tensors.backend()
    # Not tracked by Keras: it is no part of what is saved.
    object.__setattr__(optimizer, "_elastic", options)
    kind: Any = type(optimizer)
    optimizer.__class__ = _subclass(kind)
    _leave_xla_out()
    return optimizer


@functools.cache
def _subclass(kind: type) -> type:
    # Of the same name and module, so that a saved model is one of Keras's own.
    return type(kind.__name__, (ReducesGradients, kind), {"__module__": kind.__module__})


def _reduced(grads: list[Any], local: Sequence[bool], options: KerasOptions) -> list[Any]:
    if tensors.backend() == "tensorflow":
        from elastic.tensorflow import gradients

        return gradients.reduce(grads, options.of_tensorflow, local)
    process_set = options.process_set
    if process_set is not global_process_set and not process_set.included():
        return grads
    chosen = [place for place, each in enumerate(grads) if each is not None and not local[place]]
    compute = functools.partial(_reduce, options=options)
    made = tensors.apply(compute, [grads[place] for place in chosen]) if chosen else []
    for place, each in zip(chosen, made, strict=True):
        grads[place] = each
    if options.scale_local_gradients:
        size = submission.group_size(torch.device("cpu"), resolve(process_set))
        grads = [
            each / size if own and each is not None else each
            for each, own in zip(grads, local, strict=True)
        ]
    return grads


def _reduce(found: list[torch.Tensor], options: KerasOptions) -> list[torch.Tensor]:
    packed = [options.compression.compress(tensor) for tensor in found]
    handle = submission.start_allreduce(
        [tensor for tensor, _ in packed],
        "gradients",
        options.op,
        1.0 / options.factor,
        options.factor,
        members=resolve(options.process_set),
        soon=True,
    )
    return [
        options.compression.decompress(tensor, context)
        for tensor, (_, context) in zip(submission.synchronize(handle), packed, strict=True)
    ]


@functools.cache
def _leave_xla_out() -> None:
    """Keras compiles a step with XLA where it can, on TensorFlow; and XLA can't call what reduces."""
    if tensors.backend() != "tensorflow":
        return
    make = keras.Model.make_train_function

    @functools.wraps(make)
    def made(model: Any, force: bool = False) -> Any:
        if isinstance(getattr(model, "optimizer", None), ReducesGradients) and model.jit_compile:
            if model._compile_config and model._compile_config.config.get("jit_compile") is True:
                warnings.warn(
                    "jit_compile=True is left out: XLA can't compile a step whose gradients are reduced over ranks",
                    stacklevel=3,
                )
            model.jit_compile = False
        return make(model, force)

    keras.Model.make_train_function = made
