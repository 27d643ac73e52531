"""Requests to persistent workers, and their answers. Only sender and receiver pickle and unpickle them.

A worker answers all requests, in order. `REGROUP` takes effect immediately, even during a call: the worker abandons its
world, so that collectives that other ranks never join raise an error, and then forms a new world with the other ranks.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from elastic.errors import CollectiveFailed, ElasticError, Invalid, JobFailed, PeerLost

MAKE = "make"  # Request with (class, args, kwargs): create an instance and store it
RUN = "run"  # Request with (function, args, kwargs): call the function
# Request with (function,): call the function with the stored instance, or without arguments if there is none
EXECUTE = "execute"
REGROUP = b"regroup"  # REGROUP and END are sent as they are, not pickled.
END = b"end"

FRAME_LIMIT = 1 << 30  # maximum size of a request or an answer in bytes

# First byte of an answer, which states the kind of the answer without unpickling it.
_VALUE, _FAILURE, _LOST = b"+", b"!", b"?"


class RaisedOnWorker(ElasticError, RuntimeError):
    """Error raised when a call has failed on a worker and its exception cannot be unpickled in this process.

    The message contains the worker's traceback.
    """


class WorkerTraceback(ElasticError):
    """Traceback of an exception on a worker. It is set as the cause of the exception that the caller receives."""

    def __str__(self) -> str:
        return "\n\n" + "".join(map(str, self.args))


@dataclass(frozen=True)
class CallFailure:
    """Failure of a call on one worker. ``error`` is the pickled exception, or None if it cannot be unpickled elsewhere.

    Args:
        secondary: whether another worker's failure is the likely cause, because a collective failed or the job ended.
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
            except Exception:  # The exception's class may exist only on the worker.
                error = None
        trace = self.traceback.rstrip()
        if not isinstance(error, Exception):
            return RaisedOnWorker(f"rank {self.rank} ended with {self.summary}\n\n{trace}")
        error.__cause__ = WorkerTraceback(f"on rank {self.rank}:\n{trace}\n")
        return error


def call(kind: str, *parts: Any) -> bytes:
    """Pickle a request to a worker. Raises Invalid if it is too large, and pickle's exceptions."""
    request: bytes = cloudpickle.dumps((kind, parts))
    if len(request) > FRAME_LIMIT:
        raise Invalid(
            f"the function and its arguments have {len(request)} bytes, but the limit is {FRAME_LIMIT}: load large"
            " data inside the function"
        )
    return request


def answered(value: Any) -> bytes:
    """Pickle the answer to a successful call. Raises Invalid if it is too large, and pickle's exceptions."""
    answer: bytes = _VALUE + cloudpickle.dumps(value)
    if len(answer) > FRAME_LIMIT:
        raise Invalid(
            f"the return value has {len(answer)} bytes, but the limit is {FRAME_LIMIT}: write the value to a"
            " file inside the function"
        )
    return answer


def failed(error: BaseException, rank: int) -> bytes:
    """Pickle the answer to a failed call. This function never raises."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    try:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    except Exception:  # The exception's own __str__ raised an exception.
        summary = type(error).__name__
    secondary = isinstance(error, CollectiveFailed | JobFailed | PeerLost)
    return _FAILURE + pickle.dumps(
        CallFailure(rank, summary, "".join(lines), _pickled(error), secondary)
    )


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception. Return None if that is not possible.

    Only ordinary exceptions are pickled: ``sys.exit`` on a worker must not end the caller.
    """
    if not isinstance(error, Exception):
        return None
    try:
        blob: bytes = cloudpickle.dumps(error)
        # Check that it can be unpickled: an exception with custom arguments may not be.
        pickle.loads(blob)
    except Exception:
        return None
    return blob


def lost(why: str) -> bytes:
    """Return the answer for a worker that has exited, with the reason."""
    return _LOST + why.encode()


def opened(answer: bytes) -> Any:
    """Return the value in an answer, or raise the failure in it.

    Raises:
        JobFailed: the worker has exited.
        RaisedOnWorker: the function raised an exception that cannot be raised here.
        Exception: raised by the function on the worker, and raised again here.
    """
    failure = failure_in(answer)
    if failure is not None:
        raise failure.exception()
    return pickle.loads(memoryview(answer)[1:])


def failure_in(answer: bytes) -> CallFailure | None:
    """Return the failure in an answer, or None. This function does not unpickle a value.

    Raises JobFailed if the worker has exited.
    """
    if answer[:1] == _VALUE:
        return None
    if answer[:1] == _LOST:
        raise JobFailed(answer[1:].decode())
    failure = pickle.loads(memoryview(answer)[1:])
    assert isinstance(failure, CallFailure)
    return failure


def cause(failures: Iterable[CallFailure]) -> CallFailure:
    """Return the failure that most likely caused the other failures of a call on several ranks."""
    return min(failures, key=lambda failure: (failure.secondary, failure.rank))
