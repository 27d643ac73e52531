"""Arrays of numpy as torch's tensors, and back: how tensors of other frameworks travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from elastic.errors import UnsupportedType

Array = np.ndarray[Any, Any]


def to_torch(array: Array) -> torch.Tensor:
    """A view, but of what may not be written to or isn't in one piece, which is copied. Raises UnsupportedType."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")  # not ascontiguousarray: that has at least one dimension
    try:
        if array.dtype.name == "bfloat16":  # of ml_dtypes; numpy itself has none
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    except TypeError:
        raise UnsupportedType(
            f"a tensor of {array.dtype} can't be sent: cast it to a numeric type that torch also has"
        ) from None


def to_numpy(tensor: torch.Tensor) -> Array:
    """A view of a tensor on the CPU."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array


def value_of(variable: Any) -> torch.Tensor:
    """Of a variable or a tensor of any framework that numpy can read, on the CPU: a view where there can be one."""
    held = getattr(variable, "value", None)
    # Of Keras; TensorFlow has a method.
    value = variable if held is None or callable(held) else held
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    read = getattr(value, "numpy", None)
    return to_torch(np.asarray(read() if callable(read) else value))
