"""What is said to persistent workers, and what they answer: pickled by one end, opened by the other, by nobody between.

A worker answers every word, in the order in which they came. `REGROUP` acts at once, whatever the worker is doing: it
gives its world up, so that a collective to which nobody comes any more raises, and then meets the others anew.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from elastic.errors import CollectiveFailed, ElasticError, Invalid, JobFailed, PeerLost

MAKE = "make"  # (class, args, kwargs): the instance is kept
RUN = "run"  # (function, args, kwargs)
EXECUTE = "execute"  # (function,): called with the instance, or with nothing where there is none
REGROUP = b"regroup"  # these two are no pickles
END = b"end"

FRAME_LIMIT = 1 << 30  # bytes of a word, and of an answer

# An answer's first byte: what kind it is is seen without opening a value.
_VALUE, _FAILURE, _LOST = b"+", b"!", b"?"


class RaisedOnWorker(ElasticError, RuntimeError):
    """A call has ended on a worker with what can't be raised here as it is; the message has the worker's traceback."""


class OnWorker(ElasticError):
    """The cause of an exception that comes from a worker: its traceback there."""

    def __str__(self) -> str:
        return "\n\n" + "".join(map(str, self.args))


@dataclass(frozen=True)
class Failure:
    """How a call has ended on a worker. ``error`` is the pickled exception, where that can be raised elsewhere.

    ``secondary``: a collective broke there or the job ended, most likely because of what happened on another worker.
    """

    rank: int
    summary: str
    traceback: str
    error: bytes | None
    secondary: bool

    def exception(self) -> Exception:
        """What to raise: the same exception where that is possible, with the worker's traceback as its cause."""
        error: object = None
        if self.error is not None:
            try:
                error = pickle.loads(self.error)
            except Exception:  # its class may exist over there only
                error = None
        trace = self.traceback.rstrip()
        if not isinstance(error, Exception):
            return RaisedOnWorker(f"rank {self.rank} ended with {self.summary}\n\n{trace}")
        error.__cause__ = OnWorker(f"on rank {self.rank}:\n{trace}\n")
        return error


def call(kind: str, *parts: Any) -> bytes:
    """A word to a worker. Raises what pickling raises, and Invalid."""
    word: bytes = cloudpickle.dumps((kind, parts))
    if len(word) > FRAME_LIMIT:
        raise Invalid(
            f"the function and its arguments have {len(word)} bytes, but the limit is {FRAME_LIMIT}: let the"
            " function load its data itself"
        )
    return word


def answered(value: Any) -> bytes:
    """Raises what pickling raises, and Invalid."""
    answer: bytes = _VALUE + cloudpickle.dumps(value)
    if len(answer) > FRAME_LIMIT:
        raise Invalid(
            f"the value has {len(answer)} bytes, but the limit is {FRAME_LIMIT}: let the function write it to a"
            " file"
        )
    return answer


def failed(error: BaseException, rank: int) -> bytes:
    """Of whatever a call has raised; never raises."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    try:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    except Exception:  # its __str__ is broken
        summary = type(error).__name__
    secondary = isinstance(error, CollectiveFailed | JobFailed | PeerLost)
    return _FAILURE + pickle.dumps(
        Failure(rank, summary, "".join(lines), _pickled(error), secondary)
    )


def _pickled(error: BaseException) -> bytes | None:
    """Ordinary exceptions only: ``sys.exit`` on a worker must not end who called it."""
    if not isinstance(error, Exception):
        return None
    try:
        blob: bytes = cloudpickle.dumps(error)
        pickle.loads(blob)  # one with arguments of its own may go in and not come out
    except Exception:
        return None
    return blob


def lost(why: str) -> bytes:
    """In place of an answer, where the worker has ended."""
    return _LOST + why.encode()


def opened(answer: bytes) -> Any:
    """The value. Raises what the call has raised, or `RaisedOnWorker`, or JobFailed where the worker has ended."""
    failure = failure_in(answer)
    if failure is not None:
        raise failure.exception()
    return pickle.loads(memoryview(answer)[1:])


def failure_in(answer: bytes) -> Failure | None:
    """None where the call succeeded; its value stays closed. Raises JobFailed where the worker has ended."""
    if answer[:1] == _VALUE:
        return None
    if answer[:1] == _LOST:
        raise JobFailed(answer[1:].decode())
    failure = pickle.loads(memoryview(answer)[1:])
    assert isinstance(failure, Failure)
    return failure


def cause(failures: Iterable[Failure]) -> Failure:
    """Of the failures of one call, the one that explains the others."""
    return min(failures, key=lambda failure: (failure.secondary, failure.rank))
