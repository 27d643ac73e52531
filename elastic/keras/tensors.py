"""Collectives on the tensors of whatever backend Keras 3 runs on: TensorFlow, torch or JAX."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from elastic.api.arrays import to_numpy, to_torch
from elastic.errors import Invalid

raised: deque[BaseException] = deque(maxlen=8)  # by collectives inside a step that JAX compiled
BACKENDS = ("tensorflow", "torch", "jax")


def backend() -> str:
    """The backend. Raises Invalid for one that trains nothing."""
    found: str = keras.backend.backend()
    if found not in BACKENDS:
        raise Invalid(f"Keras runs on {found}; set KERAS_BACKEND to one of {', '.join(BACKENDS)}")
    return found


def apply(
    compute: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], tensors: Sequence[Any]
) -> list[Any]:
    """``compute`` of a backend's tensors, with results of the same shapes and dtypes: now, or in a graph each time that
    it runs.
    """
    match backend():
        case "torch":
            return list(compute([tensor.detach() for tensor in tensors]))
        case "tensorflow":
            from elastic.tensorflow import bridge

            return bridge.call(compute, tensors, [tensor.shape for tensor in tensors])
        case _:
            return _in_jax(compute, tensors)


def _in_jax(
    compute: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], tensors: Sequence[Any]
) -> list[Any]:
    import jax
    from jax.experimental import io_callback

    def run(*arrays: Any) -> list[Any]:
        try:
            results = compute([to_torch(np.asarray(array)) for array in arrays])
        except BaseException as error:
            raised.append(error)
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return [to_numpy(result) for result in results]

    kinds = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
    if not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return [jax.numpy.asarray(each) for each in run(*tensors)]
    return list(io_callback(run, kinds, *tensors, ordered=True))
