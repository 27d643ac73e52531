"""Detection of the Keras 3 backend, and functions on tensors of torch and JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.api.arrays import to_numpy, value_of
from elastic.api.keras_version import keras
from elastic.errors import Invalid
from elastic.rendezvous import worker_settings

BACKENDS = ("tensorflow", "torch", "jax")

if keras.backend.backend() == "tensorflow":
    worker_settings.keep_tensors()


def backend() -> str:
    """Return the name of Keras's backend. Raises Invalid if the backend cannot train."""
    found: str = keras.backend.backend()
    if found not in BACKENDS:
        raise Invalid(
            f"the Keras backend is {found}, which is not supported: set KERAS_BACKEND to one of"
            f" {', '.join(BACKENDS)}"
        )
    return found


def apply(
    compute: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], tensors: Sequence[Any]
) -> list[Any]:
    """Apply ``compute`` to tensors of torch or JAX. Results have the same shapes and dtypes.

    ``compute`` runs immediately, or, in a step compiled by JAX, each time that step runs. For TensorFlow see
    `elastic.tensorflow.bridge`.
    """
    if backend() == "jax":
        return _in_jax(compute, tensors)
    return list(compute([tensor.detach() for tensor in tensors]))


def held(variable: Any) -> Any:
    """Return the backend variable of a Keras variable. Return other objects unchanged."""
    found = getattr(variable, "value", None)
    return variable if found is None or callable(found) else found


def is_traced(value: Any) -> bool:
    """Return whether the value is a tensor of a step that JAX is compiling."""
    if backend() != "jax":
        return False
    import jax

    return isinstance(value, jax.core.Tracer)


def of_backend(value: Any) -> Any:
    """Convert a number, an array or a tensor to a tensor of torch or JAX. Torch tensors stay on their device."""
    if is_traced(value) or isinstance(value, torch.Tensor):
        return value
    made = value_of(value)
    if backend() == "torch":
        return made
    import jax

    return jax.numpy.asarray(to_numpy(made))


def _in_jax(
    compute: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], tensors: Sequence[Any]
) -> list[Any]:
    import jax

    from elastic.jax import compiled

    if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return compiled.call(compute, tensors)
    return [jax.numpy.asarray(to_numpy(each)) for each in compute(list(map(value_of, tensors)))]


def where(
    condition: Any, true: Callable[[], list[Any]], false: Callable[[], list[Any]]
) -> list[Any]:
    """Return one of two results, depending on a condition.

    In a step compiled by JAX, the choice is part of the step.
    """
    if isinstance(condition, bool):
        return true() if condition else false()
    chosen: list[Any] = keras.ops.cond(condition, true, false)
    return chosen
