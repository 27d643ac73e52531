"""``elastic.run`` for functions that train with TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from elastic import run_loop
from elastic.errors import Interrupted, Invalid
from elastic.runtime import lifecycle
from elastic.tensorflow import leftover_variables
from elastic.tensorflow.original_errors import unwrapped

Value = TypeVar("Value")


def run(func: Callable[..., Value]) -> Callable[..., Value]:
    """Wrap a training function like `elastic.run_loop.run`, and also recover from errors of collectives in graphs.

    Arguments, result and errors are those of `elastic.run_loop.run`.
    """
    if not callable(func):
        raise Invalid(f"elastic.run got a {type(func).__name__}: decorate a function")

    @functools.wraps(func)
    def training(*args: Any, **kwargs: Any) -> Value:
        interruption: Interrupted
        try:
            with unwrapped():
                return func(*args, **kwargs)
        except Interrupted as error:
            rt = lifecycle.active()
            if rt is None or rt.alone:
                raise  # no further world follows, so the caller needs the traceback
            leftover_variables.frames_of(error)
            interruption = error
        raise interruption

    return run_loop.run(training)
