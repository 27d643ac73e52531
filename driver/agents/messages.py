"""Messages between an agent and the driver. Pure: values only; `elastic.protocol.framing` encodes them.

The agent connects, and both sides prove knowledge of the job's secret, as workers and the driver do. The driver then
sends `Attach`, and the agent answers with `Registered`. Afterwards both may send at any time. Messages from and to the
workers of the agent's host are forwarded unchanged.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from elastic.driver.events import (
    BandwidthMeasured,
    Notice,
    WorkerDisconnected,
    WorkerExited,
    WorkerFrozen,
    WorkerHealthChecked,
    WorkerProbed,
    WorkersReady,
    WorkersResumed,
    WorkerThawed,
)
from elastic.protocol import messages
from elastic.protocol.messages import VERSION, Place, Value, Worker


class AgentId(Value):
    """Identity of one agent process of a host. Each restart has a greater ``incarnation``."""

    host: str
    incarnation: int  # time of the agent's start, in nanoseconds since 1970

    def __str__(self) -> str:
        return f"agent {self.host}#{self.incarnation}"


class AgentMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base class of all messages between agent and driver except the handshake."""


# ---- agent -> driver ---------------------------------------------------------------------------------------------


class AgentAnswer(AgentMessage):
    """Answer to the driver's challenge, with the agent's own challenge."""

    agent: AgentId
    nonce: bytes
    proof: bytes
    version: int = VERSION


class Registered(AgentMessage):
    """Answer to `Attach`, sent to the driver first on each connection: running workers and past exits."""

    slots: int
    bind: str  # numeric address on which the workers of this host listen for each other
    addresses: list[str]  # all addresses of the host, such as 10.0.0.5/24
    running: list[Worker]
    exits: list[WorkerExited]  # exits of workers of this job, latest last
    job: str = ""  # ID of the job of the agent's workers; empty if the agent serves no job
    release: str = ""  # release of this package on the agent's host
    notice: Notice | None = None  # current preemption notice, or None
    # whether the agent exits when it is detached, instead of waiting for the next job
    ends: bool = False


class Heard(AgentMessage):
    """Message to the driver: a forwarded message of a worker."""

    worker: Worker
    message: messages.FromWorker


class HeardTogether(AgentMessage):
    """Message to the driver: the merged reports of several workers of this host. See `merged_reports`."""

    event: WorkersReady | WorkersResumed


class Seen(AgentMessage):
    """Message to the driver: an observation about a worker's process."""

    event: (
        WorkerExited
        | WorkerFrozen
        | WorkerThawed
        | WorkerProbed
        | WorkerDisconnected
        | WorkerHealthChecked
    )


class Printed(AgentMessage):
    """Message to the driver: output of a worker.

    Chunks may end within a line or a character. An empty chunk marks the end.
    """

    worker: Worker
    stream: Literal["stdout", "stderr", "diagnostics", "usage"]
    data: bytes


class Logged(AgentMessage):
    """Message to the driver: a line for its log."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


class Announced(AgentMessage):
    """Message to the driver: a preemption notice for the machine, or None if the notice was withdrawn."""

    notice: Notice | None


class BandwidthServed(AgentMessage):
    """Message to the driver, in answer to `ServeBandwidth`: the address to which the other agent may connect.

    Args:
        caller: the host whose agent will connect.
        address: numeric address and port, or None if this host cannot listen.
        trouble: reason why it cannot listen, or empty.
    """

    caller: str
    address: messages.Address | None
    trouble: str = ""


class BandwidthFound(AgentMessage):
    """Message to the driver, in answer to `CallForBandwidth`: the result of the measurement."""

    event: BandwidthMeasured


class Here(AgentMessage):
    """Message to the driver, in answer to `Beat`.

    It shows that the agent process is running, not only that its host acknowledges data.
    """


# ---- driver -> agent ---------------------------------------------------------------------------------------------


class Attach(AgentMessage, tag="Hire"):  # name of the type on the wire, which other releases expect
    """First message of a driver to an agent, with the identity of the driver and its job.

    An agent that has served a newer driver of the job closes the connection.
    """

    job: str  # ID of the job, unique even among jobs with the same name
    term: int  # term of the driver; each driver of a job has a greater term than the previous one
    lease_s: float
    away_s: float  # seconds for which workers keep training without a driver
    # Source of preemption notices of the agent's machine; see `preemption.watch`.
    preemption: str = "off"
    slurm: dict[str, str] = {}  # variables of the Slurm allocation from the driver's environment
    preload: str = ""  # modules that the preloaded process for the next worker imports


class Reject(AgentMessage, tag="Refused"):
    """Message to an agent: the driver rejects the agent, because another agent already serves the host."""

    reason: str


class Start(AgentMessage):
    """Order to an agent: start a worker.

    The agent adds environment variables that describe the agent and its host.
    """

    worker: Worker
    command: list[str]
    # environment variables of the worker, which take precedence over those of the agent
    env: dict[str, str]
    folder: str  # working folder of the worker, used if it exists on the host


class Kill(AgentMessage):
    worker: Worker


class Probe(AgentMessage):
    workers: list[Worker]


class Dump(AgentMessage):
    """Order to an agent: make a worker write the stack trace of its training thread, or of all its threads."""

    worker: Worker
    all_threads: bool = False


class Drop(AgentMessage):
    """Order to an agent: close the worker's connection."""

    worker: Worker


class Tell(AgentMessage):
    """Order to an agent: forward a message to these workers. Workers without a connection are skipped."""

    workers: list[Worker]
    message: messages.FromDriver


class TellPlaces(AgentMessage):
    """Order to an agent: forward a new world to its members on this host, each with its own place.

    Args:
        members: the members on this host, each with its place.
        world: the message to each member. Its place is replaced by that of the member.
    """

    members: list[tuple[Worker, Place]]
    world: messages.World


class ServeBandwidth(AgentMessage):
    """Order to an agent: listen for the agent of another host that measures the bandwidth to this host."""

    caller: str


class CallForBandwidth(AgentMessage):
    """Order to an agent: measure the bandwidth to another host, whose agent listens at ``address``."""

    peer: str
    address: messages.Address


class Beat(AgentMessage):
    """Heartbeat of the driver to an agent, sent several times per liveness timeout."""


class Detach(AgentMessage, tag="Dismissed"):
    """Last message to an agent: the job has ended. The agent kills the workers that are still running."""

    reason: str


FromAgent = (
    AgentAnswer
    | Registered
    | Heard
    | HeardTogether
    | Seen
    | Printed
    | Logged
    | Announced
    | BandwidthServed
    | BandwidthFound
    | Here
)
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
    | TellPlaces
    | ServeBandwidth
    | CallForBandwidth
    | Beat
    | Detach
)

from_agent: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromAgent)
to_agent: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToAgent)
