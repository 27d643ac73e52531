"""Optimizers of TensorFlow 1 whose ``compute_gradients`` reduces over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from elastic.errors import Invalid
from elastic.optimizer.framework_options import GradientOptions
from elastic.tensorflow import gradients
from elastic.tensorflow.gradient_aggregation import GradientAggregation


class DistributedV1(tf.compat.v1.train.Optimizer):
    """Wrapper of a TensorFlow 1 optimizer that reduces the computed gradients.

    All other attributes are forwarded to the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str | None,
        use_locking: bool,
        options: GradientOptions,
        passes: int,
        average: bool,
    ) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer = optimizer
        self._options = options
        self._local_vars: set[Any] = set()
        self._passes: GradientAggregation | None = None
        if passes != 1:
            sparse_as_dense = options.sparse_as_dense
            self._passes = GradientAggregation(passes, self._reduce, sparse_as_dense, average)

    def register_local_var(self, variable: tf.Variable) -> None:
        """Exclude the gradient of a variable that is local to this rank from the reduction."""
        self._local_vars.add(variable.ref())

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, tf.Variable]]:
        """Return the gradients of the wrapped optimizer's method, reduced over all ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        found = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        reduce = self._reduce if self._passes is None else self._passes.compute_gradients
        return list(zip(reduce(found, variables), variables, strict=True))

    def _reduce(self, found: list[Any], variables: list[tf.Variable]) -> list[Any]:
        local = [variable.ref() in self._local_vars for variable in variables]
        return gradients.reduce(found, self._options, local)

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients with the wrapped optimizer.

        With several backward passes per step, only the last pass applies gradients.
        """
        if self._passes is None:
            return self._optimizer.apply_gradients(*args, **kwargs)
        return self._passes.apply_gradients(
            lambda: self._optimizer.apply_gradients(*args, **kwargs),
            self._optimizer,
            *args,
            **kwargs,
        )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


def distribute(
    optimizer: Any,
    name: str | None,
    use_locking: bool,
    passes: int,
    average: bool,
    options: GradientOptions,
) -> DistributedV1:
    """Wrap a TensorFlow 1 optimizer in `DistributedV1`.

    Args:
        optimizer: optimizer to wrap.
        name, use_locking: arguments of ``tf.compat.v1.train.Optimizer``.
        passes, average: see `GradientAggregation`.
        options: options of the reduction.

    Raises:
        Invalid: the optimizer is already wrapped.
    """
    if isinstance(optimizer, DistributedV1):
        raise Invalid(
            "this optimizer is already a DistributedOptimizer: wrap an optimizer only once"
        )
    return DistributedV1(optimizer, name, use_locking, options, passes, average)
