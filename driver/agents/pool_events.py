"""What an `AgentPool` hears (events, past tense) and what it asks for (actions, imperative). Pure: values only.

It hears `driver.events.HostsChanged` and ``TimePassed`` besides, and asks for ``Report`` where a line is for the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from elastic.driver.agents.messages import AgentMessage, HostAgent, Start
from elastic.driver.events import Event, HostsChanged, Report, TimePassed
from elastic.protocol.messages import Worker

# ---- events ----------------------------------------------------------------------------------------------------------


class AgentCalled(msgspec.Struct, frozen=True):
    """An agent has a new connection, and has proved that it knows the job's secret."""

    agent: HostAgent


class AgentSaid(msgspec.Struct, frozen=True):
    """``caller``: the numeric address that it calls from, where that matters."""

    agent: HostAgent
    message: Any  # one of messages.FromAgent
    caller: str = ""


class AgentGone(msgspec.Struct, frozen=True):
    """Its connection has ended. ``silent``: nobody closed it, what was sent is acknowledged no more."""

    agent: HostAgent
    silent: bool


class AgentStarted(msgspec.Struct, frozen=True):
    """What `StartAgent` asked for was done. The agent has yet to call. ``outlives``: it may, who has started it."""

    host: str
    outlives: bool = False


class AgentNotStarted(msgspec.Struct, frozen=True):
    """What `StartAgent` asked for failed."""

    host: str
    reason: str


class StartOrdered(msgspec.Struct, frozen=True):
    """The driver wants a worker."""

    order: Start


class KillOrdered(msgspec.Struct, frozen=True):
    """The driver wants a worker gone."""

    worker: Worker


class GiveUpOrdered(msgspec.Struct, frozen=True):
    """The driver takes a host for lost whose agent is connected, and does not answer."""

    host: str
    why: str


class DriverReady(msgspec.Struct, frozen=True):
    """Agents can call from now on, and what is decided here is performed."""


class JobEnded(msgspec.Struct, frozen=True):
    """No agent is needed any more."""


PoolEvent = (
    AgentCalled
    | AgentSaid
    | AgentGone
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


class TellAgents(msgspec.Struct, frozen=True):
    """Send each of them these messages, in one piece."""

    agents: Sequence[HostAgent]
    messages: Sequence[AgentMessage]


class HangUp(msgspec.Struct, frozen=True):
    """Close the agent's connection. `AgentGone` follows."""

    agent: HostAgent


class StartAgent(msgspec.Struct, frozen=True):
    """Start an agent on this host. `AgentStarted` or `AgentNotStarted` follows."""

    host: str


class TellDriver(msgspec.Struct, frozen=True):
    """Post this event to the job's loop."""

    event: Event


class PassOn(msgspec.Struct, frozen=True):
    """A worker has said this."""

    worker: Worker
    message: Any  # one of protocol.FromWorker


class ShowOutput(msgspec.Struct, frozen=True):
    """A worker has written this. Empty: the stream is at its end."""

    worker: Worker
    stream: Literal["stdout", "stderr", "diagnostics", "usage"]
    data: bytes


PoolAction = TellAgents | HangUp | StartAgent | TellDriver | PassOn | ShowOutput | Report
