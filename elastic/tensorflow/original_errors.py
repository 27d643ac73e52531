"""Conversion of errors that TensorFlow raises for a graph to the original errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from elastic.tensorflow import bridge


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Context manager that raises the original error of a collective in a ``tf.function`` or graph."""
    try:
        yield
    except tf.errors.OpError as error:
        cause = bridge.original(error)
        if cause is None:
            raise
        raise cause from error
