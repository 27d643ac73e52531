"""Keras 3 optimizers that reduce gradients over all ranks before they apply them, on each of Keras's backends."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import torch

from elastic.errors import Invalid
from elastic.keras import tensors
from elastic.negotiation import submission
from elastic.negotiation.process_sets import resolve_or_alone
from elastic.optimizer.framework_options import GradientOptions


class ReducesGradients:
    """What a distributed optimizer has besides its own methods."""

    _elastic: GradientOptions
    _elastic_local: set[int]  # ids of variables

    def register_local_var(self, variable: Any) -> None:
        """This variable belongs to this rank: its gradient is not reduced."""
        self._elastic_local.add(id(variable))

    def apply(self, grads: Sequence[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        """As Keras's ``apply``, with gradients reduced over all ranks."""
        grads = list(grads)
        known = (
            getattr(self, "_trainable_variables")  # noqa: B009  Keras's own
            if trainable_variables is None
            else list(trainable_variables)
        )
        local = [id(variable) in self._elastic_local for variable in known]
        local += [False] * (len(grads) - len(local))
        reduced = _reduced(grads, local, self._elastic)
        return super().apply(reduced, trainable_variables)  # type: ignore[misc]


def check(optimizer: object) -> None:
    """Raises Invalid for what can't be distributed."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise Invalid(
            f"{type(optimizer).__name__} is not an optimizer of Keras 3; wrap one: legacy Keras is not supported"
        )
    if isinstance(optimizer, ReducesGradients):
        raise Invalid("this optimizer is a DistributedOptimizer already; wrap it only once")


def distribute(optimizer: Any, options: GradientOptions) -> Any:
    """The same optimizer, which reduces from now on. `check` it first."""
    # Not tracked by Keras: it is no part of what is saved.
    object.__setattr__(optimizer, "_elastic", options)
    object.__setattr__(optimizer, "_elastic_local", set())
    kind: Any = type(optimizer)
    optimizer.__class__ = _subclass(kind)
    _leave_xla_out()
    return optimizer


@functools.cache
def _subclass(kind: type) -> type:
    # Of the same name and module, so that a saved model is one of Keras's own.
    return type(kind.__name__, (ReducesGradients, kind), {"__module__": kind.__module__})


def _reduced(grads: list[Any], local: Sequence[bool], options: GradientOptions) -> list[Any]:
    if tensors.backend() == "tensorflow":
        from elastic.tensorflow import gradients

        return gradients.reduce(grads, options, local)
    there = [place for place, each in enumerate(grads) if each is not None]
    shared = [place for place in there if not local[place]]
    owned = [place for place in there if local[place] and options.scale_local_gradients]
    for places, compute in ((shared, _reduce), (owned, _as_shares)):
        if places:
            run = functools.partial(compute, options=options)
            made = tensors.apply(run, [grads[place] for place in places])
            for place, each in zip(places, made, strict=True):
                grads[place] = each
    return grads


def _reduce(found: list[torch.Tensor], options: GradientOptions) -> list[torch.Tensor]:
    packed = [options.compression.compress(tensor) for tensor in found]
    handle = submission.start_allreduce(
        [tensor for tensor, _ in packed],
        "gradients",
        options.op,
        1.0 / options.predivide_factor,
        options.predivide_factor,
        members=resolve_or_alone(options.process_set),
        soon=True,
    )
    return [
        options.compression.decompress(tensor, context)
        for tensor, (_, context) in zip(submission.synchronize(handle), packed, strict=True)
    ]


def _as_shares(found: list[torch.Tensor], options: GradientOptions) -> list[torch.Tensor]:
    """Local gradients, divided as the average of the others is."""
    size = submission.group_size(torch.device("cpu"), resolve_or_alone(options.process_set))
    return [tensor / size for tensor in found]


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
