"""Convert errors that TensorFlow reports from inside a graph back to the original errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from elastic.tensorflow import bridge


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the error of a collective inside a ``tf.function`` or graph, in place of TensorFlow's error."""
    try:
        yield
    except tf.errors.OpError as error:
        cause = bridge.original(error)
        if cause is None:
            raise
        raise cause from error
