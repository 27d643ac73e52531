"""Conversion between JAX arrays and torch tensors, through DLPack if it supports the dtype.

A tensor made from an array is a view of the array's memory. JAX counts the view as a reference: an array that is
donated to a compiled function while the view exists is copied, not overwritten.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from elastic.api.arrays import to_numpy, to_torch
from elastic.errors import Invalid, UnsupportedType

# For each kind of dtype, a Python number that JAX converts to an array with a weak dtype of this kind.
_ZEROS: dict[str, Any] = {"f": 0.0, "i": 0, "c": 0j}


def is_key(value: Any) -> bool:
    """Return whether the value is an array of typed PRNG keys, as from ``jax.random.key``."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_traced(value: Any) -> bool:
    """Return whether the value is an array in a function that JAX is tracing."""
    return isinstance(value, jax.core.Tracer)


def check_device(array: jax.Array, what: str) -> None:
    """Raise Invalid if the array is not on a single device of this process."""
    if len(array.sharding.device_set) > 1 or not array.is_fully_addressable:
        raise Invalid(
            f"{what} is on {len(array.sharding.device_set)} devices, but each worker uses one device: start one worker"
            " per device, and do not use jax.sharding"
        )


def view(array: jax.Array) -> torch.Tensor:
    """Return a tensor that is a view of an array, or of the uint32 data of PRNG keys.

    This function waits until the array is computed.

    The tensor must not be written to. If torch was built without CUDA, a GPU array is copied to the host.

    Raises:
        RuntimeError: the array was deleted, because it was donated to a compiled function.
        UnsupportedType: torch has no such dtype.
    """
    if is_key(array):
        array = jax.random.key_data(array)
    array = jax.block_until_ready(array)
    platform = next(iter(array.devices())).platform
    if platform != "cpu" and not (platform == "gpu" and torch.cuda.is_available()):
        return to_torch(np.asarray(array))
    try:
        return from_dlpack(array)
    except (jax.errors.JaxRuntimeError, RuntimeError, BufferError) as error:
        raise UnsupportedType(
            f"an array of {array.dtype} can't be sent or committed: cast it to a dtype of torch"
        ) from error


def array_of(tensor: torch.Tensor) -> jax.Array:
    """Return an array with the tensor's shape, dtype and values, on its device.

    The array takes over the tensor's memory, which must not be written to afterwards.
    """
    tensor = tensor.detach().contiguous()
    if tensor.is_cuda and jax.default_backend() != "gpu":
        tensor = tensor.cpu()
    return jax.dlpack.from_dlpack(tensor)


def array_like(tensor: torch.Tensor, sharding: Any, *, weak: bool, key: Any) -> jax.Array:
    """Return an array with the values of a commit, on the device of the former array.

    Args:
        tensor: tensor such as `view` returns. The array takes over its memory.
        sharding: sharding of the former array.
        weak: whether the dtype of the array is weak, like that of a Python number in ``jnp.asarray(1.0)``.
        key: implementation of the PRNG keys in the array. None means that it contains no keys.
    """
    device = next(iter(sharding.device_set))
    if device.platform == "cpu":
        made = array_of(tensor)
    else:
        made = array_of(tensor) if tensor.is_cuda else jnp.asarray(to_numpy(tensor))
    if made.sharding != sharding:
        made = jax.device_put(made, sharding)
    if key is not None:
        return jax.random.wrap_key_data(made, impl=key)
    if weak and made.dtype.kind in _ZEROS:
        return jnp.broadcast_to(_ZEROS[made.dtype.kind], made.shape).at[...].set(made)
    return made
