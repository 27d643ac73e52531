"""Legacy Keras optimizers that reduce gradients over all ranks before applying them.

The optimizers of ``tf_keras.optimizers`` and ``tf_keras.optimizers.legacy`` are supported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from elastic.errors import Invalid
from elastic.optimizer.framework_options import GradientOptions
from elastic.tensorflow import gradients
from elastic.tensorflow.gradient_aggregation import GradientAggregation


class ReducesLegacyGradients:
    """Mixin of distributed optimizers of legacy Keras."""

    _elastic: GradientOptions
    _elastic_local: set[int]  # IDs of the variables that are not reduced
    _elastic_passes: GradientAggregation | None

    def register_local_var(self, variable: Any) -> None:
        """Exclude the gradient of a variable that is local to this rank from the reduction."""
        self._elastic_local.add(id(variable))

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """Apply gradients with legacy Keras's method, which calls `aggregate_gradients` to reduce them.

        With several backward passes per step, gradients are reduced in the last one.
        """
        apply = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        passes = self._elastic_passes
        if passes is None:
            return apply(pairs, *args, **kwargs)
        found, variables = [each for each, _ in pairs], [each for _, each in pairs]
        made = list(zip(passes.compute_gradients(found, variables), variables, strict=True))
        kwargs["experimental_aggregate_gradients"] = False
        return passes.apply_gradients(lambda: apply(made, *args, **kwargs), self, made)

    def aggregate_gradients(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        """Reduce gradients and return them. Loss scale optimizers call this method before they check for finite values.

        Because the check uses reduced gradients, either all ranks skip a step or none.
        """
        if self._elastic_passes is not None:
            raise Invalid(
                "backward_passes_per_step can't be combined with a loss scale in legacy Keras: omit one of"
                " them, or use Keras 3"
            )
        pairs = list(grads_and_vars)
        variables = [each for _, each in pairs]
        return list(
            zip(self._reduced([each for each, _ in pairs], variables), variables, strict=True)
        )

    # tf_keras.optimizers.legacy calls the method by this name.
    _aggregate_gradients = aggregate_gradients

    def _reduced(self, found: list[Any], variables: Sequence[Any]) -> list[Any]:
        local = [id(variable) in self._elastic_local for variable in variables]
        return gradients.reduce(found, self._elastic, local)


def distribute(optimizer: Any, options: GradientOptions, passes: int, average: bool) -> Any:
    """Make an optimizer reduce its gradients. For a loss scale optimizer, pass the inner optimizer."""
    # Bypasses Keras's attribute tracking, so that the attributes are not saved with the model.
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
    """Create all variables of an optimizer."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:  # The optimizer is from tf_keras.optimizers.legacy.
        optimizer._create_all_weights(variables)
    passes = getattr(optimizer, "_elastic_passes", None)
    if passes is not None:
        passes.build(variables)


@functools.cache
def _subclass(kind: type) -> type:
    # The class keeps name and module, so that a saved model is an ordinary Keras model.
    return type(kind.__name__, (ReducesLegacyGradients, kind), {"__module__": kind.__module__})
