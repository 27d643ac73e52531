"""Events that an `AgentPool` receives (past tense) and actions that it requests (imperative). Pure: values only.

An `AgentPool` also receives `driver.events.HostsChanged` and ``TimePassed``, and requests ``Report`` for log lines.
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
    """Event: an agent has connected and authenticated with the job's secret."""

    agent: AgentId


class AgentMessageReceived(msgspec.Struct, frozen=True):
    """Event: a message from an agent was received.

    Args:
        caller: the agent's numeric address, needed only for some messages.
    """

    agent: AgentId
    message: Any  # one of `messages.FromAgent`
    caller: str = ""


class AgentDisconnected(msgspec.Struct, frozen=True):
    """Event: the connection of an agent ended.

    Args:
        silent: True if the host stopped acknowledging data, False if the connection was closed.
    """

    agent: AgentId
    silent: bool


class AgentStarted(msgspec.Struct, frozen=True):
    """Event: a `StartAgent` succeeded. The agent has not connected yet.

    Args:
        outlives: whether the agent may outlive its starter.
    """

    host: str
    outlives: bool = False


class AgentNotStarted(msgspec.Struct, frozen=True):
    """Event: a `StartAgent` failed."""

    host: str
    reason: str


class StartOrdered(msgspec.Struct, frozen=True):
    """Event: the driver orders the start of a worker."""

    order: Start


class KillOrdered(msgspec.Struct, frozen=True):
    """Event: the driver orders the kill of a worker."""

    worker: Worker


class BandwidthOrdered(msgspec.Struct, frozen=True):
    """Event: the driver orders a measurement of the bandwidth of a host to a peer."""

    host: str
    peer: str


class GiveUpOrdered(msgspec.Struct, frozen=True):
    """Event: the driver gives up a host whose agent is connected but does not respond."""

    host: str
    why: str


class DriverReady(msgspec.Struct, frozen=True):
    """Event: the driver accepts connections of agents and performs actions from now on."""


class JobEnded(msgspec.Struct, frozen=True):
    """Event: the job ended, so agents are no longer needed."""


PoolEvent = (
    AgentConnected
    | AgentMessageReceived
    | AgentDisconnected
    | AgentStarted
    | AgentNotStarted
    | StartOrdered
    | KillOrdered
    | BandwidthOrdered
    | GiveUpOrdered
    | DriverReady
    | JobEnded
    | HostsChanged
    | TimePassed
)

# ---- actions ---------------------------------------------------------------------------------------------------------


class SendToAgents(msgspec.Struct, frozen=True):
    """Action: send these messages to each of these agents, as one write per agent."""

    agents: Sequence[AgentId]
    messages: Sequence[AgentMessage]


class DisconnectAgent(msgspec.Struct, frozen=True):
    """Action: close the agent's connection. `AgentDisconnected` follows."""

    agent: AgentId


class StartAgent(msgspec.Struct, frozen=True):
    """Action: start an agent on this host. `AgentStarted` or `AgentNotStarted` follows."""

    host: str


class PostToDriver(msgspec.Struct, frozen=True):
    """Action: post this event to the job's loop."""

    event: Event


class RelayMessage(msgspec.Struct, frozen=True):
    """Action: forward a worker's message to the job's loop."""

    worker: Worker
    message: Any  # one of `protocol.FromWorker`


class RelayOutput(msgspec.Struct, frozen=True):
    """Action: show output of a worker. An empty chunk marks the end of the stream."""

    worker: Worker
    stream: Literal["stdout", "stderr", "diagnostics", "usage"]
    data: bytes


class ListConnectedHosts(msgspec.Struct, frozen=True):
    """Action: report the slots of all hosts whose agents are connected or expected to reconnect."""

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
