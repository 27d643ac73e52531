"""``elastic.run`` for functions that train with Keras, on each of its backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic import run_loop
from elastic.keras import backends

Value = TypeVar("Value")


def run(func: Callable[..., Value]) -> Callable[..., Value]:
    """Decorate a function that trains with Keras.

    Like `elastic.run`, the decorated function recovers from lost workers. It also recovers from the errors that
    compiled steps raise for failed collectives.

    Arguments, result and errors are those of `elastic.run`.
    """
    match backends.backend():
        case "tensorflow":
            from elastic.tensorflow import run as of_tensorflow

            return of_tensorflow.run(func)
        case "jax":
            from elastic.jax import elastic_run

            return elastic_run.run(func)
        case _:
            return run_loop.run(func)
