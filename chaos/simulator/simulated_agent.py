"""Simulated agent that starts, monitors, probes and kills the workers of its host. It runs on the virtual clock.

There is one agent per host. It sends the messages of a real agent (`elastic.driver.agents.messages`). When a driver
connects, the agent reports which workers run and which have exited, because messages of an earlier connection may be
lost. Afterwards it reports every exit and sends heartbeats. If the agent dies, its workers die as well, so a restarted
agent has no workers.
"""

from __future__ import annotations

from elastic.chaos.simulator.interface import SimulatedJob
from elastic.chaos.simulator.simulated_network import Connection, SimulatedLink
from elastic.chaos.simulator.simulated_worker import GIVE_UP_S, SimulatedWorker
from elastic.driver.agents import messages
from elastic.driver.events import (
    BandwidthMeasured,
    HealthOutcome,
    Notice,
    WorkerExited,
    WorkerFrozen,
    WorkerHealthChecked,
    WorkerProbed,
    WorkerThawed,
)
from elastic.driver.processes.liveness_timeouts import LivenessTimeouts
from elastic.protocol.messages import Address, Worker

SAMPLE_S = 0.25
# unsuccessful outcomes of simulated health checks
OUTCOMES = (HealthOutcome.FAILED, HealthOutcome.TIMED_OUT, HealthOutcome.WRONG_RESULT)


class SimulatedAgent:
    """Simulated agent of one host."""

    def __init__(self, sim: SimulatedJob, host: str) -> None:
        self.sim = sim
        self.host = host
        self.identity = messages.AgentId(host, 1)
        # Agents run from the beginning of the simulation unless the driver starts them on demand.
        self.alive = not sim.weather.starts_agents
        self.frozen = False
        self.lost = False  # whether the machine is lost permanently
        # end of the latest short freeze or network cut; another one immediately afterwards would not be harmless
        self.quiet_until = float("-inf")
        self.processes: dict[Worker, SimulatedWorker] = {}
        # current preemption notice; `_ends_at` is the time of the preemption
        self._notice: Notice | None = None
        self._ends_at = 0.0
        self.link = self._new_link()
        self._exits: dict[Worker, WorkerExited] = {}
        # results of the health checks of running workers
        self._checked: dict[Worker, WorkerHealthChecked] = {}
        self._leases: LivenessTimeouts[Worker] = LivenessTimeouts(sim.settings.lease_s)
        self._watching = False
        # messages that were received while the agent was frozen
        self._mail: list[messages.AgentMessage] = []
        self._reported_frozen: set[Worker] = set()

    def _new_link(self) -> SimulatedLink:
        return SimulatedLink(
            self.sim.network,
            self.host,
            opened=self._opened,
            gave_up=self.crash,
            give_up_s=GIVE_UP_S,
        )

    def _opened(self, connection: Connection) -> None:
        self.sim.driver.agent_called(connection, self.identity)

    def _attached(self) -> None:
        exits = [*self._exits.values()]
        self.send(messages.Registered(0, "", [], [*self.processes], exits, notice=self.notice))
        for checked in self._checked.values():
            self.send(messages.Seen(checked))
        for worker in self._reported_frozen:
            self.send(messages.Seen(WorkerFrozen(worker, "stopped")))

    def send(self, message: messages.AgentMessage) -> None:
        self.link.send(self.sim.driver.agent_message, self.identity, message)

    def beat(self) -> None:
        """Send a heartbeat to the driver."""
        connection = self.link.connection
        if connection is not None and self.alive and not self.frozen:
            connection.beat(self.sim.driver.agent_message, self.identity, messages.Here())

    # ---- orders ----------------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, message: messages.AgentMessage) -> None:
        if connection is not self.link.connection or not self.alive:
            # ignore an order from an earlier driver, or to an earlier incarnation of this agent
            return
        if self.frozen:
            self._mail.append(message)
        else:
            self._obey(message)

    def _obey(self, message: messages.AgentMessage) -> None:
        clock = self.sim.clock
        match message:
            case messages.Attach():
                self._attached()
            case messages.Start(worker):
                if worker in self.processes or worker in self._exits:
                    return
                if worker.incarnation > 1 and clock.chance(0.02):
                    self._exited(WorkerExited(worker, 127, reason="no such program"))
                    return
                process = self.sim.process(self, worker)
                self.processes[worker] = self.sim.processes[worker] = process
                self.sim.born(process)
                clock.after(clock.between(0.0, 0.1), process.begin)
                if self.sim.settings.health_check:
                    self._check_health(worker)
            case messages.Kill(worker):
                clock.after(clock.between(0.0, 0.01), self.kill, worker)
            case messages.Probe(workers):
                for worker in workers:
                    found = self.processes.get(worker)
                    if found is not None:
                        state = "T" if found.frozen else "S"
                        self.send(
                            messages.Seen(WorkerProbed(worker, found.reports.cpu_s(), 0, state))
                        )
            case messages.ServeBandwidth(caller):
                address = None if clock.chance(0.05) else Address("10.0.0.1", 1)
                trouble = "" if address else "out of ports"
                self.send(messages.BandwidthServed(caller, address, trouble))
            case messages.CallForBandwidth(peer):
                event = BandwidthMeasured(self.host, peer, *self._bandwidth())
                clock.after(clock.random.choice((0.2, 0.2, 3.0)), self._found_bandwidth, event)
            case messages.Detach() | messages.Reject():
                self.crash()
            case _:
                pass

    def _check_health(self, worker: Worker) -> None:
        """Begin a simulated health check with a random outcome and duration.

        After the phase with faults, every check passes.
        """
        clock, limit_s = self.sim.clock, self.sim.settings.health_check_s
        code: int | None = 0
        outcome = HealthOutcome.PASSED
        if not self.sim.calmed and clock.chance(0.4):
            outcome = clock.random.choice([*OUTCOMES])
            code = 3 if outcome is HealthOutcome.WRONG_RESULT else 1
        took_s = clock.random.choice((0.05, 0.5, 3.0))
        if outcome is HealthOutcome.TIMED_OUT:
            took_s, code = limit_s, None
        if outcome is not HealthOutcome.PASSED:
            self.sim.note(f"health check of {worker}: {outcome.value}")
        clock.after(took_s, self._ends_check, WorkerHealthChecked(worker, outcome, code))

    def _ends_check(self, event: WorkerHealthChecked) -> None:
        if self.frozen:
            self.sim.clock.after(SAMPLE_S, self._ends_check, event)
        elif self.alive and event.worker in self.processes:
            self._checked[event.worker] = event
            self.send(messages.Seen(event))

    def _bandwidth(self) -> tuple[float, float]:
        """Return the bytes per second sent and received. Some hosts are slow until the phase with faults has ended."""
        clock = self.sim.clock
        sent, received = clock.between(5e7, 1e8), clock.between(5e7, 1e8)
        if not self.sim.calmed and clock.chance(0.3):
            self.sim.note(f"low bandwidth of {self.host}")
            return (sent, 1e6) if clock.chance(0.5) else (1e6, received)
        return sent, received

    def _found_bandwidth(self, event: BandwidthMeasured) -> None:
        if self.alive and not self.frozen:
            self.send(messages.BandwidthFound(event))

    def kill(self, worker: Worker) -> None:
        """Kill the process with SIGKILL. This also ends frozen processes."""
        if worker in self.processes:
            self.processes[worker].die(-9)

    # ---- observations ----------------------------------------------------------------------------------------------

    def reaped(self, process: SimulatedWorker, code: int) -> None:
        """Handle the exit of a worker process with the given exit code."""
        worker = process.worker
        self.processes.pop(worker, None)
        self.sim.processes.pop(worker, None)
        self._leases.drop(worker)
        self._checked.pop(worker, None)
        self._reported_frozen.discard(worker)
        if self.alive:
            event = WorkerExited(worker, code)
            self.sim.clock.after(self.sim.clock.between(0.0, 0.02), self._exited, event)

    def _exited(self, event: WorkerExited) -> None:
        if self.frozen:
            self.sim.clock.after(SAMPLE_S, self._exited, event)
        elif self.alive:
            self._exits[event.worker] = event
            self.send(messages.Seen(event))

    def watch(self) -> None:
        """Start sampling whether the workers can run.

        No samples are taken while all workers can run, because these samples would only renew liveness timeouts.
        """
        if not self._watching:
            self._watching = True
            now = self.sim.clock.now
            for worker in self.processes:
                self._leases.grant(worker, now)
            self.sim.clock.after(SAMPLE_S, self._sample)

    def _sample(self) -> None:
        now = self.sim.clock.now
        if not self.alive:
            self._watching = False
            return
        if not self.frozen:
            for worker, process in self.processes.items():
                if worker not in self._leases:
                    self._leases.grant(worker, now)
                elif not process.frozen and self._leases.renew(worker, now):
                    self._reported_frozen.discard(worker)
                    self.send(messages.Seen(WorkerThawed(worker)))
            for worker in self._leases.expired(now):
                self._reported_frozen.add(worker)
                self.send(messages.Seen(WorkerFrozen(worker, "stopped")))
        self._watching = bool(self._reported_frozen) or any(
            p.frozen for p in self.processes.values()
        )
        if self._watching:
            self.sim.clock.after(SAMPLE_S, self._sample)

    @property
    def notice(self) -> Notice | None:
        """Return the current preemption notice, with the remaining time."""
        if self._notice is None or self._notice.within_s is None:
            return self._notice
        left_s = max(0.0, self._ends_at - self.sim.clock.now)
        return Notice(self._notice.text, left_s)

    def announce(self, notice: Notice | None) -> None:
        """Announce the preemption of the machine, or withdraw the announcement if ``notice`` is None."""
        self._notice = notice
        if notice is not None and notice.within_s is not None:
            self._ends_at = self.sim.clock.now + notice.within_s
        if self.alive:
            self.send(messages.Announced(notice))

    # ---- faults ----------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Simulate the death of the agent and of its workers."""
        if not self.alive:
            return
        self.alive = self.frozen = False
        self._mail.clear()
        self._exits.clear()
        for process in list(self.processes.values()):
            process.die(-9)
        self._leases = LivenessTimeouts(self.sim.settings.lease_s)
        self._reported_frozen.clear()
        # a lost machine does not close its connections
        if self.link.connection is not None and not self.lost:
            self.link.connection.break_off()
        self.link.closed = True

    def restart(self) -> None:
        if not self.alive and not self.lost:
            # The machine has restarted, so its old connection is lost.
            if self.link.connection is not None:
                self.link.connection.break_off()
            self.alive = True
            self.identity = messages.AgentId(self.host, self.identity.incarnation + 1)
            self.link = self._new_link()
            self.link.open()

    def freeze(self) -> None:
        self.frozen = self.link.asleep = True

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            mail, self._mail = self._mail, []
            for message in mail:
                self._obey(message)
            self.link.wake()
