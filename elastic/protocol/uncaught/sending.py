"""An exception that ends a worker's script, on its way to the agent: a line of JSON in a pipe that only the two have.

The pipe is there before the script begins and works without `init()`. The agent keeps both of its ends, and the worker
opens it through /proc. Acts; where it can't be opened, or nobody reads it any more, `send` returns False.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping

import msgspec

from elastic.errors import CollectiveFailed, Interrupted, summary_of
from elastic.protocol.uncaught import folded_traceback

DIAGNOSTICS = "ELASTIC_DIAGNOSTICS"  # in a worker's environment: the pipe, and its inode
READ_S = 5.0
LIMIT = 64 * 1024  # characters of a traceback that are sent; a message may be of any length


class Uncaught(msgspec.Struct, frozen=True, tag=True):
    """``digest``: the same where the same classes were raised at the same lines. ``line``: ``train.py:12``, or empty.

    ``peer``: it was raised because another worker was lost, or has failed.
    """

    digest: str
    summary: str
    folded: str
    whole: str
    line: str = ""
    peer: bool = False


class TrainingThread(msgspec.Struct, frozen=True, tag=True):
    """By which name the stacks of a worker, which come in the same pipe, have the thread that called ``init()``."""

    thread: int


def of(error: BaseException) -> Uncaught:
    return Uncaught(
        digest=folded_traceback.digest(error),
        summary=_sendable(summary_of(error)),
        folded=_sendable(folded_traceback.folded(error)),
        whole=_sendable(folded_traceback.whole(error)),
        line=_sendable(folded_traceback.line_of(error)),
        peer=because_of_a_peer(error),
    )


def because_of_a_peer(error: BaseException) -> bool:
    """Whether a collective broke, and this worker did not see why: another one knows more."""
    error = _of_a_framework(error)
    found = folded_traceback.chain(error)
    broken = [each for each in found if isinstance(each, (CollectiveFailed, Interrupted))]
    return bool(broken) and not any(
        isinstance(each, CollectiveFailed) and (each.differs or each.late) for each in broken
    )


def _of_a_framework(error: BaseException) -> BaseException:
    """What a collective raised inside a graph, where the script has TensorFlow's error for it."""
    bridge = sys.modules.get("elastic.tensorflow.bridge")
    original = getattr(bridge, "original", None)
    cause = original(error) if callable(original) and hasattr(error, "error_code") else None
    return cause if isinstance(cause, BaseException) else error


def _sendable(text: str) -> str:
    """Valid UTF-8, and not too long."""
    if len(text) > LIMIT:
        left = len(text) - LIMIT
        text = f"{text[: LIMIT // 2]}\n... {left} characters ...\n{text[-(LIMIT // 2) :]}"
    return text.encode(errors="backslashreplace").decode()


def send(error: BaseException, environ: Mapping[str, str]) -> bool:
    """Whether the agent has it, and shows it."""
    fd = opened(environ)
    if fd is None:
        return False
    try:
        return _written(fd, memoryview(msgspec.json.encode(of(error)) + b"\n"))
    except OSError:
        return False
    finally:
        os.close(fd)


def _written(fd: int, data: memoryview) -> bool:
    """Whether all of it was, before an agent that is stopped or busy has read nothing for READ_S."""
    os.set_blocking(fd, False)
    while data:
        if not select.select([], [fd], [], READ_S)[1]:
            return False
        data = data[os.write(fd, data) :]
    return True


def opened(environ: Mapping[str, str]) -> int | None:
    """The pipe, for writing. None where this process has none, or its agent is gone."""
    path, _, inode = environ.get(DIAGNOSTICS, "").rpartition(":")
    if not path:
        return None
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if str(os.fstat(fd).st_ino) != inode:  # of another process, which has the agent's number
        os.close(fd)
        return None
    return fd
