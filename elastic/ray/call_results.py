"""Requests to persistent workers and their answers. Only sender and receiver pickle and unpickle them.

A worker answers every request, in order. `REGROUP` takes effect immediately, even during a call. The worker abandons
its world, so collectives that other ranks never join raise an error, and then forms a new world with the other ranks.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from elastic.errors import CollectiveFailed, ElasticError, Invalid, JobFailed, PeerLost

MAKE = "make"  # request with (class, args, kwargs): creates the instance and stores it
RUN = "run"  # request with (function, args, kwargs): calls the function
# request with (function,): calls the function, with the instance if one is stored
EXECUTE = "execute"
REGROUP = b"regroup"  # This request and the next are not pickled.
END = b"end"

FRAME_LIMIT = 1 << 30  # maximum number of bytes of a request or an answer

# First byte of an answer. It gives the kind without unpickling the value.
_VALUE, _FAILURE, _LOST = b"+", b"!", b"?"


class RaisedOnWorker(ElasticError, RuntimeError):
    """Error raised when a call failed on a worker with an exception that cannot be unpickled in this process.

    The message contains the worker's traceback.
    """


class WorkerTraceback(ElasticError):
    """Traceback of an exception on a worker, used as the cause of the exception that the caller receives."""

    def __str__(self) -> str:
        return "\n\n" + "".join(map(str, self.args))


@dataclass(frozen=True)
class CallFailure:
    """Failure of a call on a worker. ``error`` is the pickled exception, if it can be raised elsewhere.

    Args:
        secondary: whether the failure was most likely caused by a failure of another worker, because a collective
            failed or the job ended.
    """

    rank: int
    summary: str
    traceback: str
    error: bytes | None
    secondary: bool

    def exception(self) -> Exception:
        """Return the exception to raise: the original one if possible, with the worker's traceback as its cause."""
        error: object = None
        if self.error is not None:
            try:
                error = pickle.loads(self.error)
            except Exception:  # The class of the exception may exist only on the worker.
                error = None
        trace = self.traceback.rstrip()
        if not isinstance(error, Exception):
            return RaisedOnWorker(f"rank {self.rank} ended with {self.summary}\n\n{trace}")
        error.__cause__ = WorkerTraceback(f"on rank {self.rank}:\n{trace}\n")
        return error


def call(kind: str, *parts: Any) -> bytes:
    """Pickle a request to a worker. Raises Invalid if it is too large, and the errors of pickle."""
    word: bytes = cloudpickle.dumps((kind, parts))
    if len(word) > FRAME_LIMIT:
        raise Invalid(
            f"the function and its arguments have {len(word)} bytes, but the limit is {FRAME_LIMIT}: load large"
            " data inside the function"
        )
    return word


def answered(value: Any) -> bytes:
    """Pickle the answer of a successful call. Raises Invalid if it is too large, and the errors of pickle."""
    answer: bytes = _VALUE + cloudpickle.dumps(value)
    if len(answer) > FRAME_LIMIT:
        raise Invalid(
            f"the return value has {len(answer)} bytes, but the limit is {FRAME_LIMIT}: write the value to a"
            " file inside the function"
        )
    return answer


def failed(error: BaseException, rank: int) -> bytes:
    """Pickle the failure of a call. Never raises."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    try:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    except Exception:  # __str__ of the exception raised.
        summary = type(error).__name__
    secondary = isinstance(error, CollectiveFailed | JobFailed | PeerLost)
    return _FAILURE + pickle.dumps(
        CallFailure(rank, summary, "".join(lines), _pickled(error), secondary)
    )


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception, or return None.

    Only ordinary exceptions are pickled: ``sys.exit`` on a worker must not end the caller.
    """
    if not isinstance(error, Exception):
        return None
    try:
        blob: bytes = cloudpickle.dumps(error)
        pickle.loads(blob)  # Unpickling may fail for an exception with custom arguments.
    except Exception:
        return None
    return blob


def lost(why: str) -> bytes:
    """Return the answer for a worker that has ended."""
    return _LOST + why.encode()


def opened(answer: bytes) -> Any:
    """Return the value in an answer.

    Raises:
        JobFailed: the worker has ended.
        RaisedOnWorker: the function raised an exception that cannot be raised here.
        Exception: the function raised it on the worker.
    """
    failure = failure_in(answer)
    if failure is not None:
        raise failure.exception()
    return pickle.loads(memoryview(answer)[1:])


def failure_in(answer: bytes) -> CallFailure | None:
    """Return the failure in an answer, or None, without unpickling a value.

    Raises JobFailed if the worker has ended.
    """
    if answer[:1] == _VALUE:
        return None
    if answer[:1] == _LOST:
        raise JobFailed(answer[1:].decode())
    failure = pickle.loads(memoryview(answer)[1:])
    assert isinstance(failure, CallFailure)
    return failure


def cause(failures: Iterable[CallFailure]) -> CallFailure:
    """Return, of several ranks' failures in one call, the one that caused the others."""
    return min(failures, key=lambda failure: (failure.secondary, failure.rank))
