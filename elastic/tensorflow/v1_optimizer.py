"""Optimizers of TensorFlow 1, whose ``compute_gradients`` reduces over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from elastic.errors import Invalid
from elastic.optimizer.framework_options import GradientOptions
from elastic.tensorflow import gradients


class DistributedV1(tf.compat.v1.train.Optimizer):
    """Computes gradients by the optimizer that it wraps, and reduces them. All else is the wrapped one's."""

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str | None,
        use_locking: bool,
        options: GradientOptions,
    ) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer = optimizer
        self._options = options
        self._local_vars: set[Any] = set()

    def register_local_var(self, variable: tf.Variable) -> None:
        """This variable belongs to this rank: its gradient is not reduced."""
        self._local_vars.add(variable.ref())

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, tf.Variable]]:
        """As the wrapped optimizer's, reduced over all ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        found = [gradient for gradient, _ in pairs]
        local = [variable.ref() in self._local_vars for _, variable in pairs]
        reduced = gradients.reduce(found, self._options, local)
        return [(made, variable) for made, (_, variable) in zip(reduced, pairs, strict=True)]

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.apply_gradients(*args, **kwargs)

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
    options: GradientOptions,
) -> DistributedV1:
    """Raises Invalid for what is distributed already, and for more than one backward pass in a step."""
    if isinstance(optimizer, DistributedV1):
        raise Invalid("this optimizer is a DistributedOptimizer already; wrap it only once")
    if passes != 1:
        raise Invalid(
            "backward_passes_per_step is not there for optimizers of TensorFlow 1; use a Keras optimizer"
        )
    return DistributedV1(optimizer, name, use_locking, options)
