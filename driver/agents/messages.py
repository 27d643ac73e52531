"""Messages between an agent and the driver. Pure: values only; `elastic.protocol.framing` encodes them.

The agent connects, and both sides prove knowledge of the job's secret, as between worker and driver. The driver then
sends `Attach`, and the agent answers `Registered`; afterwards both send at any time. Messages from and to the workers
of the agent's host pass through unchanged.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from elastic.driver.events import (
    Notice,
    WorkerDisconnected,
    WorkerExited,
    WorkerFrozen,
    WorkerHealthChecked,
    WorkerProbed,
    WorkerThawed,
)
from elastic.protocol import messages
from elastic.protocol.messages import VERSION, Value, Worker


class AgentId(Value):
    """Identity of one agent process of a host. Each restart has a greater ``incarnation``."""

    host: str
    incarnation: int  # nanoseconds since 1970 at its start

    def __str__(self) -> str:
        return f"agent {self.host}#{self.incarnation}"


class AgentMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base class of all messages between agent and driver except the handshake."""


# ---- agent -> driver ---------------------------------------------------------------------------------------------


class AgentAnswer(AgentMessage):
    """Answer to protocol.Challenge, with a challenge of its own."""

    agent: AgentId
    nonce: bytes
    proof: bytes
    version: int = VERSION


class Registered(AgentMessage):
    """First message on each connection, in answer to `Attach`: the running workers and past exits."""

    slots: int
    bind: str  # numeric address on which the workers of this host listen for each other
    addresses: list[str]  # all addresses of the host, as 10.0.0.5/24
    running: list[Worker]
    exits: list[WorkerExited]  # exits of workers of this job, latest last
    job: str = ""  # job of its workers; empty means none yet
    release: str = ""  # release of this package
    notice: Notice | None = None  # preemption notice in effect, if any
    ends: bool = False  # the agent exits when dismissed; otherwise it waits for the next job


class Heard(AgentMessage):
    """A message of a worker."""

    worker: Worker
    message: messages.FromWorker


class Seen(AgentMessage):
    """An observation of a worker's process."""

    event: (
        WorkerExited
        | WorkerFrozen
        | WorkerThawed
        | WorkerProbed
        | WorkerDisconnected
        | WorkerHealthChecked
    )


class Printed(AgentMessage):
    """Output of a worker, split at any byte; empty at the end of the stream."""

    worker: Worker
    stream: Literal["stdout", "stderr", "diagnostics", "usage"]
    data: bytes


class Logged(AgentMessage):
    """A line for the driver's log."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


class Announced(AgentMessage):
    """A preemption notice for the machine, or None if the notice was withdrawn."""

    notice: Notice | None


class Here(AgentMessage):
    """Regular answer to `Beat`. The answer shows that the agent is running, not just connected."""


# ---- driver -> agent ---------------------------------------------------------------------------------------------


class Attach(AgentMessage, tag="Hire"):  # the name that earlier releases use
    """First message: identity of the driver. An agent that has served a later driver closes the connection."""

    job: str  # unique for each job, even among jobs with the same name
    term: int  # grows with every driver of a job
    lease_s: float
    away_s: float  # how long workers train without a driver
    # Source of preemption notices of the agent's machine; see `preemption.watch`.
    preemption: str = "off"
    slurm: dict[str, str] = {}  # variables about the allocation in the driver's environment
    preload: str = ""  # modules that the process for the next worker imports


class Reject(AgentMessage, tag="Refused"):
    """The driver does not accept this agent. The agent must not connect again."""

    reason: str


class Start(AgentMessage):
    """Start this incarnation of a worker. The agent adds the environment that describes itself and its host."""

    worker: Worker
    command: list[str]
    env: dict[str, str]  # takes precedence over the agent's environment
    folder: str  # working folder, if it exists on the host


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
    """Forward a message to these workers, if they are connected."""

    workers: list[Worker]
    message: messages.FromDriver


class Beat(AgentMessage):
    """The driver is alive. Sent several times per liveness timeout."""


class Detach(AgentMessage, tag="Dismissed"):
    """End of the job. The agent kills the remaining workers."""

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
