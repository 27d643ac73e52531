"""Which backend Keras 3 runs on, and collectives on torch's and JAX's tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elastic.api.arrays import to_numpy, to_torch, value_of
from elastic.api.which_keras import keras
from elastic.errors import Invalid
from elastic.rendezvous import environment

raised: deque[BaseException] = deque(maxlen=8)  # by collectives inside a step that JAX compiled
BACKENDS = ("tensorflow", "torch", "jax")

if keras.backend.backend() == "tensorflow":
    environment.keep_tensors()


def backend() -> str:
    """The backend. Raises Invalid for one that trains nothing."""
    found: str = keras.backend.backend()
    if found not in BACKENDS:
        raise Invalid(f"Keras runs on {found}; set KERAS_BACKEND to one of {', '.join(BACKENDS)}")
    return found


def apply(
    compute: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], tensors: Sequence[Any]
) -> list[Any]:
    """``compute`` of torch's or JAX's tensors, with results of the same shapes and dtypes: now, or in a step that JAX
    compiles each time that it runs. (TensorFlow's have `elastic.tensorflow.bridge`.)
    """
    if backend() == "jax":
        return _in_jax(compute, tensors)
    return list(compute([tensor.detach() for tensor in tensors]))


def held(variable: Any) -> Any:
    """The backend's variable that one of Keras holds; any other is itself."""
    found = getattr(variable, "value", None)
    return variable if found is None or callable(found) else found


def is_traced(value: Any) -> bool:
    """Whether it is a tensor of a step that JAX is compiling."""
    if backend() != "jax":
        return False
    import jax

    return isinstance(value, jax.core.Tracer)


def of_backend(value: Any) -> Any:
    """A number, an array or a tensor as a tensor of torch or JAX; one of torch stays on its device."""
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
    from jax.experimental import io_callback

    if not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return [jax.numpy.asarray(to_numpy(each)) for each in compute(list(map(value_of, tensors)))]

    def run(*arrays: Any) -> list[Any]:
        try:
            results = compute([to_torch(np.asarray(array)) for array in arrays])
        except BaseException as error:
            raised.append(error)
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return [to_numpy(result) for result in results]

    kinds = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
    return list(io_callback(run, kinds, *tensors, ordered=True))


def where(
    condition: Any, true: Callable[[], list[Any]], false: Callable[[], list[Any]]
) -> list[Any]:
    """One of the two, whose results have the same shapes and dtypes: chosen now, or by a step that JAX compiles."""
    if isinstance(condition, bool):
        return true() if condition else false()
    chosen: list[Any] = keras.ops.cond(condition, true, false)
    return chosen
