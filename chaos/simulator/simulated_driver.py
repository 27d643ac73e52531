"""A driver on the virtual clock: the real Membership under a model of its loop, its server and its journal.

Every event is written to the journal, with the actions that it led to, before anything is done about it. The driver
can crash wherever it gives up control: before an event is written, or between any two actions. Restarted, it feeds its
journal to a new Membership and goes on from there: it knows what it decided, and not what was done of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from elastic.chaos.simulator.interface import Command, SimulatedJob
from elastic.chaos.simulator.simulated_network import INWARD, OUTWARD, Connection
from elastic.driver.events import (
    Action,
    BreakWorld,
    CallOffChange,
    DriverRestarted,
    DumpStacks,
    EndJob,
    Event,
    FinishWorld,
    HostLost,
    HostReported,
    HostsChanged,
    KillWorker,
    LetGo,
    PrepareChange,
    ProbeWorkers,
    PublishWorld,
    RejectWorker,
    StartWorker,
    StopMembersAt,
    TellWorld,
    TimePassed,
    WelcomeWorker,
    WorkerDisconnected,
    WorkerExited,
)
from elastic.driver.journal.journal import Entry, rebuilt
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.worker_messages import event_of
from elastic.driver.processes.leases import Leases
from elastic.driver.reasons import Why, because
from elastic.protocol import messages
from elastic.protocol.messages import Message, Worker

LOOK_S = 0.5  # between two looks at the leases of hosts
BEAT_S = 0.9  # between two heartbeats of one host
ARM_S = 0.001
LAST_S = 2.0  # from the last kills to the end of the driver's process


class SimulatedDriver:
    """One job's."""

    def __init__(self, sim: SimulatedJob) -> None:
        self.sim = sim
        self.settings = sim.settings
        self.membership = Membership(sim.settings)
        self.entries: list[Entry] = []
        self.up = True
        self.gone = False  # it has ended, with the job
        self.paused = False
        self.end: EndJob | None = None
        self.ended_at = 0.0
        self.doom: int | None = (
            None  # crashes at the n-th place from here where it gives up control
        )
        self.down_s = 1.0
        self.crashes = 0
        self._workers: dict[Worker, Connection] = {}
        self._agents: dict[str, Connection] = {}
        self._hosts: Leases[str] = Leases(sim.settings.lease_s)
        self._backlog: list[Callable[[], None]] = []  # while it is frozen
        self._alarm: float | None = None
        self._looking = False
        self._arming = False

    # ---- its loop --------------------------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        if not self.up or self._dies():
            return
        if self.paused:
            self._backlog.append(partial(self.hear, event))
            return
        now = self.sim.clock.now
        actions = self.membership.handle(event, now)
        if self.sim.keep_journal:
            self.entries.append(Entry(now, event, actions))
        self.sim.decided(event, actions)
        for action in actions:
            if self._dies():
                return
            self._do(action)
        self._dies()
        if not self.sim.step_s:
            self._arm()
        elif not self._arming:
            # As the real loop: once for all that has come together.
            self._arming = True
            self.sim.clock.after(ARM_S, self._arm)

    def _dies(self) -> bool:
        """One place where it gives up control."""
        if self.doom is not None and self.up:
            self.doom -= 1
            if self.doom <= 0:
                self.doom = None
                self.crash()
        return not self.up

    def _arm(self) -> None:
        self._arming = False
        deadline = self.membership.next_deadline() if self.up else None
        if deadline is not None and (self._alarm is None or deadline < self._alarm):
            self._alarm = deadline
            self.sim.clock.at(deadline, self._ring, deadline)

    def _ring(self, alarm: float) -> None:
        if alarm != self._alarm:
            return
        self._alarm = None
        if not self.up:
            return
        deadline = self.membership.next_deadline()
        if deadline is not None and deadline <= self.sim.clock.now:
            self.hear(TimePassed())
        if not self.paused:
            self._arm()

    def _do(self, action: Action) -> None:
        match action:
            case StartWorker(worker) | KillWorker(worker) | DumpStacks(worker):
                self.sim.ordered(action)
                self._command(worker.host, action)
            case ProbeWorkers(workers):
                hosts: dict[str, list[Worker]] = {}
                for worker in workers:
                    hosts.setdefault(worker.host, []).append(worker)
                for host, there in hosts.items():
                    self._command(host, ProbeWorkers(there))
            case BreakWorld(generation, members, reason):
                self._send(members, messages.Broken(generation, str(reason)))
            case PublishWorld(generation, members, store, holders, commit, reason):
                for member in members:
                    world = messages.World(
                        generation, member.place, store, holders, commit, str(reason)
                    )
                    self._send([member.worker], world)
            case TellWorld(generation, member, store, holders, commit, reason):
                world = messages.World(
                    generation, member.place, store, holders, commit, str(reason)
                )
                self._send([member.worker], world)
            case WelcomeWorker(worker, place, newcomer, elastic):
                self._send([worker], messages.Welcome(place, newcomer, elastic))
            case PrepareChange(generation, change, members):
                self._send(members, messages.Prepare(generation, change))
            case StopMembersAt(generation, change, check, members):
                self._send(members, messages.StopAt(generation, change, check))
            case CallOffChange(generation, change, members):
                self._send(members, messages.Proceed(generation, change))
            case LetGo(worker, reason):
                self._send([worker], messages.Leave(str(reason)))
            case RejectWorker(worker):
                raise AssertionError(f"{worker} was rejected, but all states have one layout")
            case FinishWorld(generation, members):
                self._send(members, messages.Finish(generation))
            case EndJob(code, reason):
                self._ends(action)
                if code:
                    self._send([*self._workers], messages.End(str(reason)))

    def _ends(self, action: EndJob) -> None:
        if self.end is None:
            self.ended_at = self.sim.clock.now
        self.end = action
        self.sim.clock.after(self.settings.leave_s, self._kill_all)

    def _kill_all(self) -> None:
        """Whoever is still there a while after the end. Then the driver ends too."""
        if self.up:
            for worker in list(self.sim.processes):
                self._command(worker.host, KillWorker(worker, because(Why.JOB_ENDED)))
            self.sim.clock.after(LAST_S, self._leave)

    def _leave(self) -> None:
        if self.up:
            self.up, self.gone = False, True
            self.sim.network.driver_gone()

    # ---- its server ------------------------------------------------------------------------------------------------

    def can_accept(self) -> bool:
        return self.up and not self.paused

    def accept(self, connection: Connection, worker: Worker) -> None:
        connection.worker = worker
        self._workers[worker] = connection

    def heard(self, connection: Connection, worker: Worker, message: Message) -> None:
        """What a worker said, on its present connection or on one that was lost."""
        self.hear(event_of(worker, message))

    def lost(self, connection: Connection, silent: bool) -> None:
        if not self.up:
            return
        worker = connection.worker
        if worker is not None:
            if self._workers.get(worker) is not connection:
                return  # it has another one already
            del self._workers[worker]
            self.hear(WorkerDisconnected(worker, silent))
        elif self._agents.get(connection.host) is connection:
            del self._agents[connection.host]

    def _send(self, workers: list[Worker], message: Message) -> None:
        for worker in workers:
            connection = self._workers.get(worker)
            process = self.sim.processes.get(worker)
            if connection is not None and process is not None:
                connection.send(OUTWARD, process.receive, message)

    # ---- agents ----------------------------------------------------------------------------------------------------

    def agent_found(self, connection: Connection, host: str, report: HostReported) -> None:
        """Commands go there only from now on: what the agent runs is known for sure."""
        if not self.up or connection.over:
            return
        if self.paused:
            self._backlog.append(partial(self.agent_found, connection, host, report))
            return
        self._agents[host] = connection
        self._hosts.grant(host, self.sim.clock.now)
        self._look_at_hosts()
        self.hear(report)

    def agent_said(self, connection: Connection, host: str, event: Event) -> None:
        if not self.up:
            return
        if isinstance(event, WorkerExited):
            # Usually everything that the process has said is heard first.
            mine = self._workers.get(event.worker)
            if mine is not None and not self.sim.clock.chance(self.sim.weather.early_exits):
                mine.flush(INWARD)
            self._workers.pop(event.worker, None)
        self.hear(event)

    def beaten(self, connection: Connection, host: str) -> None:
        if self._agents.get(host) is connection:
            self._hosts.renew(host, self.sim.clock.now)

    def _command(self, host: str, command: Command) -> None:
        connection = self._agents.get(host)
        agent = self.sim.agents.get(host)
        if connection is not None and agent is not None:
            connection.send(OUTWARD, agent.receive, command)

    def _look_at_hosts(self) -> None:
        if not self._looking:
            self._looking = True
            self.sim.clock.after(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = False
        if not self.up:
            return
        if not self.paused:
            for host in self._hosts.expired(self.sim.clock.now):
                connection = self._agents.pop(host, None)
                if connection is not None:
                    connection.break_off(tell_driver=False)
                self.hear(HostLost(host, f"no heartbeat for {self.settings.lease_s:g} s"))
        if self.sim.going_on:
            self._look_at_hosts()

    # ---- what befalls it -------------------------------------------------------------------------------------------

    def crash(self) -> None:
        if not self.up:
            return
        self.up = self.paused = False
        self.crashes += 1
        self._backlog.clear()
        self._workers, self._agents = {}, {}
        self._alarm = None
        self.sim.network.driver_gone()
        self.sim.clock.after(self.down_s, self.restart)

    def restart(self) -> None:
        """From the journal."""
        if self.gone:
            return
        self.up = True
        self.membership = rebuilt(self.entries, Membership(self.settings))
        self._hosts = Leases(self.settings.lease_s)
        self.sim.clock.after(self.settings.reconnect_s, self._expect_hosts)
        self.hear(DriverRestarted())
        self.hear(HostsChanged(self.sim.listed))

    def _expect_hosts(self) -> None:
        """Hosts that did not come back to a restarted driver are lost like others."""
        if self.up:
            for host in {worker.host for worker in self.membership.roster}:
                if host not in self._hosts:
                    self._hosts.grant(host, self.sim.clock.now)
            self._look_at_hosts()

    def pause(self) -> None:
        self.paused = True

    def wake(self) -> None:
        if not self.paused:
            return
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for hear in backlog:
            hear()
        self._ring(self._alarm) if self._alarm is not None else self._arm()
