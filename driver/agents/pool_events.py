"""Events that an `AgentPool` receives (past tense) and actions that it requests (imperative). Pure: values only.

It also receives `driver.events.HostsChanged` and ``TimePassed``, and requests ``Report`` for log lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from elastic.driver.agents.messages import AgentId, AgentMessage, Start
from elastic.driver.events import Event, HostsChanged, Report, TimePassed
from elastic.protocol.messages import Worker

# ---- events ----------------------------------------------------------------------------------------------------------


class AgentConnected(msgspec.Struct, frozen=True):
    """An agent has a new connection, and has proved knowledge of the job's secret."""

    agent: AgentId


class AgentMessageReceived(msgspec.Struct, frozen=True):
    """A message of an agent.

    Args:
        caller: the numeric address of its side of the connection, if needed.
    """

    agent: AgentId
    message: Any  # one of messages.FromAgent
    caller: str = ""


class AgentDisconnected(msgspec.Struct, frozen=True):
    """An agent's connection ended.

    Args:
        silent: it was not closed, but data are no longer acknowledged.
    """

    agent: AgentId
    silent: bool


class AgentStarted(msgspec.Struct, frozen=True):
    """A `StartAgent` succeeded. The agent has yet to connect.

    Args:
        outlives: it may outlive its starter.
    """

    host: str
    outlives: bool = False


class AgentNotStarted(msgspec.Struct, frozen=True):
    """A `StartAgent` failed."""

    host: str
    reason: str


class StartOrdered(msgspec.Struct, frozen=True):
    """The driver orders the start of a worker."""

    order: Start


class KillOrdered(msgspec.Struct, frozen=True):
    """The driver orders the kill of a worker."""

    worker: Worker


class GiveUpOrdered(msgspec.Struct, frozen=True):
    """The driver gives up a host. The agent of the host is connected but does not respond."""

    host: str
    why: str


class DriverReady(msgspec.Struct, frozen=True):
    """Agents can connect, and actions are performed from now on."""


class JobEnded(msgspec.Struct, frozen=True):
    """The job ended, so agents are no longer needed."""


PoolEvent = (
    AgentConnected
    | AgentMessageReceived
    | AgentDisconnected
    | AgentStarted
    | AgentNotStarted
    | StartOrdered
    | KillOrdered
    | GiveUpOrdered
    | DriverReady
    | JobEnded
    | HostsChanged
    | TimePassed
)

# ---- actions ---------------------------------------------------------------------------------------------------------


class SendToAgents(msgspec.Struct, frozen=True):
    """Send these messages to each agent, in one chunk."""

    agents: Sequence[AgentId]
    messages: Sequence[AgentMessage]


class DisconnectAgent(msgspec.Struct, frozen=True):
    """Close the agent's connection. `AgentDisconnected` follows."""

    agent: AgentId


class StartAgent(msgspec.Struct, frozen=True):
    """Start an agent on this host. `AgentStarted` or `AgentNotStarted` follows."""

    host: str


class PostToDriver(msgspec.Struct, frozen=True):
    """Post this event to the job's loop."""

    event: Event


class RelayMessage(msgspec.Struct, frozen=True):
    """Pass on a worker's message."""

    worker: Worker
    message: Any  # one of protocol.FromWorker


class RelayOutput(msgspec.Struct, frozen=True):
    """Show output of a worker. An empty chunk marks the end of the stream."""

    worker: Worker
    stream: Literal["stdout", "stderr", "diagnostics", "usage"]
    data: bytes


class ListConnectedHosts(msgspec.Struct, frozen=True):
    """Pass on the slots of all hosts whose agents are connected, or will be again at once."""

    hosts: dict[str, int]


PoolAction = (
    SendToAgents
    | DisconnectAgent
    | StartAgent
    | PostToDriver
    | RelayMessage
    | RelayOutput
    | ListConnectedHosts
    | Report
)
