"""Mapping from errors of collectives to TensorFlow's error classes, as in Horovod.

An error raised by a graph is an instance of TensorFlow's class only. In eager mode, it is an instance of both classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from elastic.errors import CollectiveFailed, NotInitialized, TensorMismatch

# The first matching pair applies. All other errors, such as a lost rank, become UnknownError.
_CLASSES: tuple[tuple[type[Exception], type[tf.errors.OpError]], ...] = (
    (CollectiveFailed, tf.errors.UnknownError),
    (TensorMismatch, tf.errors.FailedPreconditionError),
    (NotInitialized, tf.errors.FailedPreconditionError),
    (ValueError, tf.errors.InvalidArgumentError),
    (TypeError, tf.errors.InvalidArgumentError),
)


def class_of(error: BaseException) -> type[tf.errors.OpError]:
    """Return TensorFlow's class for the error. The default is UnknownError."""
    for kind, of_tensorflow in _CLASSES:
        if isinstance(error, kind):
            return of_tensorflow
    return tf.errors.UnknownError


def code_of(error: BaseException) -> int:
    """Return the C API's code for the class that `class_of` returns."""
    return int(class_of(error)(None, None, "").error_code)


def for_numpy_function(error: BaseException) -> type[Exception]:
    """Return the class to raise in ``tf.numpy_function`` for an error. FailedPrecondition is not supported there."""
    return ValueError if class_of(error) is tf.errors.InvalidArgumentError else RuntimeError


@contextlib.contextmanager
def for_eager() -> Iterator[None]:
    """Context manager that makes errors of an eager collective also instances of TensorFlow's class."""
    try:
        yield
    except Exception as error:
        of_tensorflow = class_of(error)
        if of_tensorflow is tf.errors.UnknownError or isinstance(error, tf.errors.OpError):
            raise
        made = _both(type(error), of_tensorflow)(str(error))
        vars(made).update(vars(error))  # copies attributes such as the calls of a mismatch
        raise made.with_traceback(error.__traceback__) from error.__cause__


_made: dict[tuple[type, type], type[Exception]] = {}


def _both(kind: type[Exception], of_tensorflow: type[tf.errors.OpError]) -> type[Exception]:
    key = kind, of_tensorflow
    if key not in _made:
        _made[key] = _make(kind, of_tensorflow)
    return _made[key]


def _make(kind: type[Exception], of_tensorflow: type[tf.errors.OpError]) -> type[Exception]:
    def init(self: Any, message: str) -> None:
        of_tensorflow.__init__(self, None, None, message)
        self.args = (message,)

    def reduce(self: Any) -> tuple[Any, ...]:
        return _again, (kind, of_tensorflow, self.message)

    return type(kind.__name__, (kind, of_tensorflow), {"__init__": init, "__reduce__": reduce})


def _again(
    kind: type[Exception], of_tensorflow: type[tf.errors.OpError], message: str
) -> Exception:
    return _both(kind, of_tensorflow)(message)
