"""``elastic.run`` for functions that train with JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from elastic import run_loop
from elastic.jax import (
    compiled,
    observed_steps,  # noqa: F401  script checks see the steps of a JaxState
)

Value = TypeVar("Value")
Given = ParamSpec("Given")


def run(func: Callable[Given, Value]) -> Callable[Given, Value]:
    """Decorate a function that trains with JAX. Its first argument is a state. See `elastic.run`.

    Unlike with `elastic.run`, errors of collectives inside compiled functions keep their type. JAX would otherwise
    replace them with a JaxRuntimeError.

    Raises:
        Invalid: ``func`` is not callable.
    """
    return run_loop.run(unwrapping(func) if callable(func) else func)


def unwrapping(func: Callable[Given, Value]) -> Callable[Given, Value]:
    """Decorator that raises the original error of a collective in a compiled function instead of JAX's error."""

    @functools.wraps(func)
    def training(*args: Given.args, **kwargs: Given.kwargs) -> Value:
        compiled.forget_errors()
        try:
            return func(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            cause = compiled.cause()
            if cause is None:
                raise
            raise cause from error

    return training
