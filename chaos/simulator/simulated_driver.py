"""Simulated driver: the real JobDecisions and AgentPool, with a simulated event loop, server and journal.

Every event and the resulting actions are written to the journal before the actions are performed. The driver can crash
wherever it yields control: before an event is written, or between any two actions. After a restart, it replays its
journal into a new Membership and continues. It then knows its earlier decisions, but not which of their actions were
performed. Agents communicate with its AgentPool. Workers have their own connections, as on a single machine. In half of
all seeds, the reports of a host's workers are then merged as the agent of the host merges them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from elastic.chaos.simulator.interface import SimulatedJob
from elastic.chaos.simulator.simulated_network import INWARD, OUTWARD, Connection
from elastic.chaos.simulator.simulated_worker import GIVE_UP_S
from elastic.driver import events
from elastic.driver.agents import pool_events
from elastic.driver.agents.agent_pool import AgentPool
from elastic.driver.agents.merged_reports import Relayed, ReportMerger
from elastic.driver.agents.messages import (
    AgentId,
    AgentMessage,
    Attach,
    Beat,
    Dump,
    Heard,
    HeardTogether,
    Probe,
    Registered,
    Seen,
    Start,
)
from elastic.driver.job.job_decisions import JobDecisions
from elastic.driver.journal.entries import Entry
from elastic.driver.journal.journal import rebuilt
from elastic.driver.membership.membership import Membership, may_defer
from elastic.driver.membership.scheduling.rank_order import copy_groups
from elastic.driver.membership.worker_messages import event_of
from elastic.protocol import messages
from elastic.protocol.messages import Message, Worker

BEAT_S = 0.9  # seconds between heartbeats of an agent
ARM_S = 0.001
HOLD_S = 0.05  # longer than that of a real agent, because messages of a host arrive at more different times
LAST_S = 2.0  # seconds from the last worker's exit to the exit of the driver
AGENT_STARTS_S = (0.05, 0.5)  # minimum and maximum number of seconds for starting an agent


class SimulatedDriver:
    """Simulated driver of one job."""

    def __init__(self, sim: SimulatedJob) -> None:
        self.sim = sim
        self.settings = sim.settings
        self.membership = Membership(sim.settings)
        self.entries: list[Entry] = []
        self.up = True
        self.leaves = False  # whether no worker is left and the driver's process is about to exit
        self.gone = False  # whether the driver has exited because the job has ended
        self.paused = False
        self.end: events.EndJob | None = None
        self.ended_at = 0.0
        # number of further yields until the driver crashes, or None
        self.doom: int | None = None
        self.down_s = 1.0
        self.crashes = 0
        self.decisions = self._new_decisions()
        self._workers: dict[Worker, Connection] = {}
        self._agents: dict[AgentId, Connection] = {}
        self._term = 0
        self.pool = self._new_pool()
        self._pool_alarm: float | None = None
        # merged reports that will be flushed, by host
        self._mergers: dict[str, ReportMerger] = {}
        # events that were received while the driver was frozen
        self._backlog: list[Callable[[], None]] = []
        # Events that the driver handles together, see `FaultConditions.busy_s`.
        self._mailbox: list[events.Event] = []
        self._alarm: float | None = None
        self._arming = False
        sim.clock.at(0.0, self._meet, pool_events.DriverReady())

    # ---- its loop --------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        if not self.up or self._dies():
            return
        if self.paused:
            self._backlog.append(partial(self.handle, event))
            return
        if not self.sim.weather.busy_s:
            self._perform(self._decide(event))
        elif not self._mailbox:
            self._mailbox = [event]
            self.sim.clock.after(self.sim.weather.busy_s, self._read_mailbox)
        else:
            self._mailbox.append(event)

    def _read_mailbox(self) -> None:
        if self.paused:
            self._backlog.append(self._read_mailbox)
            return
        queued, self._mailbox = self._mailbox, []
        if not queued:
            return  # The driver has crashed in the meantime.
        last = len(queued) - 1
        decided = [
            self._decide(event, more=number < last and may_defer(event))
            for number, event in enumerate(queued)
        ]
        self._perform([action for actions in decided for action in actions])

    def _decide(self, event: events.Event, *, more: bool = False) -> list[events.Action]:
        now = self.sim.clock.now
        answer = self.decisions.answer(event, now, more=more)
        if self.sim.keep_journal:
            self.entries.append(Entry(now, event, answer, more=more))
        self.sim.decided(event, answer, more=more)
        return self.decisions.follow(event, answer, now)

    def _perform(self, actions: list[events.Action]) -> None:
        for action in actions:
            if self._dies():
                return
            self._do(action)
        self._dies()
        if self.decisions.over and self.up and not self.leaves:
            self.leaves = True
            self._meet(pool_events.JobEnded())
            self.sim.clock.after(LAST_S, self._leave)
        if not self.sim.step_s:
            self._arm()
        elif not self._arming:
            # Set the timer once per batch of events, as the real loop does.
            self._arming = True
            self.sim.clock.after(ARM_S, self._arm)

    def _new_decisions(self) -> JobDecisions:
        members = {worker: self.membership.place_of(worker) for worker in self.membership.members}
        return JobDecisions(
            self.membership,
            leave_s=self.settings.leave_s,
            idle_s=self.settings.idle_s,
            running=[*self.membership.roster],
            members={worker: place for worker, place in members.items() if place is not None},
        )

    def _dies(self) -> bool:
        if self.doom is not None and self.up:
            self.doom -= 1
            if self.doom <= 0:
                self.doom = None
                self.crash()
        return not self.up

    def _arm(self) -> None:
        self._arming = False
        # As in the real loop, the timer is set after all queued events.
        idle = self.up and not self._mailbox
        deadline = self.decisions.next_deadline() if idle else None
        if deadline is not None and (self._alarm is None or deadline < self._alarm):
            self._alarm = deadline
            self.sim.clock.at(deadline, self._ring, deadline)

    def _ring(self, alarm: float) -> None:
        if alarm != self._alarm:
            return
        self._alarm = None
        if not self.up:
            return
        deadline = self.decisions.next_deadline()
        if deadline is not None and deadline <= self.sim.clock.now:
            self.handle(events.TimePassed())
        if not self.paused:
            self._arm()

    def _do(self, action: events.Action) -> None:
        match action:
            case events.StartWorker(worker):
                self.sim.ordered(action)
                self._meet(pool_events.StartOrdered(Start(worker, [], {}, "")))
            case events.KillWorker(worker):
                self.sim.ordered(action)
                self._meet(pool_events.KillOrdered(worker))
            case events.DumpStacks(worker):
                self.sim.ordered(action)
                self._send_to_agent(self.pool.agent_of(worker.host), Dump(worker))
            case events.ProbeWorkers(workers):
                hosts: dict[str, list[Worker]] = {}
                for worker in workers:
                    hosts.setdefault(worker.host, []).append(worker)
                for host, there in hosts.items():
                    self._send_to_agent(self.pool.agent_of(host), Probe(there))
                # Ask only these members to locate their ranks; the others would only report their script lines.
                asked = self.membership.worlds.signs.asked
                self._send([each for each in workers if each in asked], messages.Locate())
            case events.MeasureBandwidth(host, peer):
                self._meet(pool_events.BandwidthOrdered(host, peer))
            case events.GiveUpHost(host, reason):
                self._meet(pool_events.GiveUpOrdered(host, str(reason)))
            case events.BreakWorld(generation, members, reason):
                self._send(members, messages.Broken(generation, str(reason)))
            case events.PublishWorld(generation, members, store, holders, commit, reason):
                copies = copy_groups([each.worker for each in members], holders)
                place, why = members[0].place, str(reason)
                world = messages.World(
                    generation,
                    place,
                    store,
                    holders,
                    commit,
                    why,
                    copies=copies,
                    metadata=action.metadata,
                    source=action.source,
                )
                self._tell_mergers([each.worker for each in members], world)
                for member in members:
                    self._send([member.worker], msgspec.structs.replace(world, place=member.place))
            case events.TellWorld(generation, member, store, holders, commit, reason):
                world = messages.World(
                    generation,
                    member.place,
                    store,
                    holders,
                    commit,
                    str(reason),
                    copies=action.copies,
                    metadata=action.metadata,
                    source=action.source,
                )
                self._tell_mergers([member.worker], world)
                self._send([member.worker], world)
            case events.WelcomeWorker(worker, place, newcomer, elastic):
                self._send([worker], messages.Welcome(place, newcomer, elastic))
            case events.PrepareChange(generation, change, members):
                self._send(members, messages.Prepare(generation, change))
            case events.StopMembersAt(generation, change, check, members):
                self._send(members, messages.StopAt(generation, change, check))
            case events.CallOffChange(generation, change, members):
                self._send(members, messages.Proceed(generation, change))
            case events.LetGo(worker, reason):
                self._send([worker], messages.Leave(str(reason)))
            case events.RejectWorker(worker):
                raise AssertionError(
                    f"{worker} was rejected, although the states of all workers have the same layout"
                )
            case events.FinishWorld(generation, members):
                self._send(members, messages.Finish(generation))
            case events.EndJob(code, reason):
                if self.end is None:
                    self.ended_at = self.sim.clock.now
                self.end = action
                if code:
                    self._send([*self._workers], messages.End(str(reason)))

    def _leave(self) -> None:
        if self.up:
            self.up, self.gone = False, True
            self.sim.network.driver_disconnected()

    # ---- its server ------------------------------------------------------------------------------------------------

    def can_accept(self) -> bool:
        return self.up and not self.paused

    def accept(self, connection: Connection, worker: Worker) -> None:
        connection.worker = worker
        self._workers[worker] = connection

    def receive(self, connection: Connection, worker: Worker, message: Message) -> None:
        """Handle a worker's message, which may come from its current connection or from a lost one."""
        if not self.sim.merges or self._workers.get(worker) is not connection:
            self.handle(event_of(worker, message))
            return
        merger = self._mergers.setdefault(worker.host, ReportMerger(HOLD_S))
        alarm = merger.flush_at
        self._relay(merger.received(worker, message, self.sim.clock.now))
        if merger.flush_at is not None and merger.flush_at != alarm:
            self.sim.clock.at(merger.flush_at, self._flush, merger, merger.flush_at)

    def _flush(self, merger: ReportMerger, alarm: float) -> None:
        if merger.flush_at == alarm:
            self._relay(merger.flush())

    def _relay(self, relayed: Sequence[Relayed]) -> None:
        for message in relayed:
            match message:
                case Heard(worker, heard):
                    self.handle(event_of(worker, heard))
                case HeardTogether(event):
                    self.handle(event)

    def _tell_mergers(self, workers: Sequence[Worker], message: Message) -> None:
        """Notify the agents' mergers of a message to these workers."""
        if not self.sim.merges:
            return
        hosts: dict[str, list[Worker]] = {}
        for worker in workers:
            hosts.setdefault(worker.host, []).append(worker)
        for host, local in hosts.items():
            flushed = self._mergers.setdefault(host, ReportMerger(HOLD_S)).sent(local, message)
            if flushed:
                # An agent's messages arrive later, when the driver has performed its pending actions.
                self.sim.clock.after(0.0, self._relay, flushed)

    def _worker_gone(self, worker: Worker) -> None:
        if worker.host in self._mergers:
            self._relay(self._mergers[worker.host].gone(worker))

    def lost(self, connection: Connection, silent: bool) -> None:
        if not self.up:
            return
        worker = connection.worker
        if worker is not None:
            if self._workers.get(worker) is not connection:
                return  # a newer connection of the worker has already replaced this one
            del self._workers[worker]
            self._worker_gone(worker)
            self.handle(events.WorkerDisconnected(worker, silent))
            return
        for agent, present in self._agents.items():
            if present is connection:
                del self._agents[agent]
                self._meet(pool_events.AgentDisconnected(agent, silent))
                return

    def _send(self, workers: list[Worker], message: Message) -> None:
        if not isinstance(message, messages.World):
            self._tell_mergers(workers, message)
        for worker in workers:
            connection = self._workers.get(worker)
            process = self.sim.processes.get(worker)
            if connection is not None and process is not None:
                connection.send(OUTWARD, process.receive, message)

    # ---- agents ----------------------------------------------------------------------------------------------------

    def _new_pool(self) -> AgentPool:
        self._term += 1
        attach = Attach("job", self._term, self.settings.lease_s, GIVE_UP_S)
        starts_agents = self.sim.weather.starts_agents
        return AgentPool(attach, starts_agents=starts_agents, adopted=[*self.membership.roster])

    def listed(self, hosts: dict[str, int]) -> None:
        """Handle a new list of hosts from discovery."""
        event = events.HostsChanged(dict(hosts), self.sim.fixed_hosts)
        self._meet(event)
        self.handle(event)

    def agent_called(self, connection: Connection, agent: AgentId) -> None:
        """Accept a connection of an agent. If the agent already has an open connection, the new one replaces it."""
        self._agents[agent] = connection
        self._meet(pool_events.AgentConnected(agent))

    def agent_message(self, connection: Connection, agent: AgentId, message: AgentMessage) -> None:
        """Handle an agent's message.

        Messages from a lost connection are handled as well, except reports of running workers.
        """
        if not self.up or (isinstance(message, Registered) and connection.over):
            return
        match message:
            case Registered(exits=exits):
                for event in exits:
                    self._final_messages(event)
            case Seen(events.WorkerExited() as event):
                self._final_messages(event)
        self._meet(pool_events.AgentMessageReceived(agent, message))

    def _final_messages(self, event: events.WorkerExited) -> None:
        mine = self._workers.pop(event.worker, None)
        if mine is not None and not self.sim.clock.chance(self.sim.weather.early_exits):
            mine.flush(INWARD)
        self._worker_gone(event.worker)

    def _meet(self, event: pool_events.PoolEvent) -> None:
        if not self.up:
            return
        if self.paused:
            self._backlog.append(partial(self._meet, event))
            return
        pool = self.pool
        for action in pool.handle(event, self.sim.clock.now):
            if not self.up or pool is not self.pool:
                return  # Stop here: the driver crashed while it performed the previous action.
            self._carry_out(action)
        self._arm_pool()

    def _carry_out(self, action: pool_events.PoolAction) -> None:
        match action:
            case pool_events.SendToAgents(agents, messages):
                for agent in agents:
                    for message in messages:
                        self._send_to_agent(agent, message)
            case pool_events.PostToDriver(event):
                self.handle(event)
            case pool_events.DisconnectAgent(agent):
                connection = self._agents.pop(agent, None)
                if connection is not None:
                    connection.break_off(notify_driver=False)
                    self._meet(pool_events.AgentDisconnected(agent, False))
            case pool_events.StartAgent(host):
                takes_s = self.sim.clock.between(*AGENT_STARTS_S)
                self.sim.clock.after(takes_s, self._start_agent, self.pool, host)

    def _send_to_agent(self, agent: AgentId | None, message: AgentMessage) -> None:
        if agent is None or isinstance(message, Beat):
            # No action is needed, because the simulated network detects missing acknowledgements itself.
            return
        connection = self._agents.get(agent)
        if connection is not None:
            connection.send(OUTWARD, self.sim.agents[agent.host].receive, message)

    def _start_agent(self, pool: AgentPool, host: str) -> None:
        if not self.up or pool is not self.pool:
            return
        if self.sim.agents[host].lost or self.sim.network.is_cut(host):
            self._meet(pool_events.AgentNotStarted(host, "no route to this host"))
        else:
            self.sim.agents[host].restart()
            self._meet(pool_events.AgentStarted(host))

    def _arm_pool(self) -> None:
        at = self.pool.next_deadline() if self.up else None
        if at is not None and at != self._pool_alarm:
            self._pool_alarm = at
            self.sim.clock.at(at, self._ring_pool, at)

    def _ring_pool(self, alarm: float) -> None:
        if alarm == self._pool_alarm and not self.paused:
            self._pool_alarm = None
            self._meet(events.TimePassed())

    # ---- faults ----------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        if not self.up:
            return
        self.up = self.paused = False
        self.crashes += 1
        self._backlog.clear()
        self._mailbox.clear()
        self._workers, self._agents = {}, {}
        for merger in self._mergers.values():
            merger.reset()
        self._alarm = self._pool_alarm = None
        self.sim.network.driver_disconnected()
        self.sim.clock.after(self.down_s, self.restart)

    def restart(self) -> None:
        """Restart the driver from its journal."""
        if self.gone:
            return
        self.up = True
        self.membership = rebuilt(self.entries, Membership(self.settings))
        self.decisions = self._new_decisions()
        self.leaves = False
        self.pool = self._new_pool()
        self._meet(pool_events.DriverReady())
        self.handle(events.DriverRestarted())
        self.listed(self.sim.listed)

    def pause(self) -> None:
        self.paused = True

    def wake(self) -> None:
        if not self.paused:
            return
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for handle in backlog:
            handle()
        self._ring(self._alarm) if self._alarm is not None else self._arm()
        if self._pool_alarm is not None:
            self._ring_pool(self._pool_alarm)
