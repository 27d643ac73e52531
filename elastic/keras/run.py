"""``elastic.run`` for functions that train with Keras, on each of its backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from elastic import run_loop
from elastic.keras import tensors

Value = TypeVar("Value")


def run(func: Callable[..., Value]) -> Callable[..., Value]:
    """Like `elastic.run_loop.run`, but also recover from errors reported for a collective in a compiled step."""
    match tensors.backend():
        case "tensorflow":
            from elastic.tensorflow import run as of_tensorflow

            return of_tensorflow.run(func)
        case "jax":
            return run_loop.run(_unwrapping(func))
        case _:
            return run_loop.run(func)


def _unwrapping(func: Callable[..., Value]) -> Callable[..., Value]:
    """Raise the error of a collective inside a compiled step, in place of the error that JAX reports for it."""
    import jax

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
