"""Every message between an operator and the driver of a running job. Pure: values only; `framing` makes bytes of them.

The operator calls, and both prove that they know the operators' key of the job, which is derived from its secret. Then
each request is answered by one `Told`, with the request's number.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from elastic.protocol.messages import VERSION

PURPOSE = "operator"  # of the key that is derived from the job's secret


class OperatorMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base of what travels between them, but for the handshake."""


class OperatorAnswer(OperatorMessage):
    """Answer to protocol.Challenge, with a challenge of its own. ``name``: of this connection, and who it is for."""

    name: str
    nonce: bytes
    proof: bytes
    version: int = VERSION


class AskStatus(OperatorMessage):
    """The state of the page, as JSON; see `monitoring.dashboard.page_state`."""

    number: int


class AskScale(OperatorMessage):
    number: int
    workers: int


class AskDrain(OperatorMessage):
    number: int
    host: str
    off: bool = False


class AskRemove(OperatorMessage):
    """``worker``: a rank, or ``host:slot``."""

    number: int
    worker: str


class AskStacks(OperatorMessage):
    """Request stacks of a rank or ``host:slot``; empty: of the first members. The answer's data is text by worker, as
    JSON.

    ``log``: they are written into the log of the job too.
    """

    number: int
    worker: str = ""
    log: bool = False


class AskLogs(OperatorMessage):
    """The newest lines, or those after the line of this number. In the answer's data: [last number, lines], as JSON."""

    number: int
    worker: str = ""
    after: int = -1


class AskStop(OperatorMessage):
    """End the job; asked a second time, at once."""

    number: int
    why: str = ""


class Told(OperatorMessage):
    """``done`` is False where it is not done, and ``text`` says why."""

    number: int
    done: bool
    text: str = ""
    data: str = ""


Request = AskStatus | AskScale | AskDrain | AskRemove | AskStacks | AskLogs | AskStop

from_operator: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Union[OperatorAnswer, Request]  # noqa: UP007
)
