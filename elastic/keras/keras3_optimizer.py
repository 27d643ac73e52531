"""Keras 3 optimizers that reduce gradients over all ranks before applying them, on each of Keras's backends."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elastic.api.keras_version import LEGACY, keras
from elastic.errors import Invalid
from elastic.keras import backends
from elastic.negotiation import submission
from elastic.negotiation.process_sets import resolve_or_alone
from elastic.optimizer.framework_options import GradientOptions

_THIS = "legacy Keras" if LEGACY else "Keras 3"


class ReducesGradients:
    """Mixin of distributed optimizers of Keras 3.

    With gradient accumulation, gradients are reduced only in the pass that applies them.
    """

    _elastic: GradientOptions
    _elastic_local: set[int]  # IDs of the variables that are not reduced
    _elastic_outer: bool  # whether an enclosing loss scale optimizer reduces the gradients
    _elastic_factor: float  # factor applied to accumulated gradients after Keras has averaged them
    _elastic_applied: list[bool]  # whether each applied gradient belongs to a local variable
    gradient_accumulation_steps: int | None  # set by Keras
    _iterations: Any

    def register_local_var(self, variable: Any) -> None:
        """Exclude the gradient of a variable that is local to this rank from the reduction."""
        self._elastic_local.add(id(variable))

    def apply(self, grads: Sequence[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        """Reduce gradients over all ranks and apply them with Keras's ``apply``."""
        grads = list(grads)
        known = (
            getattr(self, "_trainable_variables")  # noqa: B009  Keras's own
            if trainable_variables is None
            else list(trainable_variables)
        )
        if not self.gradient_accumulation_steps and not self._elastic_outer:
            grads = self._reduced_of(grads, known)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _reduced_of(self, grads: list[Any], variables: Iterable[Any]) -> list[Any]:
        local = self._which_are_local(variables)
        local += [False] * (len(grads) - len(local))
        return _reduced(grads, local, self._elastic)

    def _backend_apply_gradients(self, grads: list[Any], trainable_variables: list[Any]) -> None:
        """Reduce gradients. This overrides Keras's method, which receives only variables with a gradient."""
        object.__setattr__(self, "_elastic_applied", self._which_are_local(trainable_variables))
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: list[Any]) -> list[Any]:
        """Reduce gradients.

        This overrides Keras's method, which receives the gradients that are about to be applied.
        """
        steps = self.gradient_accumulation_steps
        if steps and not self._elastic_outer:
            grads = backends.where(
                backends.backend() != "jax" or (self._iterations + 1) % steps == 0,
                lambda: _reduced(list(grads), self._elastic_applied, self._elastic),
                lambda: list(grads),
            )
        if steps and self._elastic_factor != 1:
            grads = [each * self._elastic_factor for each in grads]
        clipped: list[Any] = super()._clip_gradients(grads)  # type: ignore[misc]
        return clipped

    def _which_are_local(self, variables: Iterable[Any]) -> list[bool]:
        return [id(variable) in self._elastic_local for variable in variables]


class ReducesScaledGradients(ReducesGradients):
    """Mixin of loss scale optimizers, which skip steps with non-finite gradients.

    The check uses reduced gradients, so all ranks skip a step, or no rank does. Gradients are reduced in each backward
    pass, even if the inner optimizer accumulates.
    """

    _trainable_variables: list[Any]  # set by Keras

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """Reduce gradients and apply them. JAX calls this method instead of ``apply``."""
        grads = self._reduced_of(list(grads), self._trainable_variables)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]


def inside(optimizer: Any) -> Any:
    """Return the inner optimizer of a loss scale optimizer, or any other optimizer unchanged."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def kinds() -> list[type]:
    """Return the optimizer base classes of the installed Keras."""
    found: list[type] = [keras.optimizers.Optimizer]
    return [*found, keras.optimizers.legacy.Optimizer] if LEGACY else found


def is_optimizer(value: object) -> bool:
    return isinstance(value, tuple(kinds()))


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create all variables of an optimizer."""
    if LEGACY:
        from elastic.keras import legacy_optimizer

        legacy_optimizer.build(optimizer, variables)
    else:
        optimizer.build(variables)


def is_built(optimizer: Any) -> bool:
    if LEGACY:  # Optimizers of tf_keras.optimizers.legacy have no such flag, only weights.
        optimizer = inside(optimizer)
        return bool(getattr(optimizer, "_built", False) or getattr(optimizer, "weights", None))
    return bool(optimizer.built)


def variables_of(optimizer: Any) -> list[Any]:
    """Return all variables of an optimizer, including a loss scale and accumulated gradients."""
    if not LEGACY:
        return list(optimizer.variables)
    own = inside(optimizer).variables
    # The value is a number if the scale is fixed.
    scale: Any = getattr(optimizer, "_loss_scale", None)
    scales = [scale.current_loss_scale, scale.counter] if hasattr(scale, "counter") else []
    return [*(own() if callable(own) else own), *scales, *accumulated(optimizer)]


def accumulated(optimizer: Any) -> list[Any]:
    """Return the accumulated gradients of a distributed optimizer."""
    optimizer = inside(optimizer)
    passes = getattr(optimizer, "_elastic_passes", None)
    return list(
        getattr(optimizer, "_accumulated_gradients", ()) if passes is None else passes.variables()
    )


def check(optimizer: object) -> None:
    """Raise Invalid if the object is not an optimizer that can be distributed."""
    if not is_optimizer(optimizer):
        raise Invalid(
            f"{type(optimizer).__name__} is not an optimizer of {_THIS}: pass an optimizer of this Keras."
            " TF_USE_LEGACY_KERAS selects legacy Keras or Keras 3"
        )
    if hasattr(inside(optimizer), "_elastic"):
        raise Invalid(
            "this optimizer is already a DistributedOptimizer: wrap an optimizer only once"
        )


def distribute(optimizer: Any, options: GradientOptions, factor: float = 1) -> Any:
    """Make an optimizer reduce its gradients, and return it. Call `check` with the optimizer first.

    Args:
        optimizer: the optimizer.
        options: options of the reduction.
        factor: factor by which accumulated gradients are multiplied.
    """
    inner = inside(optimizer)
    _mark(inner, options, set(), factor)
    if inner is not optimizer:
        _reduce_around(optimizer)
    leave_xla_out()
    reduce_in_loss_scales()
    return optimizer


def _mark(optimizer: Any, options: GradientOptions, local: set[int], factor: float) -> None:
    kind: Any = type(optimizer)
    # Bypasses Keras's attribute tracking, so that the attribute is not saved with the model.
    object.__setattr__(optimizer, "_elastic", options)
    object.__setattr__(optimizer, "_elastic_local", local)
    object.__setattr__(optimizer, "_elastic_factor", factor)
    object.__setattr__(optimizer, "_elastic_outer", False)
    optimizer.__class__ = _subclass(kind)


def _reduce_around(scale: Any) -> None:
    """Make a loss scale optimizer reduce gradients in place of the distributed optimizer inside it."""
    inner = scale.inner_optimizer
    _mark(scale, inner._elastic, inner._elastic_local, 1)
    object.__setattr__(inner, "_elastic_outer", True)


@functools.cache
def _subclass(kind: type) -> type:
    scales = not LEGACY and issubclass(kind, keras.optimizers.LossScaleOptimizer)
    reduces = ReducesScaledGradients if scales else ReducesGradients
    # The class keeps name and module, so that a saved model is an ordinary Keras model.
    return type(kind.__name__, (reduces, kind), {"__module__": kind.__module__})


def _reduced(grads: list[Any], local: Sequence[bool], options: GradientOptions) -> list[Any]:
    if backends.backend() == "tensorflow":
        from elastic.tensorflow import gradients

        return gradients.reduce(grads, options, local)
    there = [place for place, each in enumerate(grads) if each is not None]
    shared = [place for place in there if not local[place]]
    owned = [place for place in there if local[place] and options.scale_local_gradients]
    for places, compute in ((shared, _reduce), (owned, _as_shares)):
        if places:
            run = functools.partial(compute, options=options)
            made = backends.apply(run, [grads[place] for place in places])
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
    size = submission.group_size(torch.device("cpu"), resolve_or_alone(options.process_set))
    return [tensor / size for tensor in found]


@functools.cache
def reduce_in_loss_scales() -> None:
    """Patch Keras's loss scale optimizers, which ``compile`` adds if a model's policy is mixed_float16."""
    if LEGACY:
        return
    kind: Any = keras.optimizers.LossScaleOptimizer
    begin = kind.__init__

    @functools.wraps(begin)
    def begun(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, inner_optimizer, *args, **kwargs)
        if hasattr(inner_optimizer, "_elastic"):
            _reduce_around(self)

    kind.__init__ = begun


@functools.cache
def leave_xla_out() -> None:
    """Disable XLA in Keras's training step on TensorFlow, because code compiled by XLA cannot call the reduction."""
    if backends.backend() != "tensorflow":
        return
    make = keras.Model.make_train_function

    @functools.wraps(make)
    def made(model: Any, force: bool = False) -> Any:
        if hasattr(getattr(model, "optimizer", None), "_elastic") and model.jit_compile:
            compiled = getattr(model, "_compile_config", None)
            if LEGACY or (compiled and compiled.config.get("jit_compile") is True):
                warnings.warn(
                    "ignored jit_compile=True: XLA can't compile a step whose gradients are reduced over ranks",
                    stacklevel=3,
                )
            model.jit_compile = False
        return make(model, force)

    keras.Model.make_train_function = made
