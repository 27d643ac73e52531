"""State of a Keras model, for all Keras backends."""

from __future__ import annotations

from typing import Any

from elastic.api.keras_version import keras
from elastic.errors import Invalid
from elastic.keras import keras3_optimizer as reducing
from elastic.keras import (
    observed_steps,  # noqa: F401  script checks see its optimizers' steps
    state_parts,  # noqa: F401  tells states how models and optimizers are handled
)
from elastic.state.handled_state import HandledState


class KerasState(HandledState):
    """State of a Keras model, its optimizer, and Python values, as in ``KerasState(model, batch=0, epoch=0)``.

    The state commits, restores and broadcasts all weights, the state of the optimizer, and the values.

    Args:
        model: built Keras model, that is, with an Input or called once.
        optimizer: Keras optimizer (default: the model's own). It is built if necessary.
        backend: ignored.
        rng: whether to commit and restore this worker's random generators (torch, numpy, random).
        **kwargs: values of the state, available as attributes.

    Raises:
        Invalid: the model is not built, or a value cannot be copied.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: Any = None,
        rng: Any = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, keras.Model):
            raise Invalid(
                f"model is a {type(model).__name__}: pass a keras.Model of the Keras version that this process"
                " uses"
            )
        optimizer = optimizer or getattr(model, "optimizer", None)
        if optimizer is not None and not reducing.is_optimizer(optimizer):
            raise Invalid(f"optimizer is a {type(optimizer).__name__}: pass a Keras optimizer")
        if optimizer is not None and model.built and not reducing.is_built(optimizer):
            reducing.build(optimizer, model.trainable_variables)
        values = {"model": model, "optimizer": optimizer}
        super().__init__({n: v for n, v in values.items() if v is not None} | kwargs, rng)
