"""Messages between an operator and the driver of a running job. Pure: values only; `framing` encodes them.

The operator connects, and both sides prove knowledge of the operators' key, which is derived from the job's secret. The
answer to each request is one `Told` message with the same number.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from elastic.protocol.messages import VERSION

PURPOSE = "operator"  # label for deriving the operators' key from the job's secret


class OperatorMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base class of all messages between operator and driver, except the handshake."""


class OperatorAnswer(OperatorMessage):
    """Answer to the driver's challenge, with the operator's own challenge.

    Args:
        name: unique name of the connection, which contains the user.
    """

    name: str
    nonce: bytes
    proof: bytes
    version: int = VERSION


class AskStatus(OperatorMessage):
    """Request for the state of the job, as JSON. See `monitoring.dashboard.page_state`."""

    number: int


class AskScale(OperatorMessage):
    number: int
    workers: int


class AskDrain(OperatorMessage):
    number: int
    host: str
    off: bool = False


class AskRemove(OperatorMessage):
    """Request to remove a worker from the job.

    Args:
        worker: a rank, or ``host:slot``.
    """

    number: int
    worker: str


class AskStacks(OperatorMessage):
    """Request for stack traces of workers. The answer's data is a JSON object with the text for each worker.

    Args:
        worker: a rank or ``host:slot``. Empty means the members with the lowest ranks.
        log: whether to write the stack traces to the job's log as well.
        all_threads: whether to request the stack traces of all threads instead of only the training thread.
    """

    number: int
    worker: str = ""
    log: bool = False
    all_threads: bool = False


class AskLogs(OperatorMessage):
    """Request for the newest log lines, or for the lines after the line with number ``after``.

    The answer's data is ``[last number, lines]`` as JSON.
    """

    number: int
    worker: str = ""
    after: int = -1


class AskStop(OperatorMessage):
    """Request to stop the job. A second request kills the workers immediately."""

    number: int
    why: str = ""


class Told(OperatorMessage):
    """Answer to a request. If ``done`` is False, the request was refused for the reason in ``text``."""

    number: int
    done: bool
    text: str = ""
    data: str = ""


Request = AskStatus | AskScale | AskDrain | AskRemove | AskStacks | AskLogs | AskStop

from_operator: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Union[OperatorAnswer, Request]  # noqa: UP007
)
