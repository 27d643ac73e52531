"""Transfer of a worker's uncaught exception to the agent, as a line of JSON through a private pipe.

The pipe exists before the script begins and works without `init()`. The agent keeps both ends of the pipe, and the
worker opens it through /proc. If the pipe cannot be opened or has no reader, `send` returns False.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping

import msgspec

from elastic.errors import CollectiveFailed, DriverLost, Interrupted, summary_of
from elastic.protocol.uncaught import folded_traceback

# environment variable that gives a worker the path of the pipe and its inode
DIAGNOSTICS = "ELASTIC_DIAGNOSTICS"
READ_S = 5.0
LIMIT = 64 * 1024  # maximum number of characters of a traceback to send


class Uncaught(msgspec.Struct, frozen=True, tag=True):
    """Exception that ended a script.

    ``digest`` is equal for exceptions of the same classes raised at the same lines.

    Args:
        line: innermost line of the script, such as ``train.py:12``, or empty.
        peer: whether another worker caused the exception, because it was lost or has failed.
        driver: whether the loss of the driver caused the exception.
    """

    digest: str
    summary: str
    folded: str
    whole: str
    line: str = ""
    peer: bool = False
    driver: bool = False


class LostDriver(msgspec.Struct, frozen=True, tag=True):
    """Report of a worker that exits because it lost the driver, without an exception."""


class TrainingThread(msgspec.Struct, frozen=True, tag=True):
    """Report of the native ID of the thread that called ``init()``."""

    thread: int


class StackOf(msgspec.Struct, frozen=True, tag=True):
    """Header of a thread's stack. The agent writes it to the stream before it makes the thread write its stack there.

    Args:
        thread: native ID of the thread.
        name: name of the thread in /proc.
        training: whether the thread called ``init()``.
    """

    thread: int
    name: str
    training: bool


def of(error: BaseException) -> Uncaught:
    return Uncaught(
        digest=folded_traceback.digest(error),
        summary=_sendable(summary_of(error)),
        folded=_sendable(folded_traceback.folded(error)),
        whole=_sendable(folded_traceback.whole(error)),
        line=_sendable(folded_traceback.line_of(error)),
        peer=because_of_a_peer(error),
        driver=any(isinstance(each, DriverLost) for each in folded_traceback.chain(error)),
    )


def because_of_a_peer(error: BaseException) -> bool:
    """Return whether the exception is the failure of a collective that another worker has caused."""
    error = _of_a_framework(error)
    found = folded_traceback.chain(error)
    broken = [each for each in found if isinstance(each, (CollectiveFailed, Interrupted))]
    return bool(broken) and not any(
        isinstance(each, CollectiveFailed) and (each.differs or each.late) for each in broken
    )


def _of_a_framework(error: BaseException) -> BaseException:
    """Return the original error of a collective that failed inside a TensorFlow graph.

    In the script, TensorFlow raises a different error.
    """
    bridge = sys.modules.get("elastic.tensorflow.bridge")
    original = getattr(bridge, "original", None)
    cause = original(error) if callable(original) and hasattr(error, "error_code") else None
    return cause if isinstance(cause, BaseException) else error


def _sendable(text: str) -> str:
    """Return a text without invalid UTF-8, shortened to ``LIMIT`` characters."""
    if len(text) > LIMIT:
        left = len(text) - LIMIT
        text = f"{text[: LIMIT // 2]}\n... {left} characters ...\n{text[-(LIMIT // 2) :]}"
    return text.encode(errors="backslashreplace").decode()


def send(error: BaseException, environ: Mapping[str, str]) -> bool:
    """Send an exception to the agent. Return whether the agent has received it and will print it."""
    return send_report(of(error), environ)


def send_report(report: Uncaught | LostDriver, environ: Mapping[str, str]) -> bool:
    """Send the agent a report of why this worker exits. Return whether the agent has received it."""
    fd = opened(environ)
    if fd is None:
        return False
    try:
        return _written(fd, memoryview(msgspec.json.encode(report) + b"\n"))
    except OSError:
        return False
    finally:
        os.close(fd)


def _written(fd: int, data: memoryview) -> bool:
    """Write all data to the pipe.

    Return False if the agent reads nothing for READ_S seconds, for example because it is stopped or busy.
    """
    os.set_blocking(fd, False)
    while data:
        if not select.select([], [fd], [], READ_S)[1]:
            return False
        data = data[os.write(fd, data) :]
    return True


def opened(environ: Mapping[str, str]) -> int | None:
    """Open the pipe for writing. Return None if it does not exist or the agent has exited."""
    path, _, inode = environ.get(DIAGNOSTICS, "").rpartition(":")
    if not path:
        return None
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if str(os.fstat(fd).st_ino) != inode:  # Another process now has the agent's process ID.
        os.close(fd)
        return None
    return fd
