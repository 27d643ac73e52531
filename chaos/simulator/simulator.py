"""Simulation of a whole job on a virtual clock, with the real Membership, AgentPool and Recovery.

Runs with the same seed are identical.

The job consists of a driver, an agent on each host, and workers. The network between them can delay, lose and
duplicate messages, and partition hosts. In the first phase, faults are injected, and only safety is checked: after
every event, the invariants must hold and training must be correct. In the second phase, partitions heal, frozen
processes resume and crashed ones restart. Within LIVENESS_S, the job must then train to its end or end with a reason.
No real clock, process, socket or thread is used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from elastic.chaos.invariants.invariants import Invariants
from elastic.chaos.simulator import simulated_faults
from elastic.chaos.simulator.interface import Agent
from elastic.chaos.simulator.simulated_agent import SimulatedAgent
from elastic.chaos.simulator.simulated_driver import BEAT_S, SimulatedDriver
from elastic.chaos.simulator.simulated_faults import Fault, FaultConditions
from elastic.chaos.simulator.simulated_network import SimulatedNetwork
from elastic.chaos.simulator.simulated_shards import ShardedJob, ShardedWorker
from elastic.chaos.simulator.simulated_training import Training
from elastic.chaos.simulator.simulated_worker import SimulatedWorker
from elastic.chaos.simulator.virtual_clock import Clock
from elastic.driver.events import (
    Action,
    DumpStacks,
    Event,
    KillWorker,
    PublishWorld,
    Report,
    StartWorker,
)
from elastic.driver.journal.entries import readable_lines
from elastic.driver.journal.file_journal import FileJournal
from elastic.driver.reasons import Reason, ReasonKind
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker

FAULTS_S = 12.0  # virtual seconds during which faults are injected
# virtual seconds after the last fault within which the job and all of its processes must end
LIVENESS_S = 400.0
SLOTS = 2  # number of slots per host


@dataclass
class Outcome:
    """Outcome of a simulated job."""

    code: int
    reason: Reason
    generation: int
    virtual_s: float
    faults: list[str] = field(default_factory=list)
    happened: int = 0  # number of processed events
    messages: int = 0
    crashes: int = 0  # number of crashes of the driver
    # number of processes killed or frozen, by the name of the place at which they had yielded
    places: Counter[str] = field(default_factory=Counter)


class Violation(AssertionError):
    """Error raised when an invariant is violated. The message contains the seed and the latest events."""


def settings_for(
    workers: int,
    standbys: int = 0,
    *,
    silence_s: float = Settings.lease_s,
    starting_max: int | None = None,
    restarts: int | None = None,
    health_check: bool = False,
    replace_stragglers: bool = False,
) -> Settings:
    """Return settings with timeouts that are short enough to detect stuck workers during a run."""
    return Settings(
        np=workers,
        workers_min=min(2, workers),
        workers_max=workers,
        standbys=standbys,
        starting_max=starting_max,
        elastic=True,
        start_timeout_s=30.0,
        elastic_timeout_s=60.0,
        cooldown_max_s=8.0,
        leave_s=10.0,
        restarts=restarts,
        health_check="auto" if health_check else None,
        health_check_s=5.0,
        replace_stragglers=replace_stragglers,
        judge_scripts=True,
        silence_s=silence_s,
        idle_s=9.0,
        busy_warning_s=6.0,
        busy_s=30.0,
        gpu_hang_s=3.0,
        gpu_limit_s=40.0,
    )


class Simulation:
    """One simulated job: its driver, agents, workers and network.

    Args:
        faults: number of injected faults.
        mild: whether the faults always leave workers that hold the newest commit and can continue.
    """

    def __init__(
        self,
        seed: int,
        *,
        workers: int = 5,
        steps: int = 200,
        faults: int = 8,
        mild: bool = False,
        weather: FaultConditions | None = None,
        slots: int = SLOTS,
        standbys: int = 0,
        step_s: float = 0.0,
        faults_s: float = FAULTS_S,
        keep_journal: bool = True,
        silence_s: float = Settings.lease_s,
        starting_max: int | None = None,
        restarts: int | None = None,
        sharded: ShardedJob | None = None,
        fixed_hosts: bool = False,
        health_check: bool = False,
        replace_stragglers: bool = False,
        verify: float = 0.0,
    ) -> None:
        self.seed = seed
        self.verify = verify
        self.named: set[Worker] = set()
        self.excused: set[Worker] = set()
        self.throttled: set[Worker] = set()
        self.sharded = sharded
        self.workers = workers
        self.steps = steps
        self.mild = mild
        # If positive, one event advances all members by one step every ``step_s`` virtual seconds.
        self.step_s = step_s
        self.keep_journal = keep_journal
        # drawn without random numbers, which would change all other faults of the seed
        self.merges = seed % 4 >= 2
        self.has_metadata = seed % 4 == 1
        self.faults_s = faults_s
        self.weather = weather or FaultConditions.drawn(seed, mild=mild)
        # Do not check samples if reports can be lost, because they are not repeated on a new connection, or if the
        # state is sharded, because a commit may then be restored although no rank has reported it.
        self.reports_samples = not self.weather.loses_messages and sharded is None
        self.settings = settings_for(
            workers,
            standbys,
            silence_s=silence_s,
            starting_max=starting_max,
            restarts=restarts,
            health_check=health_check,
            replace_stragglers=replace_stragglers,
        )
        self.clock = Clock(seed)
        self.network = SimulatedNetwork(self.clock, self.weather.network)
        self.network.conditions.lease_s = self.settings.lease_s
        wanted = workers + standbys
        self.hosts = {f"h{n}": slots for n in range((wanted + slots - 1) // slots)}
        self.listed = self.hosts  # number of slots of each host in the current host list
        self.fixed_hosts = fixed_hosts
        self.processes: dict[Worker, SimulatedWorker] = {}  # live workers
        self.training = Training(self)
        self.driver = SimulatedDriver(self)
        self.network.driver = self.driver
        self.agents = {host: SimulatedAgent(self, host) for host in self.hosts}
        self.invariants: Invariants | None = Invariants(self.settings)
        self.faults: list[str] = []  # descriptions of the injected faults
        self.places: Counter[str] = Counter()
        self.calmed = False  # whether the phase with faults has ended
        self.aimed = 0  # number of kills to schedule at the next commits
        self.going_on = True
        at = self.clock.at
        for agent in self.agents.values():
            if agent.alive:
                at(0.0, agent.link.open)
        at(0.5, self.list_hosts, self.hosts)
        at(0.3, self._beat)
        # Omit `stick`: workers in lockstep report no collectives, so a stuck worker would not be detected.
        kinds = [
            kind for kind in self.weather.faults if not (step_s and kind is simulated_faults.stick)
        ]
        if kinds:
            for _ in range(faults):
                at(self.clock.between(0.2, faults_s), self._inject, kinds)
        at(faults_s, self.calm)

    # ---- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run until the job and all its processes have ended.

        Raises:
            Violation: an invariant is broken, or the job or one of its processes has not ended in time.
        """
        try:
            self.clock.run(self.faults_s + LIVENESS_S, over=self._over)
            end = self.driver.end
            assert end is not None, (
                f"the job did not end within {LIVENESS_S:g} s after the faults had stopped; workers: "
                + ", ".join(f"{p.worker} at {p.point!r}" for p in self.processes.values())
            )
            assert self.driver.gone, (
                f"the job has ended, and its driver awaits {self.driver.decisions.running}"
            )
            left = ", ".join(f"{p.worker} at {p.point!r}" for p in self.processes.values())
            assert not left, f"the job has ended, but these still run: {left}"
            if self.invariants is not None:
                self.invariants.finish()
        except AssertionError as error:
            raise Violation(f"seed {self.seed}: {error}\n{self.story(last=30)}") from error
        return Outcome(
            end.code,
            end.reason,
            len(self.training.worlds),
            self.driver.ended_at,
            self.faults,
            self.clock.happened,
            self.network.messages,
            self.driver.crashes,
            self.places,
        )

    def _over(self) -> bool:
        driver = self.driver
        if driver.gone and not self.processes:
            self.going_on = False
        return not self.going_on

    def story(self, last: int | None = None) -> str:
        """Return lines of text that describe the driver's events and actions, and the faults."""
        entries = self.driver.entries[-last if last else 0 :]
        since = entries[0].at if entries else 0.0
        faults = [f"fault: {fault}" for fault in self.faults]
        return "\n".join([*faults, f"from {since:.3f} s:", *readable_lines(entries, since=0.0)])

    def write_journal(self, path: Path) -> None:
        """Write the journal in the format of a real driver."""
        journal = FileJournal.begin(path, self.settings)
        for entry in self.driver.entries:
            journal.append(entry)
        journal.close()

    # ---- environment -----------------------------------------------------------------------------------------------

    def note(self, fault: str) -> None:
        self.faults.append(f"{self.clock.now:.3f} {fault}")

    def list_hosts(self, hosts: dict[str, int]) -> None:
        self.listed = hosts
        self.driver.listed(hosts)

    def _inject(self, kinds: list[Fault]) -> None:
        self.clock.random.choice(kinds)(self)

    def _beat(self) -> None:
        for agent in self.agents.values():
            agent.beat()
        if self.going_on:
            self.clock.after(BEAT_S, self._beat)

    def heal(self, host: str) -> None:
        self.network.heal(host)
        self.training.heal(host)

    def lose_host(self, host: str) -> None:
        """Disconnect a host without closing its connections or notifying any process."""
        agent = self.agents[host]
        agent.lost = True
        self.network.cut(host, 0, 1)
        self.training.cut(host)
        agent.crash()

    def calm(self) -> None:
        """End the phase with faults. Workers that were fenced because of a fault do not return."""
        self.calmed = True
        self.weather.struck = 0.0
        self.aimed = 0
        self.network.slow.clear()
        self.driver.doom = None
        self.driver.wake()
        for process in list(self.processes.values()):
            process.strike = None
            process.thaw()
        for agent in self.agents.values():
            self.heal(agent.host)
            if agent.lost:
                agent.announce(None)  # the notice was for the lost machine; this is its replacement
            agent.lost = False
            agent.thaw()
            if not self.weather.starts_agents:
                agent.restart()
        self.list_hosts(self.hosts)

    # ---- notifications ---------------------------------------------------------------------------------------------

    def process(self, agent: Agent, worker: Worker) -> SimulatedWorker:
        kind = SimulatedWorker if self.sharded is None else ShardedWorker
        return kind(self, agent, worker)

    def born(self, process: SimulatedWorker) -> None:
        if self.clock.chance(self.weather.struck) and not self.mild:
            frozen_s = self.clock.random.choice((0.0, 0.0, 5.0))
            process.strike = (self.clock.random.randint(1, 12), frozen_s)

    def struck(self, process: SimulatedWorker) -> None:
        self.places[process.point] += 1
        self.note(f"fault injected into {process.worker} at {process.point!r}")

    def labelled(self, process: SimulatedWorker) -> None:
        self.training.labelled(process)

    def commits(self, process: SimulatedWorker) -> None:
        """Schedule kills for the moment when some workers have committed and others have not."""
        if self.aimed:
            self.aimed -= 1
            self.clock.after(self.clock.between(0.0, 0.02), simulated_faults.kill_one, self)

    def ordered(self, action: StartWorker | KillWorker | DumpStacks) -> None:
        """Check an order to an agent: the driver must not kill a worker without a fault.

        A worker without a fault may be slow, in a long phase, or waiting for another worker's GPU.
        """
        if isinstance(action, KillWorker):
            process = self.processes.get(action.worker)
            why = action.reason.kind
            hung = why in (ReasonKind.GPU_FAILED, ReasonKind.GPU_HANGS, ReasonKind.GPU_BEHIND)
            assert why is not ReasonKind.REPLACED, f"{action.worker} is killed, which was only slow"
            assert not hung or process is None or process.gpu_hangs, (
                f"{action.worker} is killed, whose GPU is sound: {action.reason}"
            )
            assert why is not ReasonKind.MISCOMPUTED or process is None or process.wrong_passes, (
                f"{action.worker} is killed, whose gradients were right: {action.reason}"
            )
            if why is ReasonKind.MISCOMPUTED:
                self.named.add(action.worker)
            blamed = why in (ReasonKind.IDLE, ReasonKind.BUSY)
            assert not (blamed and process is not None and process.innocent), (
                f"{action.worker} is killed at {process and process.point!r}: {action.reason}"
            )

    def decided(self, event: Event, actions: list[Action], *, more: bool = False) -> None:
        """Check each of the driver's decisions before it is carried out."""
        if self.invariants is not None:
            self.invariants.saw(self.clock.now, event, actions, more=more)
        if not self.step_s and not more:
            # check() examines every worker, which takes long in a large job.
            self.driver.membership.check()
        for action in actions:
            if isinstance(action, PublishWorld):
                self.training.published(action)
            about = action.about if isinstance(action, Report) else None
            back = (ReasonKind.WENT_BACK, ReasonKind.NOT_WENT_BACK)
            if about is not None and about.kind in back and not about.facts.get("whole"):
                self.excused |= {w for w in self.named if str(w) == about.facts["worker"]}
