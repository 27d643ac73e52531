"""Conversion between MXNet arrays and torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import mxnet as mx
import torch
from torch.utils import dlpack

from elastic.errors import UnsupportedType

Array: TypeAlias = mx.nd.NDArray


def view(array: Array, write: bool = False) -> torch.Tensor:
    """Return a tensor that shares the array's memory, on its device.

    This function waits for pending computations of MXNet.

    Args:
        array: dense array of float16, float32, float64, int8, uint8, int32 or int64.
        write: whether to wait for pending reads, which is required before the tensor is written to.

    Raises:
        TypeError: ``array`` is not an NDArray.
        UnsupportedType: the array is sparse, or has another dtype.
    """
    if not isinstance(array, mx.nd.NDArray):
        raise TypeError(f"got a {type(array).__name__}: pass an mxnet.nd.NDArray")
    if array.stype != "default":
        raise UnsupportedType(
            f"a {array.stype} array can't be sent: pass array.tostype('default') instead"
        )
    try:
        capsule = array.to_dlpack_for_write() if write else array.to_dlpack_for_read()
        tensor: torch.Tensor = dlpack.from_dlpack(capsule)
    except (mx.base.MXNetError, RuntimeError, BufferError) as error:
        raise UnsupportedType(
            f"an array of {_dtype_name(array)} can't be sent: cast it to a numeric dtype of torch"
        ) from error
    return tensor


def views(arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return a writable `view` of each array."""
    return [view(array, write=True) for array in arrays]


def copy_of(tensor: torch.Tensor, like: Array) -> Array:
    """Return a new array with the shape and values of a tensor, and with the device and dtype of ``like``."""
    made = mx.nd.empty(tuple(tensor.shape), ctx=like.context, dtype=like.dtype)
    if made.size:
        view(made, write=True).copy_(tensor)
    return made


def _dtype_name(array: Array) -> str:
    dtype: Any = array.dtype
    return getattr(dtype, "__name__", str(dtype))
