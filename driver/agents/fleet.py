"""The driver's side of all agents: a launcher, and the connections of all workers, in one. Decides nothing.

    nobody --start(worker)--> wanted: an agent is started there (if anybody can), orders wait for it
    wanted --Registered--> here: orders go out, what its workers say comes in
    here   --closed--> missing, for disconnect_s --Registered--> here
              |           +--------------------------------> lost: HostLost
              +--silent for a lease----------------------------> lost --Registered--> here
    here   --off the list, its workers gone--> nobody: its agent is dismissed, if we have started it

On each new connection the agent says who runs; that becomes HostReported, and its workers say again where they stand.
What was ordered on a connection that was lost is not repeated: the report shows what became of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.driver.agents.fleet_workers import Workers
from elastic.driver.agents.messages import (
    AgentAnswer,
    AgentMessage,
    Announced,
    Beat,
    Dismissed,
    Dump,
    Heard,
    Here,
    Hire,
    HostAgent,
    Kill,
    Logged,
    Printed,
    Probe,
    Refused,
    Registered,
    Seen,
    Start,
    from_agent,
)
from elastic.driver.agents.partition import Reach
from elastic.driver.events import (
    Event,
    HostLeaving,
    HostLost,
    HostReported,
    HostStaying,
    Notice,
    WorkerDisconnected,
    WorkerExited,
)
from elastic.driver.launch.starter import Bootstrap, Starter, StartFailed
from elastic.driver.network.address_check import Agreement
from elastic.driver.network.server import Callers, Server
from elastic.driver.processes.leases import Leases
from elastic.driver.sinks import Log, Sink
from elastic.protocol.messages import Address, Worker

AGENTS: Callers[HostAgent] = Callers(
    "agent", from_agent, AgentAnswer, lambda answer: answer.agent, replaces=True
)
ARRIVE_S = 30.0  # from an agent that was started to its call
CALL_S = 3.0  # for an agent that runs already to call; it tries once a second
RETURN_S = 0.5  # from a connection that was closed to the next; an agent tries at once
BEATS = 4  # in a lease
REPEATED_S = 0.2  # the kernel repeats what is not acknowledged after this time at the earliest
STOPPED_S = 10.0  # for an agent to say anything; its host's kernel acknowledges what we say even if it is stopped
TOGETHER_S = 0.2  # hosts that go silent for one reason are noticed within this time
AGAIN_S = (2.0, 60.0)  # between two tries to start an agent where one was lost: first, longest
CLOSE_S = 15.0  # for the agents to kill their workers and to say so
NO_AGENT = 126  # exit code of a worker that nobody could start

ReachUs = Callable[[str], Bootstrap]


def silence_s(lease_s: float) -> float:
    """For how long an agent may leave something unacknowledged, so that with the beat before it a lease has passed.

    Linux counts that from the first repetition of what was sent, and others may be on their way out with it.
    """
    return max(lease_s / 2, lease_s * (1 - 1 / BEATS) - REPEATED_S - TOGETHER_S)


@dataclass(eq=False)
class _Host:
    """What is known of one host's agent."""

    agent: HostAgent | None = None  # the one that has registered last
    here: bool = False  # it is connected, and has said who runs
    orders: list[Start] = field(default_factory=list)  # that wait for it
    starting: asyncio.Task[None] | None = None
    alarm: asyncio.TimerHandle | None = None  # it must arrive, or come back, by then
    running: set[Worker] = field(default_factory=set)  # ordered or reported, and their exit was not
    again_s: float = AGAIN_S[0]  # until the next try to start an agent here
    again: asyncio.TimerHandle | None = None
    trouble: str = ""  # the last one of starting an agent, said once
    held: str = ""  # why it would be lost, if anybody could be reached


class Fleet:
    """All agents of one job.

    ``starter`` None: nobody starts agents, they come by themselves. ``reach`` tells an agent that is to be started how
    to find this driver. ``folder``: where workers start; ``environ_of(host)``: what those on a host are given besides.
    ``adopted``: the workers that a driver before this one has left behind. ``deposed``: whether another driver has the
    job: from then on nobody is told anything, and nothing is ended.
    """

    def __init__(
        self,
        server: Server[HostAgent],
        *,
        hire: Hire,
        sink: Sink,
        log: Log,
        starter: Starter | None = None,
        reach: ReachUs | None = None,
        folder: str = "",
        adopted: Iterable[Worker] = (),
        environ_of: Callable[[str], Mapping[str, str]] | None = None,
        deposed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.hire = hire
        self._server = server
        self._sink = sink
        self._log = log
        self._starter = starter
        self._reach = reach
        self._folder = folder
        self._hosts: dict[str, _Host] = {}
        self._networks = Agreement()
        self._environ_of = environ_of or (lambda host: {})
        self._deposed = deposed
        self._closing = False
        self._heard: Callable[[Worker, Any], None] = lambda worker, message: None
        self._gone: Callable[[Worker, bool], None] = lambda worker, silent: None
        self._exited: Callable[[WorkerExited], None] = lambda event: None
        self.noticed: Callable[[Event], None] = lambda event: None
        self._listed: set[str] = set()
        self._reach_of = Reach()
        self._cut_off: asyncio.TimerHandle | None = None
        self._heard_of: Leases[str] = Leases(STOPPED_S)
        self._beating: asyncio.TimerHandle | None = None
        self.workers = Workers(self)
        for worker in adopted:
            self._host(worker.host).running.add(worker)

    # ---- the launcher ----------------------------------------------------------------------------------------------

    async def listen(
        self,
        interface: str,
        port: int,
        heard: Callable[[Worker, Any], None],
        gone: Callable[[Worker, bool], None],
    ) -> Address:
        """From here on agents are served. Raises OSError."""
        self._heard, self._gone = heard, gone
        return await self._server.open(
            interface,
            port,
            heard=self._agent_said,
            gone=self._agent_gone,
            expected=lambda agent: True,
            accepted=self._agent_called,
        )

    async def hang_up(self) -> None:
        await self._server.close()

    async def open(
        self, exited: Callable[[WorkerExited], None], noticed: Callable[[Event], None]
    ) -> None:
        """See `Launcher.open`. Agents of workers that are adopted are given as long to come back as a new one."""
        self._exited, self.noticed = exited, noticed
        self._beat()
        for name, host in self._hosts.items():
            if not host.here:
                self._reach_of.expected(name)
                self._expect(name, host, CALL_S, "its agent has not come back to the new driver")

    def start(self, worker: Worker, command: Sequence[str], env: Mapping[str, str]) -> None:
        """See `Launcher.start`. ``env`` goes before what the agent's host has."""
        host = self._host(worker.host)
        host.running.add(worker)
        env = {**env, **self._environ_of(worker.host)}
        order = Start(worker, list(command), env, self._folder)
        if host.here:
            self.order(worker.host, order)
            return
        host.orders.append(order)
        if host.alarm is not None:
            return  # one that runs there is expected
        if self._starter is None:
            self._expect(worker.host, host, CALL_S, "its agent has not called this driver")
        elif (
            host.starting is None
        ):  # which has a bound of its own, and gives the reason if it fails
            host.starting = asyncio.create_task(self._start_agent(worker.host, host))

    def kill(self, worker: Worker) -> None:
        host = self._host(worker.host)
        for order in host.orders:
            if order.worker == worker:
                host.orders.remove(order)
                self._end(WorkerExited(worker, -9))
                return
        self.order(worker.host, Kill(worker))

    def probe(self, workers: Sequence[Worker]) -> None:
        by_host: dict[str, list[Worker]] = {}
        for worker in workers:
            by_host.setdefault(worker.host, []).append(worker)
        for host, there in by_host.items():
            self.order(host, Probe(there))

    def dump(self, worker: Worker) -> None:
        self.order(worker.host, Dump(worker))

    def alive(self) -> frozenset[Worker]:
        return frozenset(worker for host in self._hosts.values() for worker in host.running)

    def _beat(self) -> None:
        """Says something to everybody, so that silence can be told: a host that hears nothing of us, but whose own
        packets arrive, acknowledges nothing, and that shows only while something waits to be acknowledged.
        """
        loop = asyncio.get_running_loop()
        self._beating = loop.call_later(self.hire.lease_s / BEATS, self._beat)
        self._server.broadcast(
            [host.agent for host in self._hosts.values() if host.here and host.agent is not None],
            Beat(),
        )
        for name in self._heard_of.expired(loop.time()):
            stopped = self._hosts[name].agent
            if stopped is not None:
                why = f"it has said nothing for {STOPPED_S:g} s, although it is connected: is it stopped?"
                self._log("error", f"the agent of {name} is given up: {why}")
                self._server.disconnect(stopped)

    async def close(self) -> None:
        """Dismiss every agent; wait until each has killed its workers and hung up, within a bound."""
        self._closing = True
        if self._beating is not None:
            self._beating.cancel()
        if self._cut_off is not None:
            self._cut_off.cancel()
        loop = asyncio.get_running_loop()
        for name, host in self._hosts.items():
            for timer in (host.alarm, host.again):
                if timer is not None:
                    timer.cancel()
            if host.starting is not None:
                host.starting.cancel()
            self.order(name, Dismissed("the job has ended"))
        deadline = loop.time() + CLOSE_S
        while any(h.here and h.running for h in self._hosts.values()) and loop.time() < deadline:
            if self._deposed():
                break
            await asyncio.sleep(0.005)
        if self._starter is not None:
            await self._starter.close()

    # ---- agents come and go ----------------------------------------------------------------------------------------

    def _agent_said(self, agent: HostAgent, message: Any) -> None:
        host = self._host(agent.host)
        if agent == host.agent:
            self._heard_of.renew(agent.host, asyncio.get_running_loop().time())
        match message:
            case Here():
                pass
            case Registered() if all(worker.host == agent.host for worker in message.running):
                self._registered(agent, host, message)
            case _ if agent != host.agent:
                pass  # of one that another has followed
            case Heard(worker, said) if worker.host == agent.host:
                self._heard(worker, said)
            case Seen(event) if event.worker.host == agent.host:
                self._seen(host, event)
            case Printed(worker, stream, data) if worker.host == agent.host:
                if data:
                    self._sink.feed(worker, stream, data)
                else:
                    self._sink.finish(worker, stream)
            case Logged(level, text):
                self._log(level, f"{agent.host}: {text}")
            case Announced(Notice() as notice):
                self.noticed(HostLeaving(agent.host, notice))
            case Announced():
                self.noticed(HostStaying(agent.host))
            case _:
                self._log("warning", f"{agent} speaks of a worker that is not its own")
                self._server.disconnect(agent)

    def _agent_called(self, agent: HostAgent) -> None:
        """It has proved itself: it is told who this driver is, and answers with Registered.

        Where another is here, the earlier one has been replaced without knowing it, and a later one has to wait until
        the other is gone: it may be the same machine, started again, whose end has not been noticed yet.
        """
        host = self._host(agent.host)
        if host.agent is None or host.agent == agent or not host.here:
            self._server.send(agent, self.hire)
        elif host.agent.incarnation > agent.incarnation:
            self._server.send(agent, Refused("another agent serves this host"))
        else:
            self._server.disconnect(agent)

    def _registered(self, agent: HostAgent, host: _Host, said: Registered) -> None:
        if host.here and agent != host.agent:
            return  # it was not hired
        before, host.agent = host.agent, agent
        if before is not None and before != agent:
            self._log(
                "info", f"{agent.host} has a new agent: whatever ran under the old one is gone"
            )
        if host.alarm is not None:
            host.alarm.cancel()
            host.alarm = None
        host.here, host.again_s, host.trouble = True, AGAIN_S[0], ""
        self._heard_of.grant(agent.host, asyncio.get_running_loop().time())
        self._back_among_others(agent.host)
        if host.again is not None:
            host.again.cancel()
            host.again = None
        if self._closing:
            self.order(agent.host, Dismissed("the job has ended"))
            return
        for event in said.exits:
            if event.worker in host.running:
                self._end(event)
        waiting = {order.worker for order in host.orders}
        ordered = sorted(host.running - waiting)
        # Whoever has to be started on this connection has not failed to come back from the last one.
        self.noticed(HostReported(agent.host, said.running, ordered, said.notice))
        host.running = {*said.running, *waiting}
        for order in host.orders:
            self.order(agent.host, order)
        host.orders.clear()
        self._compare_networks(agent, said)

    def _compare_networks(self, agent: HostAgent, said: Registered) -> None:
        caller = self._server.peer(agent)
        trouble = self._networks.note(agent.host, said.bind, said.addresses, caller)
        if trouble:
            self._log("warning", trouble)

    def _agent_gone(self, agent: HostAgent, silent: bool) -> None:
        host = self._host(agent.host)
        if agent != host.agent or self._closing:
            if agent == host.agent:
                host.here = False
            return
        host.here = False
        self._heard_of.drop(agent.host)
        self._reach_of.away(agent.host)
        if silent:
            silence = "its agent acknowledges nothing any more"
            self._expect(agent.host, host, TOGETHER_S, silence)
        else:
            self._log("warning", f"the connection of {agent.host}'s agent was closed")
            self._expect(
                agent.host,
                host,
                RETURN_S,
                f"its agent has not come back within {RETURN_S:g} s",
            )

    def _expect(self, name: str, host: _Host, within_s: float, otherwise: str) -> None:
        if host.alarm is not None:
            host.alarm.cancel()
        loop = asyncio.get_running_loop()
        host.alarm = loop.call_later(within_s, self._overdue, name, host, otherwise)

    def _overdue(self, name: str, host: _Host, reason: str) -> None:
        if self._reach_of.overdue(name):
            self._lose(name, host, reason)
            return
        host.alarm = None
        host.held = reason
        if self._cut_off is None:
            self._log(
                "warning",
                "no agent can be reached: this driver is cut off itself, and takes nobody for lost"
                f" until one is heard of again, or {self.hire.away_s:g} s have passed",
            )
            loop = asyncio.get_running_loop()
            self._cut_off = loop.call_later(self.hire.away_s, self._give_up)

    def _give_up(self) -> None:
        """By now agents have ended their workers, whether they live or not."""
        self._cut_off = None
        for name in self._reach_of.give_up():
            host = self._host(name)
            self._lose(name, host, host.held)

    def _back_among_others(self, name: str) -> None:
        """This host is reached. Whoever was not given up gets its time anew."""
        released = self._reach_of.here(name)
        if self._cut_off is not None and not self._reach_of.cut_off:
            self._cut_off.cancel()
            self._cut_off = None
            self._log("info", f"{name} is reached again, and with that this driver")
        for other in released:
            host = self._host(other)
            if not host.here:
                self._expect(other, host, self.hire.lease_s + RETURN_S, host.held)

    def _lose(self, name: str, host: _Host, reason: str) -> None:
        if host.alarm is not None:
            host.alarm.cancel()
            host.alarm = None
        for order in [*host.orders]:
            host.orders.remove(order)
            self._end(WorkerExited(order.worker, NO_AGENT, f"host {name}: {reason}"))
        if host.running:
            self._networks.forget(name)
            self.noticed(HostLost(name, reason))
            self._start_again(name, host)

    def listed(self, hosts: Mapping[str, int]) -> None:
        """Discovery's list: on those that have left it no agent is started again, nor kept for nothing."""
        self._listed = set(hosts)
        for name, host in self._hosts.items():
            self._part(name, host)

    def _part(self, name: str, host: _Host) -> None:
        """From the agent of a host that has left the list, once its workers have: the machine may be waited for, and
        is not empty with an agent on it. Those that come by themselves stay.
        """
        if self._starter is None or self._closing or name in self._listed:
            return
        if not host.here or host.running or host.orders:
            return
        self.order(name, Dismissed("its host has left the list, and its workers have gone"))
        host.agent, host.here = None, False
        self._heard_of.drop(name)
        self._reach_of.forget(name)
        self._networks.forget(name)

    def _start_again(self, name: str, host: _Host) -> None:
        """What ran there is unknown until its agent, or a new one, tells; and nothing can be started before."""
        if self._starter is None or host.again is not None or self._closing:
            return
        loop = asyncio.get_running_loop()
        host.again = loop.call_later(host.again_s, self._try_again, name, host)
        host.again_s = min(2 * host.again_s, AGAIN_S[1])

    def _try_again(self, name: str, host: _Host) -> None:
        host.again = None
        if host.here or self._closing:
            return
        if name not in self._listed:
            self._start_again(name, host)
        elif host.starting is None:
            host.starting = asyncio.create_task(self._start_agent(name, host))

    async def _start_agent(self, name: str, host: _Host) -> None:
        assert self._starter is not None and self._reach is not None
        try:
            await self._starter.start(self._reach(name))
        except StartFailed as error:
            host.starting = None
            trouble = f"no agent could be started: {error}"
            if host.orders:
                self._lose(name, host, trouble)
            elif trouble != host.trouble:
                self._log("warning", f"host {name}: {trouble}; trying on")
            host.trouble = trouble
            self._start_again(name, host)
            return
        host.starting = None
        if not host.here:
            self._expect(
                name,
                host,
                ARRIVE_S,
                f"its agent was started, but has not called within {ARRIVE_S:g} s: can {name} reach"
                " this driver? (see --network-interface)",
            )

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _seen(self, host: _Host, event: Event) -> None:
        match event:
            case WorkerExited():
                self._end(event)
                self._part(event.worker.host, host)
            case WorkerDisconnected(worker, silent):
                self._gone(worker, silent)
            case _:
                self.noticed(event)

    def _end(self, event: WorkerExited) -> None:
        """Told once of each worker."""
        host = self._host(event.worker.host)
        if event.worker in host.running:
            host.running.discard(event.worker)
            self._exited(event)
            self._sink.forget(event.worker)

    def order(self, name: str, *messages: AgentMessage) -> bool:
        """To the agent of a host. False where there is none now: then all is dropped."""
        host = self._hosts.get(name)
        if self._deposed() or host is None or not host.here or host.agent is None:
            return False
        return self._server.send(host.agent, *messages)

    def _host(self, name: str) -> _Host:
        return self._hosts.setdefault(name, _Host())
