"""Driver side of the agents: launches workers through agents, and relays the workers' messages.

`agent_pool.AgentPool` makes the decisions. This module runs the server to which agents connect, starts agents, sets
the timer, and calls the callbacks of the job's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from elastic.driver.agents import pool_events
from elastic.driver.agents.agent_pool import AgentPool
from elastic.driver.agents.messages import (
    AgentAnswer,
    AgentId,
    AgentMessage,
    Attach,
    Drop,
    Dump,
    Probe,
    Registered,
    Start,
    Tell,
    TellPlaces,
    from_agent,
)
from elastic.driver.events import (
    Event,
    HostsChanged,
    Report,
    TimePassed,
    WorkerDisconnected,
    WorkerExited,
)
from elastic.driver.launch.starter import Bootstrap, Starter, StartFailed
from elastic.driver.network.control_server import Callers, ControlServer
from elastic.driver.output_interfaces import Log, Sink
from elastic.protocol.messages import Address, Message, Place, Worker, World

AGENTS: Callers[AgentId] = Callers(
    "agent", from_agent, AgentAnswer, lambda answer: answer.agent, replaces=True
)
CLOSE_S = 15.0  # seconds within which agents must have killed their workers and reported the exits

ReachUs = Callable[[str], Bootstrap]


class AgentManager:
    """Manager of all agents of one job.

    Args:
        server: server to which agents connect.
        attach: first message to send to each agent.
        sink: receives the workers' output.
        log: called with the level and the text of each log line.
        starter: starts agents. None if agents are started externally.
        reach: function that returns, for a host, the configuration with which the host's agent finds this driver.
        folder: working folder of the workers.
        adopted: workers to take over from the previous driver.
        environ_of: function that returns, for a host, the environment variables to add to its workers.
        connected: called after each change with the slots of all hosts that have agents. None if the list of hosts has
            another source.
        deposed: function that returns whether another driver leads the job. If so, this driver sends no messages and
            kills no workers.
    """

    def __init__(
        self,
        server: ControlServer[AgentId],
        *,
        attach: Attach,
        sink: Sink,
        log: Log,
        starter: Starter | None = None,
        reach: ReachUs | None = None,
        folder: str = "",
        adopted: Iterable[Worker] = (),
        environ_of: Callable[[str], Mapping[str, str]] | None = None,
        connected: Callable[[Mapping[str, int]], object] | None = None,
        deposed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.pool = AgentPool(
            attach,
            starts_agents=starter is not None,
            lists_hosts=connected is not None,
            adopted=adopted,
        )
        self.noticed: Callable[[Event], None] = lambda event: None
        self.workers = RelayedWorkers(self)
        self._server = server
        self._sink = sink
        self._log = log
        self._starter = starter
        self._reach = reach
        self._folder = folder
        self._environ_of = environ_of or (lambda host: {})
        self._connected = connected
        self._leadership_lost = deposed
        self._received: Callable[[Worker, Any], None] = lambda worker, message: None
        self._gone: Callable[[Worker, bool], None] = lambda worker, silent: None
        self._exited: Callable[[WorkerExited], None] = lambda event: None
        self._starting: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None

    # ---- the connections of workers --------------------------------------------------------------------------------

    async def listen(
        self,
        interface: str,
        port: int,
        received: Callable[[Worker, Any], None],
        gone: Callable[[Worker, bool], None],
    ) -> Address:
        """Start serving agents. Raises OSError if the address cannot be bound."""
        self._received, self._gone = received, gone
        return await self._server.open(
            interface,
            port,
            received=self._on_agent_message,
            gone=lambda agent, silent: self._handle(pool_events.AgentDisconnected(agent, silent)),
            expected=lambda agent: True,
            accepted=lambda agent: self._handle(pool_events.AgentConnected(agent)),
        )

    def order(self, name: str, *messages: AgentMessage) -> bool:
        """Send messages to the agent of a host. If the agent is not connected, drop the messages and return False."""
        agent = None if self._leadership_lost() else self.pool.agent_of(name)
        return agent is not None and self._server.send(agent, *messages)

    async def hang_up(self) -> None:
        await self._server.close()

    # ---- the launcher ----------------------------------------------------------------------------------------------

    async def open(
        self, exited: Callable[[WorkerExited], None], noticed: Callable[[Event], None]
    ) -> None:
        """Set the callbacks to the job's event loop. See `elastic.driver.launch.interface.Launcher.open`."""
        self._exited, self.noticed = exited, noticed
        self._handle(pool_events.DriverReady())

    def start(self, worker: Worker, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a worker on its host. ``env`` takes precedence over the environment of the host's agent."""
        env = {**env, **self._environ_of(worker.host)}
        self._handle(pool_events.StartOrdered(Start(worker, list(command), env, self._folder)))

    def kill(self, worker: Worker) -> None:
        self._handle(pool_events.KillOrdered(worker))

    def probe(self, workers: Sequence[Worker]) -> None:
        by_host: dict[str, list[Worker]] = {}
        for worker in workers:
            by_host.setdefault(worker.host, []).append(worker)
        for host, local in by_host.items():
            self.order(host, Probe(local))

    def dump(self, worker: Worker, *, all_threads: bool) -> None:
        self.order(worker.host, Dump(worker, all_threads))

    def measure(self, host: str, peer: str) -> None:
        self._handle(pool_events.BandwidthOrdered(host, peer))

    def give_up(self, host: str, why: str) -> None:
        self._handle(pool_events.GiveUpOrdered(host, why))

    def alive(self) -> frozenset[Worker]:
        return self.pool.alive()

    def listed(self, hosts: Mapping[str, int]) -> None:
        """Apply a new list of hosts from discovery."""
        self._handle(HostsChanged(dict(hosts)))

    async def close(self) -> None:
        """Dismiss all agents at the end of the job.

        Wait, for at most CLOSE_S seconds, until the agents have killed their workers and the exiting agents have
        disconnected.
        """
        self._handle(pool_events.JobEnded())
        for task in self._starting:
            task.cancel()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_S
        while self.pool.awaits_agents() and loop.time() < deadline and not self._leadership_lost():
            await asyncio.sleep(0.005)
        if self._starter is not None:
            await self._starter.close()

    # ---- events and actions ----------------------------------------------------------------------------------------

    def _on_agent_message(self, agent: AgentId, message: Any) -> None:
        caller = self._server.peer(agent) if isinstance(message, Registered) else ""
        self._handle(pool_events.AgentMessageReceived(agent, message, caller))

    def _handle(self, event: pool_events.PoolEvent) -> None:
        loop = asyncio.get_running_loop()
        for action in self.pool.handle(event, loop.time()):
            self._do(action)
        at = self.pool.next_deadline()
        if self._alarm is not None and self._alarm.when() != at:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None and at is not None:
            self._alarm = loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._handle(TimePassed())

    def _do(self, action: pool_events.PoolAction) -> None:
        match action:
            case pool_events.RelayMessage(worker, message):
                self._received(worker, message)
            case pool_events.PostToDriver(WorkerExited() as event):
                self._exited(event)
                self._sink.drop(event.worker)
            case pool_events.PostToDriver(WorkerDisconnected(worker, silent)):
                self._gone(worker, silent)
            case pool_events.PostToDriver(event):
                self.noticed(event)
            case pool_events.RelayOutput(worker, stream, data):
                if data:
                    self._sink.feed(worker, stream, data)
                else:
                    self._sink.finish(worker, stream)
            case pool_events.SendToAgents(agents, messages) if not self._leadership_lost():
                if len(agents) > 1 and len(messages) == 1:
                    self._server.broadcast(agents, messages[0])
                else:
                    for agent in agents:
                        self._server.send(agent, *messages)
            case pool_events.DisconnectAgent(agent):
                self._server.disconnect(agent)
            case pool_events.StartAgent(host):
                task = asyncio.create_task(self._start_agent(host))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
            case pool_events.ListConnectedHosts(hosts) if self._connected is not None:
                self._connected(hosts)
            case Report(level, text):
                self._log(level, text)

    async def _start_agent(self, host: str) -> None:
        assert self._starter is not None and self._reach is not None
        bootstrap = self._reach(host)
        try:
            await self._starter.start(bootstrap)
        except StartFailed as error:
            self._handle(pool_events.AgentNotStarted(host, str(error)))
        else:
            self._handle(pool_events.AgentStarted(host, bootstrap.outlives))


class RelayedWorkers:
    """Connections to all workers through their hosts' agents, with the interface of `ControlServer`."""

    def __init__(self, fleet: AgentManager) -> None:
        self._fleet = fleet

    async def open(
        self,
        interface: str,
        port: int = 0,
        *,
        received: Callable[[Worker, Any], None],
        gone: Callable[[Worker, bool], None],
        expected: Callable[[Worker], bool],
    ) -> Address:
        """Start serving agents. Parameters are those of `Server.open`.

        Workers are authenticated by the agents that started them.
        """
        return await self._fleet.listen(interface, port, received, gone)

    def send(self, worker: Worker, message: Message) -> bool:
        return self._fleet.order(worker.host, Tell([worker], cast(Any, message)))

    def send_each(self, messages: Iterable[tuple[Worker, Message]]) -> None:
        """Send each message to its worker.

        Consecutive messages for the same host are sent together. Sending to one host does not delay the others.
        """
        for host, group in groupby(messages, key=lambda each: each[0].host):
            self._fleet.order(
                host, *(Tell([worker], cast(Any, message)) for worker, message in group)
            )

    def send_world(self, world: World, places: Iterable[tuple[Worker, Place]]) -> None:
        """Send a world to its members, with one message for each host."""
        by_host: dict[str, list[tuple[Worker, Place]]] = {}
        for member in places:
            by_host.setdefault(member[0].host, []).append(member)
        for host, local in by_host.items():
            self._fleet.order(host, TellPlaces(local, world))

    def broadcast(self, workers: Iterable[Worker], message: Message) -> None:
        by_host: dict[str, list[Worker]] = {}
        for worker in workers:
            by_host.setdefault(worker.host, []).append(worker)
        for host, local in by_host.items():
            self._fleet.order(host, Tell(local, cast(Any, message)))

    def connected(self, worker: Worker) -> bool:
        """Return False: no caller has to wait for messages, because an agent sends them before the worker's exit."""
        return False

    def drain(self, worker: Worker) -> None:
        """Do nothing, because an agent sends all messages of a worker before the worker's exit."""

    def disconnect(self, worker: Worker) -> None:
        self._fleet.order(worker.host, Drop(worker))

    async def close(self) -> None:
        await self._fleet.hang_up()
