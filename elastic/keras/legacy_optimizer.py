"""Optimizers of legacy Keras (tf_keras) that reduce gradients over all ranks before they apply them: those of
``tf_keras.optimizers`` and of ``tf_keras.optimizers.legacy``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from elastic.optimizer.framework_options import GradientOptions
from elastic.tensorflow import gradients
from elastic.tensorflow.aggregation import GradientAggregation


class ReducesLegacyGradients:
    """What a distributed optimizer has besides its own methods."""

    _elastic: GradientOptions
    _elastic_local: set[int]  # ids of variables
    _elastic_passes: GradientAggregation | None

    def register_local_var(self, variable: Any) -> None:
        """This variable belongs to this rank: its gradient is not reduced."""
        self._elastic_local.add(id(variable))

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As legacy Keras's, with gradients reduced over all ranks; with several backward passes in a step, in the last
        one of them.
        """
        apply = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        found, variables = [each for each, _ in pairs], [each for _, each in pairs]
        passes = self._elastic_passes
        if passes is None:
            reduced = self._reduced(found, variables)
            return apply(list(zip(reduced, variables, strict=True)), *args, **kwargs)
        made = list(zip(passes.compute_gradients(found, variables), variables, strict=True))
        return passes.apply_gradients(lambda: apply(made, *args, **kwargs), self, made)

    def _reduced(self, found: list[Any], variables: Sequence[Any]) -> list[Any]:
        local = [id(variable) in self._elastic_local for variable in variables]
        return gradients.reduce(found, self._elastic, local)


def distribute(optimizer: Any, options: GradientOptions, passes: int, average: bool) -> Any:
    """The same optimizer, which reduces from now on."""
    # Not tracked by Keras: they are no part of what is saved.
    object.__setattr__(optimizer, "_elastic", options)
    object.__setattr__(optimizer, "_elastic_local", set())
    kind: Any = type(optimizer)
    optimizer.__class__ = _subclass(kind)
    aggregation = None
    if passes > 1:
        sparse_as_dense = options.sparse_as_dense
        aggregation = GradientAggregation(passes, optimizer._reduced, sparse_as_dense, average)
    object.__setattr__(optimizer, "_elastic_passes", aggregation)
    return optimizer


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes all variables that it works with."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:  # of tf_keras.optimizers.legacy
        optimizer._create_all_weights(variables)
    passes = getattr(optimizer, "_elastic_passes", None)
    if passes is not None:
        passes.build(variables)


@functools.cache
def _subclass(kind: type) -> type:
    # Of the same name and module, so that a saved model is one of Keras's own.
    return type(kind.__name__, (ReducesLegacyGradients, kind), {"__module__": kind.__module__})
