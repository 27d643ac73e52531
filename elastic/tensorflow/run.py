"""``elastic.run`` for functions that train with TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from elastic import run_loop
from elastic.errors import Invalid
from elastic.tensorflow.errors import unwrapped

Value = TypeVar("Value")


def run(func: Callable[..., Value]) -> Callable[..., Value]:
    """`elastic.run_loop.run`, which also recovers from what TensorFlow reports of a collective inside a graph."""
    if not callable(func):
        raise Invalid(f"elastic.run decorates a function, not a {type(func).__name__}")

    @functools.wraps(func)
    def training(*args: Any, **kwargs: Any) -> Value:
        with unwrapped():
            return func(*args, **kwargs)

    return run_loop.run(training)
