"""Faults of a simulation. Each fault is a function that chooses its victims with the random generator of the run.

``MILD`` faults always leave workers that hold the newest commit and can continue, so the job must succeed. A run does
not use all kinds of faults. Its seed determines the kinds, their frequencies and the quality of the network. Such
runs find more bugs than runs with a uniform mixture, in which one frequent fault hides the consequences of another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.chaos.simulator.interface import SimulatedJob
from elastic.chaos.simulator.simulated_agent import SimulatedAgent
from elastic.chaos.simulator.simulated_network import INWARD, OUTWARD, Conditions
from elastic.chaos.simulator.simulated_worker import SimulatedWorker, newest
from elastic.driver.events import (
    DrainRequested,
    Notice,
    RemoveRequested,
    ReplicasSpoilt,
    ScaleRequested,
)

Fault = Callable[[SimulatedJob], None]


def _sound(sim: SimulatedJob) -> list[SimulatedWorker]:
    return [
        p
        for p in sim.processes.values()
        if not (p.frozen or p.doomed or p.agent.frozen or p.strike or p.leaves) and p.alive
    ]


def _spared(sim: SimulatedJob, victims: list[SimulatedWorker]) -> bool:
    """Return whether this run may lose these victims. A mild run must keep two workers with a correct state."""
    if not sim.mild:
        return True
    left = [p for p in _sound(sim) if p not in victims]
    if any(p.recovery.running for p in victims):
        left = [p for p in left if newest(p) is not None]
    return len(left) >= 2


def _one(sim: SimulatedJob) -> SimulatedWorker | None:
    candidates = [p for p in _sound(sim) if _spared(sim, [p])]
    return sim.clock.random.choice(candidates) if candidates else None


def _agent(sim: SimulatedJob) -> SimulatedAgent | None:
    agents = [
        a
        for a in sim.agents.values()
        if a.alive and not a.frozen and _spared(sim, [*a.processes.values()])
    ]
    return sim.clock.random.choice(agents) if agents else None


# ---- processes -------------------------------------------------------------------------------------------------------


def kill_one(sim: SimulatedJob) -> None:
    """Kill a random worker. If at most two workers hold the state, spare these."""
    holders = [p for p in sim.processes.values() if newest(p) is not None]
    spare = [p for p in sim.processes.values() if newest(p) is None]
    victims = [p for p in [*(holders if len(holders) > 2 else []), *spare] if _spared(sim, [p])]
    for process in sim.clock.random.sample(victims, min(1, len(victims))):
        sim.note(f"{process.worker} killed at {process.point!r}")
        process.die(-9)


def kill_rank_0(sim: SimulatedJob) -> None:
    for process in sim.processes.values():
        if process.recovery.place.rank == 0 and _spared(sim, [process]):
            sim.note(f"rank 0, {process.worker}, killed")
            process.die(-9)
            return


def kill_at_a_commit(sim: SimulatedJob) -> None:
    """Kill a worker shortly after the next commit of any worker."""
    sim.aimed += 1


def strike(sim: SimulatedJob) -> None:
    """Kill or freeze a process at one of the next points at which it yields control."""
    process = _one(sim)
    if process is not None:
        frozen_s = sim.clock.random.choice((0.0, 0.0, 0.7, 5.0))
        sim.note(f"{process.worker} {f'frozen for {frozen_s} s' if frozen_s else 'killed'}")
        process.strike = (sim.clock.random.randint(1, 25), frozen_s)


def kill_many(sim: SimulatedJob) -> None:
    """Kill any number of workers at once, possibly all."""
    victims = list(sim.processes.values())
    for process in sim.clock.random.sample(victims, sim.clock.random.randint(0, len(victims))):
        sim.note(f"{process.worker} killed")
        process.die(-9)


def freeze(sim: SimulatedJob) -> None:
    """Freeze a worker with SIGSTOP, and resume it with SIGCONT after a random time."""
    process = _one(sim)
    if process is not None:
        seconds = sim.clock.random.choice((0.5, 1.5, 8.0, 90.0))
        sim.note(f"{process.worker} frozen for {seconds} s")
        process.doomed = process.doomed or seconds > 1
        process.freeze()
        sim.clock.after(seconds, process.thaw)


def leave(sim: SimulatedJob) -> None:
    """Send SIGTERM to a worker, so that it leaves."""
    process = _one(sim)
    if process is not None:
        sim.note(f"{process.worker} received SIGTERM")
        process.perform(process.recovery.ask_to_leave("SIGTERM"))


def raise_in_user_code(sim: SimulatedJob) -> None:
    """Raise an exception or call sys.exit in the user code of one or more workers."""
    random = sim.clock.random
    number = random.choice((1, 1, 2))
    text = random.choice("abcdefghij")
    victims = [p for p in sim.processes.values() if not p.frozen]
    for process in random.sample(victims, min(number, len(victims))):
        sim.note(f"{process.worker} raised {text}")
        process.will_raise = text


def stick(sim: SimulatedJob) -> None:
    """Make the user code of a worker block or spin forever."""
    process = _one(sim)
    if process is not None:
        others = (p for p in sim.processes.values() if p is not process)
        if all(p.trouble or p.point in ("stuck", "spinning") for p in others):
            # Without a worker that waits for the victim, the driver cannot detect that the victim is stuck.
            return
        process.trouble = sim.clock.random.choice(("stuck", "spinning"))
        process.doomed = True
        sim.note(f"{process.trouble} {process.worker}")


def miscompute(sim: SimulatedJob) -> None:
    """Make a worker compute wrong gradients from now on, in all or in a random fraction of its backward passes."""
    sound = [each for each in _sound(sim) if each.recovery.place.size > 2]
    victims = [each for each in sound if _spared(sim, [each])]
    spare = sum(sim.hosts.values()) - sum(
        map(bool, sim.driver.membership.worlds.staff.slots.quarantined)
    )
    if victims and spare > 3 and not any(each.wrong for each in sim.processes.values()):
        process = sim.clock.random.choice(victims)
        process.wrong = sim.clock.random.choice((1.0, 1.0, 0.5, 0.1))
        process.doomed = True
        sim.note(f"{process.worker} computes {process.wrong:.0%} of its gradients incorrectly")


def throttle(sim: SimulatedJob) -> None:
    """Slow down all further steps of a worker by a factor, unless another worker is already slow."""
    sound = _sound(sim)
    if sound and all(process.slowness == 1.0 for process in sim.processes.values()):
        process = sim.clock.random.choice(sound)
        process.slowness = sim.clock.random.choice((4.0, 10.0))
        sim.throttled.add(process.worker)
        sim.note(f"{process.worker} is {process.slowness:g} times as slow")


def slow_down(sim: SimulatedJob) -> None:
    """Make one step of a worker long, or make it announce a long phase. The worker must not be killed for either."""
    sound = [p for p in _sound(sim) if not p.trouble]
    if sound:
        process = sim.clock.random.choice(sound)
        process.trouble = sim.clock.random.choice(("slow", "long"))
        longest = sim.settings.busy_s * (0.6 if process.trouble == "slow" else 1.3)
        process.trouble_s = sim.clock.between(1.0, longest)
        sim.note(f"{process.trouble} {process.worker} for {process.trouble_s:.1f} s")


def hang_a_gpu(sim: SimulatedJob) -> None:
    """Hang the GPU of a worker. The worker's host code continues to launch work, and waits for the GPU."""
    process = _one(sim)
    if process is not None:
        sim.note(f"the GPU of {process.worker} hangs")
        process.doomed = process.gpu_hangs = sim.training.on_gpus = True


def hang_the_network(sim: SimulatedJob) -> None:
    """Hang the network between the GPUs: all collectives of the current world block, without any worker at fault."""
    sim.training.on_gpus = True
    if sim.training.worlds:
        generation = max(sim.training.worlds)
        sim.note(f"NCCL hangs in generation {generation}")
        sim.training.hung.add(generation)


def spoil_all(sim: SimulatedJob) -> None:
    """Corrupt the state of all workers, as by a bit flip, and report that a checkpoint has detected it."""
    driver = sim.driver
    if not driver.up or driver.paused:
        return
    generation = driver.membership.generation
    members = [p for p in sim.processes.values() if p.recovery.generation == generation]
    committed = [p for p in members if p.trains(generation) and newest(p) is not None]
    if not committed:
        return
    process = sim.clock.random.choice(committed)
    sim.note(f"a bit flip in the memory of {process.worker} corrupted all replicas")
    commit = process.recovery.newest
    spoilt = ReplicasSpoilt(generation, commit, [process.worker], 2)
    driver.handle(spoilt)
    if driver.entries[-1].event == spoilt:
        # Corrupt the states only if the driver has recorded the report instead of crashing.
        for each in members:
            sim.training.spoils(each)


# ---- hosts and their agents ------------------------------------------------------------------------------------------


def change_hosts(sim: SimulatedJob) -> None:
    """Set the host list to a random subset of the hosts, possibly empty.

    Often, all hosts are listed again shortly afterwards.
    """
    hosts = {h: n for h, n in sim.hosts.items() if sim.clock.random.random() < 0.7}
    if not _spared(sim, [p for p in sim.processes.values() if p.worker.host not in hosts]):
        return
    sim.note(f"hosts {hosts}")
    sim.list_hosts(hosts)
    sim.clock.after(sim.clock.between(0.0, 3.0), sim.list_hosts, sim.hosts)


def crash_agent(sim: SimulatedJob) -> None:
    """Crash an agent, with its workers."""
    agent = _agent(sim)
    if agent is not None:
        down_s = sim.clock.random.choice((0.1, 1.0, 6.0))
        sim.note(f"agent of {agent.host} crashed for {down_s} s")
        agent.crash()
        if not sim.weather.starts_agents:
            sim.clock.after(down_s, agent.restart)


def lose_host(sim: SimulatedJob) -> None:
    """Disconnect a machine: it sends no more messages and returns only after the phase with faults."""
    agent = _agent(sim)
    if agent is not None and len(sim.agents) > 1:
        sim.note(f"host {agent.host} lost")
        sim.lose_host(agent.host)


def announce_an_end(sim: SimulatedJob) -> None:
    """Announce the preemption of a machine. Afterwards, preempt it, withdraw the notice, or do nothing."""
    random = sim.clock.random
    agent = _agent(sim)
    if agent is None or len(sim.agents) < 2 or agent.notice is not None:
        return
    within_s = random.choice((0.0, 0.1, 2.0, 5.0, 15.0))
    timed = random.random() < 0.8
    then = random.choice(("it goes", "it goes", "it stays", "nothing"))
    sim.note(f"{agent.host} announces its end in {within_s} s, with time {timed}; {then}")
    agent.announce(Notice("taken back", within_s if timed else None))
    if then == "it goes":
        for process in agent.processes.values():
            process.doomed = True
        sim.clock.after(within_s, sim.lose_host, agent.host)
    elif then == "it stays":
        sim.clock.after(sim.clock.between(0.0, within_s), agent.announce, None)


def _too_soon(sim: SimulatedJob, agent: SimulatedAgent, seconds: float) -> bool:
    """Return whether a mild run must skip an outage of the agent, because it would follow too soon after another.

    Two outages without a heartbeat between them could exceed the liveness timeout.
    """
    now, before = sim.clock.now, agent.quiet_until
    agent.quiet_until = now + seconds
    return sim.mild and now - before < sim.settings.lease_s


def freeze_agent(sim: SimulatedJob) -> None:
    """Freeze an agent. Its workers keep running."""
    agent = _agent(sim)
    if agent is not None:
        seconds = sim.clock.random.choice((0.5, 1.2, 6.0))
        if seconds < 1 and _too_soon(sim, agent, seconds):
            return
        if seconds > 1:
            for process in agent.processes.values():
                process.doomed = True
        sim.note(f"agent of {agent.host} frozen for {seconds} s")
        agent.freeze()
        sim.clock.after(seconds, agent.thaw)


def freeze_machine(sim: SimulatedJob) -> None:
    """Freeze the agent and the workers of a machine, whose kernel still acknowledges packets."""
    agent = _agent(sim)
    if agent is None or len(sim.agents) < 2:
        return
    seconds = sim.clock.random.choice((0.5, 6.0, 30.0))
    if seconds < 1 and _too_soon(sim, agent, seconds):
        return
    sim.note(f"all processes of {agent.host} frozen for {seconds} s")
    there = [*agent.processes.values()]
    agent.freeze()
    for process in there:
        process.doomed = process.doomed or seconds > 1
        process.freeze()
        sim.clock.after(seconds, process.thaw)
    sim.clock.after(seconds, agent.thaw)


# ---- the network -----------------------------------------------------------------------------------------------------


def break_connection(sim: SimulatedJob) -> None:
    hosts = list(sim.agents)
    connections = sim.network.connections(sim.clock.random.choice(hosts))
    if connections:
        connection = sim.clock.random.choice(connections)
        sim.note(f"connection of {connection.worker or connection.host} broken")
        connection.break_off()


def break_connections(sim: SimulatedJob) -> None:
    """Break all connections of one host, or of all hosts."""
    hosts = list(sim.agents)
    if sim.clock.chance(0.7):
        hosts = [sim.clock.random.choice(hosts)]
    sim.note(f"all connections of {', '.join(hosts)} broken")
    for host in hosts:
        for connection in sim.network.connections(host):
            connection.break_off()


def cut_host(sim: SimulatedJob) -> None:
    """Cut off a host from the driver in one or both directions, and possibly its workers from other workers."""
    random = sim.clock.random
    seconds = random.choice((0.3, 0.8, 3.0, 15.0))
    agent = _agent(sim) if seconds > 1 else random.choice(list(sim.agents.values()))
    if agent is None or sim.network.is_cut(agent.host):
        return
    ways = random.choice(((INWARD,), (OUTWARD,), (INWARD, OUTWARD)))
    data = random.random() < 0.5
    names = {INWARD: "inward", OUTWARD: "outward"}
    how = ", ".join([*(names[way] for way in ways), *(["from its peers"] if data else [])])
    if seconds < 1 and _too_soon(sim, agent, seconds):
        return
    sim.note(f"host {agent.host} cut off ({how}) for {seconds} s")
    if seconds > 1:
        for process in agent.processes.values():
            process.doomed = True
    sim.network.cut(agent.host, *ways)
    if data:
        sim.training.cut(agent.host)
    sim.clock.after(seconds, sim.heal, agent.host)


def slow_network(sim: SimulatedJob) -> None:
    """Slow down the network of one host."""
    host = sim.clock.random.choice(list(sim.agents))
    sim.note(f"slow network at {host}")
    sim.network.slow[host] = sim.clock.random.choice((3.0, 10.0))


# ---- operators -------------------------------------------------------------------------------------------------------


def scale(sim: SimulatedJob) -> None:
    """Request a random number of workers, which may be invalid."""
    workers = sim.clock.random.randint(1, sim.workers + 2)
    sim.note(f"scaled to {workers} workers")
    sim.driver.handle(ScaleRequested(0, workers))


def drain(sim: SimulatedJob) -> None:
    """Drain a host, or undo a drain."""
    host, off = sim.clock.random.choice([*sim.hosts, "unknown"]), sim.clock.chance(0.3)
    sim.note(f"host {host} {'no longer ' if off else ''}drained")
    sim.driver.handle(DrainRequested(0, host, off))


def remove(sim: SimulatedJob) -> None:
    process = _one(sim)
    if process is not None:
        sim.note(f"{process.worker} removed")
        sim.driver.handle(RemoveRequested(0, process.worker))


# ---- the driver ------------------------------------------------------------------------------------------------------


def crash_driver(sim: SimulatedJob) -> None:
    """Crash the driver at one of the next points at which it yields control."""
    driver = sim.driver
    if driver.up and driver.doom is None:
        driver.doom = sim.clock.random.randint(1, 60)
        driver.down_s = sim.clock.random.choice((0.05, 0.5, 4.0))
        sim.note(f"driver crashed for {driver.down_s} s")


def freeze_driver(sim: SimulatedJob) -> None:
    if sim.driver.up:
        seconds = sim.clock.random.choice((0.3, 1.2, 5.0))
        sim.note(f"driver frozen for {seconds} s")
        sim.driver.pause()
        sim.clock.after(seconds, sim.driver.wake)


MILD: list[Fault] = [
    kill_one,
    kill_rank_0,
    kill_at_a_commit,
    strike,
    leave,
    change_hosts,
    freeze,
    stick,
    slow_down,
    crash_agent,
    lose_host,
    freeze_agent,
    break_connection,
    break_connections,
    cut_host,
    slow_network,
    crash_driver,
    freeze_driver,
]
EVERY: list[Fault] = [*MILD, kill_many, raise_in_user_code]
STEERED: list[Fault] = [scale, scale, drain, remove, kill_one, lose_host, crash_driver]
FROZEN: list[Fault] = [freeze_machine, freeze_machine, kill_one, freeze_agent, leave, crash_driver]
WITH_NOTICE: list[Fault] = [announce_an_end, kill_one, leave, break_connections, crash_driver]
MISCOMPUTING: list[Fault] = [miscompute, miscompute, kill_one, leave, change_hosts, crash_driver]
THROTTLING: list[Fault] = [throttle, throttle, kill_one, leave, change_hosts, crash_driver]
DAMAGED: list[Fault] = [spoil_all, spoil_all, leave, change_hosts, crash_driver]
# faults that require GPUs
ON_GPUS: list[Fault] = [hang_a_gpu, hang_the_network, slow_down]


@dataclass
class FaultConditions:
    """Kinds, frequencies and probabilities of faults in a run, drawn from the seed of the run."""

    faults: list[Fault] = field(default_factory=list)
    step_s: tuple[float, float] = (0.002, 0.03)
    network: Conditions = field(default_factory=Conditions)
    # fraction of exits that the driver receives before the last messages of the process
    early_exits: float = 0.0
    struck: float = 0.0  # fraction of new processes that are killed or frozen during start-up
    # whether the driver starts agents on demand; otherwise agents run from the beginning
    starts_agents: bool = False
    busy_s: float = 0.0  # seconds in which events arrive that the driver handles together

    @property
    def loses_messages(self) -> bool:
        """Return whether connections of live processes may break, which loses messages."""
        breaking = (
            break_connection,
            break_connections,
            cut_host,
            crash_driver,
            freeze_agent,
            lose_host,
        )
        return any(fault in breaking for fault in self.faults)

    @classmethod
    def drawn(cls, seed: int, *, mild: bool) -> FaultConditions:
        """Draw the conditions of a run from its seed."""
        source = random.Random(f"weather {seed}")
        kinds = MILD if mild else EVERY
        some = source.sample(kinds, source.randint(2, len(kinds)))
        weighted = [fault for fault in some for _ in range(source.choice((1, 1, 3)))]
        delays = source.choice(((0.0005, 0.001, 0.02), (0.0005,), (0.02,), (0.001, 0.01, 0.15)))
        return cls(
            faults=weighted,
            step_s=source.choice(((0.02, 0.06), (0.01, 0.12), (0.001, 0.2))),
            network=Conditions(delays, ghosts=source.choice((0.0, 0.0, 0.5, 1.0))),
            early_exits=source.choice((0.0, 0.0, 0.3)),
            struck=source.choice((0.0, 0.0, 0.1)),
            starts_agents=source.choice((False, False, True)),
        )
