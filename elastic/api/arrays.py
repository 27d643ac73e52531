"""Conversions between numpy arrays and torch tensors, for collectives on tensors of other frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from elastic.errors import UnsupportedType

Array = np.ndarray[Any, Any]


def to_torch(array: Array) -> torch.Tensor:
    """Convert an array to a CPU tensor of the same shape and dtype.

    The result is a view, or a copy if the array is read-only or not contiguous.

    Raises:
        UnsupportedType: torch has no equivalent of the array's dtype.
    """
    if not array.flags.writeable or not array.flags.c_contiguous:
        # np.ascontiguousarray() would turn a 0-d array into a 1-d array.
        array = np.array(array, order="C")
    try:
        # numpy has no bfloat16; the package ml_dtypes adds it.
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # ValueError: the byte order is not native.
        raise UnsupportedType(
            f"a tensor of {array.dtype} can't be sent: cast it to a numeric dtype of torch"
        ) from None


def to_numpy(tensor: torch.Tensor) -> Array:
    """Convert a CPU tensor to an array that shares its memory."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array


def value_of(variable: Any) -> torch.Tensor:
    """Return the value of a framework's variable or tensor as a CPU tensor of the same shape and dtype.

    The result is a view if possible, otherwise a copy.
    """
    held = getattr(variable, "value", None)
    # ``value`` is a property in Keras and a method in TensorFlow.
    value = variable if held is None or callable(held) else held
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    read = getattr(value, "numpy", None)
    return to_torch(np.asarray(read() if callable(read) else value))
