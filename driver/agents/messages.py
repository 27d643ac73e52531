"""Every message between an agent process and the driver. Pure: values only; `elastic.protocol.framing` makes bytes of
them.

The agent calls, and both prove that they know the job's secret, as between worker and driver. Then the driver says
`Attach`, the agent answers `Registered`, and from there on either says what it has to. What the workers of the agent's
host say, and are told, passes through here unchanged.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from elastic.driver.events import (
    Notice,
    WorkerDisconnected,
    WorkerExited,
    WorkerFrozen,
    WorkerProbed,
    WorkerThawed,
)
from elastic.protocol import messages
from elastic.protocol.messages import VERSION, Value, Worker


class HostAgent(Value):
    """One start of the agent of one host: the identity of an agent process. A host that comes back has a greater
    ``incarnation``.
    """

    host: str
    incarnation: int  # nanoseconds since 1970 at its start

    def __str__(self) -> str:
        return f"agent {self.host}#{self.incarnation}"


class AgentMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base of everything that travels between agent and driver, but for the handshake."""


# ---- agent -> driver ---------------------------------------------------------------------------------------------


class AgentAnswer(AgentMessage):
    """Answer to protocol.Challenge, with a challenge of its own."""

    agent: HostAgent
    nonce: bytes
    proof: bytes
    version: int = VERSION


class Registered(AgentMessage):
    """First message on each connection, once the driver has said who it is: who runs here, what became of others."""

    slots: int
    bind: str  # the numeric address on which the workers of this host listen for each other
    addresses: list[str]  # all that it has, as in 10.0.0.5/24
    running: list[Worker]
    exits: list[WorkerExited]  # of workers of this job, the latest last
    job: str = ""  # that its workers belong to; empty: it has had none
    release: str = ""  # of this package
    notice: Notice | None = None  # of the end of its machine, if one stands
    ends: bool = False  # once it is dismissed; otherwise it waits for the next job


class Heard(AgentMessage):
    """A worker said this."""

    worker: Worker
    message: messages.FromWorker


class Seen(AgentMessage):
    """What the agent sees of its workers from outside."""

    event: WorkerExited | WorkerFrozen | WorkerThawed | WorkerProbed | WorkerDisconnected


class Printed(AgentMessage):
    """What a worker has written, cut anywhere. Empty: the stream is at its end."""

    worker: Worker
    stream: Literal["stdout", "stderr", "diagnostics", "usage"]
    data: bytes


class Logged(AgentMessage):
    """A line for the driver's log."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


class Announced(AgentMessage):
    """The machine has announced its end; None: that is off."""

    notice: Notice | None


class Here(AgentMessage):
    """An answer to `Beat`, now and then: it does not only have a connection, it runs."""


# ---- driver -> agent ---------------------------------------------------------------------------------------------


class Attach(AgentMessage, tag="Hire"):  # agents of earlier releases know it by this name
    """First message: who the driver is. An agent that has served a later one closes the connection."""

    job: str  # a new one for each job, also under the same name
    term: int  # grows with every driver of a job
    lease_s: float
    away_s: float  # workers train on for so long without a driver
    # Who may announce the end of the agent's machine; see `preemption.watch`.
    preemption: str = "off"
    slurm: dict[str, str] = {}  # what the driver's environment says of the allocation
    preload: str = ""  # what the next worker is prepared with


class Reject(AgentMessage, tag="Refused"):
    """The driver has no use for this agent; it must not come back."""

    reason: str


class Start(AgentMessage):
    """Start this incarnation. What every worker is told of its agent and its host, the agent adds itself."""

    worker: Worker
    command: list[str]
    env: dict[str, str]  # goes before the agent's own
    folder: str  # to start it in, if there is one of this name


class Kill(AgentMessage):
    worker: Worker


class Probe(AgentMessage):
    workers: list[Worker]


class Dump(AgentMessage):
    worker: Worker


class Drop(AgentMessage):
    """Close the worker's connection."""

    worker: Worker


class Tell(AgentMessage):
    """Pass this on to those of your workers that are connected."""

    workers: list[Worker]
    message: messages.FromDriver


class Beat(AgentMessage):
    """The driver is here. Several times in a lease."""


class Detach(AgentMessage, tag="Dismissed"):
    """The job is over: kill what is left of it."""

    reason: str


FromAgent = AgentAnswer | Registered | Heard | Seen | Printed | Logged | Announced | Here
ToAgent = (
    messages.Challenge
    | messages.Accepted
    | Attach
    | Reject
    | Start
    | Kill
    | Probe
    | Dump
    | Drop
    | Tell
    | Beat
    | Detach
)

from_agent: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromAgent)
to_agent: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToAgent)
