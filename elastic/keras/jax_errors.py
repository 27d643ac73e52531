"""Conversion of errors that JAX reports from inside a compiled step back to the original errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from elastic.keras import tensors

Value = TypeVar("Value")


def unwrapping(func: Callable[..., Value]) -> Callable[..., Value]:
    """Raise the error of a collective inside a compiled step, in place of JAX's error."""

    @functools.wraps(func)
    def training(*args: Any, **kwargs: Any) -> Value:
        tensors.raised.clear()
        try:
            return func(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            if not tensors.raised:
                raise
            cause = tensors.raised.pop()
            tensors.raised.clear()
            raise cause from error

    return training
