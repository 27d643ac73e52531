"""Decisions about agents: when to start agents, which agent serves a host, queued worker starts, and lost hosts.

Pure: no I/O, no clock.

    none   --start a worker--> wanted: an agent is started (if possible), and worker starts are queued for it
    wanted --Registered--> here: queued starts are sent, messages of its workers are received
    here   --connection closed--> missing --Registered within RETURN_S--> here
      |                              +--RETURN_S expired----------------> lost: HostLost
      +--host unresponsive----------> lost --Registered--> here
      +--given up by the driver-----> lost
    here   --removed from the list, workers exited--> none: the agent is dismissed if this driver or an engine started
                                                      it (with an engine, the list contains the hosts with agents:
                                                      ``lists_hosts``)

On each new connection, the agent reports the running workers, from which a HostReported event is made, and its workers
repeat their state. Orders sent on a lost connection are not repeated, because the report shows whether they were
carried out.

`agent_manager.AgentManager` performs the actions. The simulator in `elastic.chaos` performs them on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

from elastic.driver.agents import pool_events
from elastic.driver.agents.messages import (
    AgentId,
    Announced,
    Attach,
    BandwidthFound,
    BandwidthServed,
    Beat,
    CallForBandwidth,
    Detach,
    Heard,
    HeardTogether,
    Here,
    Kill,
    Logged,
    Printed,
    Registered,
    Reject,
    Seen,
    ServeBandwidth,
    Start,
)
from elastic.driver.agents.partition_detector import PartitionDetector
from elastic.driver.agents.pool_state import (
    AGAIN_S,
    AgentRecord,
    DeadlineKind,
    PoolActions,
    PoolDeadlines,
)
from elastic.driver.events import (
    BandwidthMeasured,
    Event,
    HostLeaving,
    HostLost,
    HostReported,
    HostsChanged,
    HostStaying,
    Notice,
    TimePassed,
    WorkerExited,
    WorkersReady,
    WorkersResumed,
)
from elastic.driver.network.unreachable_hosts import AddressCheck
from elastic.driver.processes.liveness_timeouts import LivenessTimeouts
from elastic.protocol.messages import Worker

ARRIVE_S = 30.0  # seconds after its start within which an agent must connect
CALL_S = 3.0  # seconds within which a running agent must connect; it retries every second
RETURN_S = 0.5  # seconds within which a disconnected agent must reconnect; it tries immediately
BEATS = 4  # number of heartbeats per liveness timeout
REPEATED_S = 0.2  # minimum number of seconds after which the kernel retransmits unacknowledged data
# maximum time without a message from an agent, in seconds; detects stopped agents, whose kernel acknowledges data
STOPPED_S = 10.0
TOGETHER_S = 0.2  # seconds within which hosts lost for the same reason are all detected
NO_AGENT = 126  # exit code to report for a worker that could not be started


def silence_s(lease_s: float) -> float:
    """Return the maximum number of seconds for which an agent's host may leave data unacknowledged.

    The result is the liveness timeout minus the interval between heartbeats, the time until the first retransmission
    (from which Linux measures), and TOGETHER_S. It is at least half of the liveness timeout.
    """
    return max(lease_s / 2, lease_s * (1 - 1 / BEATS) - REPEATED_S - TOGETHER_S)


class AgentPool:
    """State machine of a job's agents: takes timed events, and returns actions to perform in order.

    Args:
        attach: first message to send to each agent.
        starts_agents: whether this driver can start agents. If False, agents are started externally.
        lists_hosts: whether the hosts with agents form the list of hosts and must be reported.
        adopted: workers to take over from the previous driver.
    """

    def __init__(
        self,
        attach: Attach,
        *,
        starts_agents: bool = False,
        lists_hosts: bool = False,
        adopted: Iterable[Worker] = (),
    ) -> None:
        self.attach = attach
        self._starts_agents = starts_agents
        self._lists_hosts = lists_hosts
        self._connected: dict[str, int] = {}  # slots of each host in the last report
        self._hosts: dict[str, AgentRecord] = {}
        self._listed: set[str] = set()
        self._removed: set[str] = set()  # hosts that were removed from the list
        self._due = PoolDeadlines()
        self._reach = PartitionDetector()
        self._liveness: LivenessTimeouts[str] = LivenessTimeouts(STOPPED_S)
        self._networks = AddressCheck()
        self._closing = False
        self._actions = PoolActions()
        for worker in adopted:
            self._host(worker.host).running.add(worker)

    # ---- queries ---------------------------------------------------------------------------------------------------

    def agent_of(self, host: str) -> AgentId | None:
        """Return the connected agent of a host, or None."""
        known = self._hosts.get(host)
        return known.agent if known is not None and known.here else None

    def alive(self) -> frozenset[Worker]:
        """Return the workers that were started or reported as running and have no reported exit."""
        return frozenset(worker for host in self._hosts.values() for worker in host.running)

    def awaits_agents(self) -> bool:
        """Return whether the driver must still wait for an agent's exit reports or for a dismissed agent to disconnect.

        Until then, the driver must not close connections: an agent that is about to send would get a connection
        error, and would never read its dismissal. The driver also waits for an agent that was just started, because
        the agent would otherwise search for the driver for minutes.
        """
        return any(
            host.coming or (host.here and (host.running or host.ends))
            for host in self._hosts.values()
        )

    def next_deadline(self) -> float | None:
        """Return the time, in seconds, at which `handle` must receive `TimePassed`, or None."""
        return self._due.first()

    # ---- one event -------------------------------------------------------------------------------------------------

    def handle(self, event: pool_events.PoolEvent, now: float) -> list[pool_events.PoolAction]:
        """Return the actions for an event, in the order in which they must be performed."""
        self._actions.begin(now)
        match event:
            case pool_events.AgentMessageReceived(agent, message, caller):
                self._handle_message(agent, self._host(agent.host), message, caller)
            case pool_events.AgentConnected(agent):
                self._agent_called(agent, self._host(agent.host))
            case pool_events.AgentDisconnected(agent, silent):
                self._agent_disconnected(agent, self._host(agent.host), silent)
            case pool_events.StartOrdered(order):
                self._start(self._host(order.worker.host), order)
            case pool_events.KillOrdered(worker):
                self._kill(self._host(worker.host), worker)
            case pool_events.BandwidthOrdered(host, peer):
                self._measure(host, peer)
            case pool_events.GiveUpOrdered(host, why):
                self._give_up_host(self._host(host), why)
            case pool_events.AgentStarted(host, outlives):
                self._agent_started(self._host(host), outlives)
            case pool_events.AgentNotStarted(host, reason):
                self._agent_not_started(self._host(host), reason)
            case HostsChanged(hosts):
                self._removed = (self._removed | self._listed) - set(hosts)
                self._listed = set(hosts)
                for each in self._hosts.values():
                    self._part(each)
            case pool_events.DriverReady():
                self._ready()
            case pool_events.JobEnded():
                self._end_job()
            case TimePassed():
                self._overdue()
        return self._actions.decided

    def _overdue(self) -> None:
        while (key := self._due.pop(self._actions.now)) is not None:
            name, due = key
            match due:
                case DeadlineKind.ARRIVAL:
                    self._missing(self._host(name))
                case DeadlineKind.RETRY:
                    self._try_again(self._host(name))
                case DeadlineKind.RESIGNATION:
                    # By now, even the unreachable agents have killed their workers.
                    for held in map(self._host, self._reach.give_up()):
                        self._lose(held, held.overdue_why)
                case DeadlineKind.BEAT:
                    self._beat()

    def _ready(self) -> None:
        self._beat()
        for host in self._hosts.values():
            if not host.here:
                self._reach.expected(host.name)
                self._expect(host, CALL_S, "its agent has not reconnected to the new driver")

    def _beat(self) -> None:
        self._due.put("", DeadlineKind.BEAT, self._actions.now + self.attach.lease_s / BEATS)
        agents = [host.agent for host in self._hosts.values() if host.here and host.agent]
        if agents:
            self._actions.add(pool_events.SendToAgents(agents, [Beat()]))
        for name in self._liveness.expired(self._actions.now):
            stopped = self._hosts[name].agent
            if stopped is not None:
                why = f"it is connected but has sent nothing for {STOPPED_S:g} s; it may be stopped"
                self._actions.log("error", f"treating the agent of {name} as lost: {why}")
                self._actions.add(pool_events.DisconnectAgent(stopped))

    def _end_job(self) -> None:
        self._closing = True
        self._due.clear()
        for host in self._hosts.values():
            self._actions.send(host, Detach("the job has ended"))
            if host.coming:
                self._due.put(host.name, DeadlineKind.ARRIVAL, self._actions.now + CALL_S)

    # ---- agents connect and disconnect -----------------------------------------------------------------------------

    def _handle_message(self, agent: AgentId, host: AgentRecord, message: Any, caller: str) -> None:
        if agent == host.agent:
            self._liveness.renew(agent.host, self._actions.now)
        match message:
            case Here():
                pass
            case Registered() if all(worker.host == agent.host for worker in message.running):
                self._registered(agent, host, message, caller)
            case _ if agent != host.agent:
                pass  # ignore messages from a replaced agent
            case Heard(worker, sent) if worker.host == agent.host:
                self._actions.add(pool_events.RelayMessage(worker, sent))
            case HeardTogether(event) if _reports_of(event, agent.host):
                self._actions.add(pool_events.PostToDriver(event))
            case Seen(event) if event.worker.host == agent.host:
                self._on_observation(host, event)
            case Printed(worker, stream, data) if worker.host == agent.host:
                self._actions.add(pool_events.RelayOutput(worker, stream, data))
            case Logged(level, text):
                self._actions.log(level, f"{agent.host}: {text}")
            case Announced(Notice() as notice):
                self._actions.add(pool_events.PostToDriver(HostLeaving(agent.host, notice)))
            case Announced():
                self._actions.add(pool_events.PostToDriver(HostStaying(agent.host)))
            case BandwidthServed(caller, address, trouble):
                if address is None:
                    self._not_measured(caller, agent.host, trouble)
                elif self.agent_of(caller) is not None:
                    call = CallForBandwidth(agent.host, address)
                    self._actions.send(self._host(caller), call)
            case BandwidthFound(event) if event.host == agent.host:
                self._actions.add(pool_events.PostToDriver(event))
            case _:
                self._actions.log(
                    "warning",
                    f"disconnected {agent}: it sent an invalid report, or one of another host",
                )
                self._actions.add(pool_events.DisconnectAgent(agent))

    def _agent_called(self, agent: AgentId, host: AgentRecord) -> None:
        """Handle a new connection of an agent.

        The agent receives Attach and answers with Registered. If another agent of the host is connected, the agent with
        the lower incarnation is outdated. The newer agent must wait until the outdated one has disconnected: after a
        reboot of the machine, the driver may not have noticed the loss of the old connection yet.
        """
        if host.agent is None or host.agent == agent or not host.here:
            self._actions.add(pool_events.SendToAgents([agent], [self.attach]))
        elif host.agent.incarnation > agent.incarnation:
            self._actions.add(
                pool_events.SendToAgents(
                    [agent], [Reject("another agent already serves this host")]
                )
            )
        else:
            self._actions.add(pool_events.DisconnectAgent(agent))

    def _registered(
        self, agent: AgentId, host: AgentRecord, message: Registered, caller: str
    ) -> None:
        if host.here and agent != host.agent:
            return  # outdated: another agent serves this host
        before, host.agent = host.agent, agent
        if before is not None and before != agent:
            text = "has a new agent; the workers of the previous agent were lost"
            self._actions.log("info", f"{agent.host} {text}")
        host.here, host.again_s, host.trouble = True, AGAIN_S[0], ""
        host.ends, host.coming = message.ends, False
        host.given_up = False
        self._due.drop(host.name, DeadlineKind.ARRIVAL)
        self._due.drop(host.name, DeadlineKind.RETRY)
        self._liveness.grant(host.name, self._actions.now)
        self._reconnected(host.name)
        self._list_host(host.name, message.slots)
        if self._closing:
            self._actions.send(host, Detach("the job has ended"))
            return
        for event in message.exits:
            self._exited(host, event)
        waiting = {order.worker for order in host.starts}
        # Exclude queued starts: they were never sent, so their processes are not expected in the report.
        ordered = sorted(host.running - waiting)
        self._actions.add(
            pool_events.PostToDriver(
                HostReported(agent.host, message.running, ordered, message.notice)
            )
        )
        host.running = {*message.running, *waiting}
        for order in host.starts:
            self._actions.send(host, order)
        host.starts.clear()
        for worker in sorted(host.doomed & host.running):
            self._actions.send(host, Kill(worker))
        host.doomed.clear()
        trouble = self._networks.note(host.name, message.bind, message.addresses, caller)
        if trouble:
            self._actions.log("warning", trouble)

    def _agent_disconnected(self, agent: AgentId, host: AgentRecord, silent: bool) -> None:
        if agent != host.agent or host.given_up:
            return
        host.here = False
        if self._closing:
            return
        self._liveness.drop(host.name)
        self._reach.away(host.name)
        if silent:
            self._expect(host, TOGETHER_S, "its agent stopped acknowledging data")
        else:
            self._actions.log(
                "warning",
                f"lost the connection to the agent of {host.name}; waiting {RETURN_S:g} s"
                " for it to reconnect",
            )
            self._expect(host, RETURN_S, f"its agent has not reconnected within {RETURN_S:g} s")

    def _give_up_host(self, host: AgentRecord, why: str) -> None:
        if not host.here or host.agent is None or self._closing:
            return
        self._actions.log("error", f"treating the agent of {host.name} as lost: {why}")
        self._actions.add(pool_events.DisconnectAgent(host.agent))
        host.here, host.given_up, host.overdue_why = False, True, why
        self._liveness.drop(host.name)
        self._reach.away(host.name)
        self._missing(host)

    def _expect(self, host: AgentRecord, within_s: float, otherwise: str) -> None:
        host.overdue_why = otherwise
        self._due.put(host.name, DeadlineKind.ARRIVAL, self._actions.now + within_s)

    def _missing(self, host: AgentRecord) -> None:
        host.coming = False
        if self._closing:
            return
        if self._reach.overdue(host.name):
            self._lose(host, host.overdue_why)
        elif ("", DeadlineKind.RESIGNATION) not in self._due:
            self._actions.log(
                "warning",
                "this driver lost the connections to all agents; no host is treated as lost until an agent"
                f" reconnects or {self.attach.away_s:g} s have passed",
            )
            self._due.put("", DeadlineKind.RESIGNATION, self._actions.now + self.attach.away_s)

    def _reconnected(self, name: str) -> None:
        released = self._reach.here(name)
        if ("", DeadlineKind.RESIGNATION) in self._due and not self._reach.cut_off:
            self._due.drop("", DeadlineKind.RESIGNATION)
            self._actions.log("info", f"{name} reconnected: this driver is reachable again")
        for other in released:
            host = self._host(other)
            if not host.here:
                self._expect(host, self.attach.lease_s + RETURN_S, host.overdue_why)

    def _lose(self, host: AgentRecord, reason: str) -> None:
        self._due.drop(host.name, DeadlineKind.ARRIVAL)
        waiting, host.starts = host.starts, []
        for order in waiting:
            why = f"host {host.name}: {reason}"
            self._exited(host, WorkerExited(order.worker, NO_AGENT, why))
        self._list_host(host.name, 0)
        if host.running:
            self._networks.drop(host.name)
            self._actions.add(pool_events.PostToDriver(HostLost(host.name, reason)))
            self._start_again(host)

    def _part(self, host: AgentRecord) -> None:
        """Dismiss the agent of a host that was removed from the list, once the host's workers have exited.

        Some clusters release a machine only when it is idle, which a running agent would prevent. Agents that were
        started externally are not dismissed.
        """
        if self._closing or host.name in self._listed:
            return
        # If an engine starts the agents, a new agent's host is not on the list yet, so only dismiss removed hosts.
        if not self._starts_agents and not (self._lists_hosts and host.name in self._removed):
            return
        if not host.here or host.running or host.starts:
            return
        self._actions.send(host, Detach("its host left the list and its workers have exited"))
        host.agent, host.here = None, False
        self._liveness.drop(host.name)
        self._reach.drop(host.name)
        self._networks.drop(host.name)
        self._list_host(host.name, 0)

    def _list_host(self, name: str, slots: int) -> None:
        """Report the hosts with agents if the number of slots of this host has changed."""
        if not self._lists_hosts or self._closing or self._connected.get(name, 0) == slots:
            return
        self._connected[name] = slots
        if not slots:
            del self._connected[name]
        self._actions.add(pool_events.ListConnectedHosts(dict(self._connected)))

    # ---- starting agents -------------------------------------------------------------------------------------------

    def _start_agent(self, host: AgentRecord) -> None:
        if not host.starting:
            host.starting = True
            self._actions.add(pool_events.StartAgent(host.name))

    def _start_again(self, host: AgentRecord) -> None:
        """Schedule another attempt to start an agent on the host.

        The driver needs an agent there, because only an agent can report which processes still run on the host.
        """
        if not self._starts_agents or self._closing or (host.name, DeadlineKind.RETRY) in self._due:
            return
        self._due.put(host.name, DeadlineKind.RETRY, self._actions.now + host.again_s)
        host.again_s = min(2 * host.again_s, AGAIN_S[1])

    def _try_again(self, host: AgentRecord) -> None:
        if host.here:
            return
        if host.name in self._listed:
            self._start_agent(host)
        else:
            self._start_again(host)

    def _agent_started(self, host: AgentRecord, outlives: bool) -> None:
        host.starting = False
        host.coming = outlives and not host.here and not self._closing
        if not host.here and not self._closing:
            self._expect(
                host,
                ARRIVE_S,
                f"its agent was started but has not connected within {ARRIVE_S:g} s: can {host.name} reach this"
                " driver? (see --network-interface)",
            )

    def _agent_not_started(self, host: AgentRecord, reason: str) -> None:
        host.starting = False
        if self._closing:
            return
        trouble = f"no agent could be started: {reason}"
        if host.starts:
            self._lose(host, trouble)
        elif trouble != host.trouble:
            self._actions.log("warning", f"host {host.name}: {trouble}; retrying")
        host.trouble = trouble
        self._start_again(host)

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _start(self, host: AgentRecord, order: Start) -> None:
        host.running.add(order.worker)
        if host.here:
            self._actions.send(host, order)
            return
        host.starts.append(order)
        if (host.name, DeadlineKind.ARRIVAL) in self._due:
            return  # wait: a running agent should connect soon
        # No timeout is needed for the start of an agent: a failed attempt ends with a reason.
        if self._starts_agents:
            self._start_agent(host)
        else:
            self._expect(host, CALL_S, "its agent has not connected to this driver")

    def _kill(self, host: AgentRecord, worker: Worker) -> None:
        waiting = [order for order in host.starts if order.worker == worker]
        if waiting:
            host.starts.remove(waiting[0])
            self._exited(host, WorkerExited(worker, -9))
        elif host.here:
            self._actions.send(host, Kill(worker))
        else:
            host.doomed.add(worker)

    def _measure(self, host: str, peer: str) -> None:
        """Begin a measurement of the bandwidth from ``host`` to ``peer``. No result follows if either agent is lost."""
        absent = [name for name in (host, peer) if self.agent_of(name) is None]
        if absent:
            self._not_measured(host, peer, f"the agent of {absent[0]} is not connected")
        else:
            self._actions.send(self._host(peer), ServeBandwidth(host))

    def _not_measured(self, host: str, peer: str, trouble: str) -> None:
        event = BandwidthMeasured(host, peer, trouble=trouble)
        self._actions.add(pool_events.PostToDriver(event))

    def _on_observation(self, host: AgentRecord, event: Event) -> None:
        if isinstance(event, WorkerExited):
            self._exited(host, event)
            self._part(host)
        else:
            self._actions.add(pool_events.PostToDriver(event))

    def _exited(self, host: AgentRecord, event: WorkerExited) -> None:
        if event.worker in host.running:
            host.running.discard(event.worker)
            self._actions.add(pool_events.PostToDriver(event))

    def _host(self, name: str) -> AgentRecord:
        known = self._hosts.get(name)
        if known is None:
            known = self._hosts[name] = AgentRecord(name)
        return known


def _reports_of(event: WorkersReady | WorkersResumed, host: str) -> bool:
    """Return whether merged reports are valid.

    Their workers must be distinct workers of the host, and each column must contain one value for each of them.
    """
    columns: list[Sized] = []
    match event:
        case WorkersReady(ports=ports):
            columns = [ports]
        case WorkersResumed(phases_ms=phases_ms, copied_bytes=copied):
            columns = [*phases_ms.values(), *([copied] if copied else [])]
    workers = event.workers
    return (
        0 < len(workers) == len(set(workers))
        and all(len(each) == len(workers) for each in columns)
        and all(worker.host == host for worker in workers)
    )
