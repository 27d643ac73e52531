"""What can go wrong in a simulation. Each fault is one call that chooses its victims by the run's own random numbers.

``MILD`` ones always leave somebody who holds the newest commit and can go on, so that the job has to succeed. A run
does not have all of them: its seed draws which, how often, and how good the network is (a swarm finds more than a
uniform mixture does, in which one frequent fault hides what another leads to).
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
    """Those that will go on if nothing is done to them."""
    return [
        p
        for p in sim.processes.values()
        if not (p.frozen or p.doomed or p.agent.frozen or p.strike or p.leaves) and p.alive
    ]


def _spared(sim: SimulatedJob, victims: list[SimulatedWorker]) -> bool:
    """Whether two sound holders are left without these; a mild run sees to it, any other does not care."""
    if not sim.mild:
        return True
    left = [p for p in _sound(sim) if p not in victims]
    if any(p.recovery.running for p in victims):
        left = [p for p in left if newest(p) is not None]
    return len(left) >= 2


def _one(sim: SimulatedJob) -> SimulatedWorker | None:
    """A worker that may be lost."""
    candidates = [p for p in _sound(sim) if _spared(sim, [p])]
    return sim.clock.random.choice(candidates) if candidates else None


def _agent(sim: SimulatedJob) -> SimulatedAgent | None:
    """An agent that may be lost, with its workers."""
    agents = [
        a
        for a in sim.agents.values()
        if a.alive and not a.frozen and _spared(sim, [*a.processes.values()])
    ]
    return sim.clock.random.choice(agents) if agents else None


# ---- processes -------------------------------------------------------------------------------------------------------


def kill_one(sim: SimulatedJob) -> None:
    """SIGKILL, but not of the last members that hold the state."""
    holders = [p for p in sim.processes.values() if newest(p) is not None]
    spare = [p for p in sim.processes.values() if newest(p) is None]
    victims = [p for p in [*(holders if len(holders) > 2 else []), *spare] if _spared(sim, [p])]
    for process in sim.clock.random.sample(victims, min(1, len(victims))):
        sim.note(f"kill {process.worker} at {process.point!r}")
        process.die(-9)


def kill_rank_0(sim: SimulatedJob) -> None:
    for process in sim.processes.values():
        if process.recovery.place.rank == 0 and _spared(sim, [process]):
            sim.note(f"kill rank 0, {process.worker}")
            process.die(-9)
            return


def kill_at_a_commit(sim: SimulatedJob) -> None:
    """When the next worker has committed."""
    sim.aimed += 1


def strike(sim: SimulatedJob) -> None:
    """Kill or freeze a process at one of the next places where it gives up control."""
    process = _one(sim)
    if process is not None:
        frozen_s = sim.clock.random.choice((0.0, 0.0, 0.7, 5.0))
        sim.note(f"strike {process.worker} {f'for {frozen_s} s' if frozen_s else 'dead'}")
        process.strike = (sim.clock.random.randint(1, 25), frozen_s)


def kill_many(sim: SimulatedJob) -> None:
    """Any number at once, all of them too."""
    victims = list(sim.processes.values())
    for process in sim.clock.random.sample(victims, sim.clock.random.randint(0, len(victims))):
        sim.note(f"kill {process.worker}")
        process.die(-9)


def freeze(sim: SimulatedJob) -> None:
    """SIGSTOP, and SIGCONT after a while."""
    process = _one(sim)
    if process is not None:
        seconds = sim.clock.random.choice((0.5, 1.5, 8.0, 90.0))
        sim.note(f"freeze {process.worker} for {seconds} s")
        process.doomed = process.doomed or seconds > 1
        process.freeze()
        sim.clock.after(seconds, process.thaw)


def leave(sim: SimulatedJob) -> None:
    """SIGTERM."""
    process = _one(sim)
    if process is not None:
        sim.note(f"leave {process.worker}")
        process.perform(process.recovery.ask_to_leave("SIGTERM"))


def raise_in_user_code(sim: SimulatedJob) -> None:
    """In one worker, or the same in several: an exception, or sys.exit."""
    random = sim.clock.random
    number = random.choice((1, 1, 2))
    text = random.choice("abcdefghij")
    victims = [p for p in sim.processes.values() if not p.frozen]
    for process in random.sample(victims, min(number, len(victims))):
        sim.note(f"raise {process.worker} {text}")
        process.will_raise = text


def stick(sim: SimulatedJob) -> None:
    """User code blocks, or spins, for ever."""
    process = _one(sim)
    if process is not None:
        others = (p for p in sim.processes.values() if p is not process)
        if all(p.trouble or p.point in ("stuck", "spinning") for p in others):
            return  # nobody would wait for it, so nobody could tell
        process.trouble = sim.clock.random.choice(("stuck", "spinning"))
        process.doomed = True
        sim.note(f"{process.trouble} {process.worker}")


def slow_down(sim: SimulatedJob) -> None:
    """A step that takes long, or a phase that is marked as long: nobody may be killed for either."""
    sound = [p for p in _sound(sim) if not p.trouble]
    if sound:
        process = sim.clock.random.choice(sound)
        process.trouble = sim.clock.random.choice(("slow", "long"))
        longest = sim.settings.busy_s * (0.6 if process.trouble == "slow" else 1.3)
        process.trouble_s = sim.clock.between(1.0, longest)
        sim.note(f"{process.trouble} {process.worker} for {process.trouble_s:.1f} s")


def hang_a_gpu(sim: SimulatedJob) -> None:
    """Its host goes on, launches, and waits."""
    process = _one(sim)
    if process is not None:
        sim.note(f"the GPU of {process.worker} hangs")
        process.doomed = process.gpu_hangs = sim.training.on_gpus = True


def hang_the_network(sim: SimulatedJob) -> None:
    """Of GPUs: no collective of this world ends any more, and no worker is to blame."""
    sim.training.on_gpus = True
    if sim.training.worlds:
        generation = max(sim.training.worlds)
        sim.note(f"NCCL hangs in generation {generation}")
        sim.training.hung.add(generation)


def spoil_all(sim: SimulatedJob) -> None:
    """A bit has flipped in the memory of one, its gradients were NaN for all, and a checkpoint has found that."""
    driver = sim.driver
    if not driver.up or driver.paused:
        return
    generation = driver.membership.generation
    members = [p for p in sim.processes.values() if p.recovery.generation == generation]
    committed = [p for p in members if p.trains(generation) and newest(p) is not None]
    if not committed:
        return
    process = sim.clock.random.choice(committed)
    sim.note(f"a bit flips in the memory of {process.worker}, and has spoilt all")
    commit = process.recovery.newest
    spoilt = ReplicasSpoilt(generation, commit, [process.worker], 2)
    driver.hear(spoilt)
    if driver.entries[-1].event == spoilt:  # it did not die before
        for each in members:
            sim.training.spoils(each)


# ---- hosts and their agents ------------------------------------------------------------------------------------------


def change_hosts(sim: SimulatedJob) -> None:
    """Any part of the list, none of it too; often back again at once."""
    hosts = {h: n for h, n in sim.hosts.items() if sim.clock.random.random() < 0.7}
    if not _spared(sim, [p for p in sim.processes.values() if p.worker.host not in hosts]):
        return
    sim.note(f"hosts {hosts}")
    sim.list_hosts(hosts)
    sim.clock.after(sim.clock.between(0.0, 3.0), sim.list_hosts, sim.hosts)


def crash_agent(sim: SimulatedJob) -> None:
    """And its workers with it."""
    agent = _agent(sim)
    if agent is not None:
        down_s = sim.clock.random.choice((0.1, 1.0, 6.0))
        sim.note(f"crash the agent of {agent.host} for {down_s} s")
        agent.crash()
        if not sim.weather.starts_agents:
            sim.clock.after(down_s, agent.restart)


def lose_host(sim: SimulatedJob) -> None:
    """The machine dies without a word and does not come back while there are faults."""
    agent = _agent(sim)
    if agent is not None and len(sim.agents) > 1:
        sim.note(f"lose {agent.host}")
        sim.lose_host(agent.host)


def announce_an_end(sim: SimulatedJob) -> None:
    """The machine says that it will be gone; then it is, or it says that it stays, or nothing at all happens."""
    random = sim.clock.random
    agent = _agent(sim)
    if agent is None or len(sim.agents) < 2 or agent.notice is not None:
        return
    within_s = random.choice((0.0, 0.1, 2.0, 5.0, 15.0))
    told = random.random() < 0.8
    then = random.choice(("it goes", "it goes", "it stays", "nothing"))
    sim.note(f"{agent.host} announces its end in {within_s} s, told {told}; {then}")
    agent.announce(Notice("taken back", within_s if told else None))
    if then == "it goes":
        for process in agent.processes.values():
            process.doomed = True
        sim.clock.after(within_s, sim.lose_host, agent.host)
    elif then == "it stays":
        sim.clock.after(sim.clock.between(0.0, within_s), agent.announce, None)


def _too_soon(sim: SimulatedJob, agent: SimulatedAgent, seconds: float) -> bool:
    """Two short silences with no beat between are a long one: a mild run must not take a host by that."""
    now, before = sim.clock.now, agent.quiet_until
    agent.quiet_until = now + seconds
    return sim.mild and now - before < sim.settings.lease_s


def freeze_agent(sim: SimulatedJob) -> None:
    """Its workers go on."""
    agent = _agent(sim)
    if agent is not None:
        seconds = sim.clock.random.choice((0.5, 1.2, 6.0))
        if seconds < 1 and _too_soon(sim, agent, seconds):
            return
        if seconds > 1:
            for process in agent.processes.values():
                process.doomed = True
        sim.note(f"freeze the agent of {agent.host} for {seconds} s")
        agent.freeze()
        sim.clock.after(seconds, agent.thaw)


def freeze_machine(sim: SimulatedJob) -> None:
    """All of it, but its kernel, which acknowledges what comes: an agent and its workers."""
    agent = _agent(sim)
    if agent is None or len(sim.agents) < 2:
        return
    seconds = sim.clock.random.choice((0.5, 6.0, 30.0))
    if seconds < 1 and _too_soon(sim, agent, seconds):
        return
    sim.note(f"freeze all of {agent.host} for {seconds} s")
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
        sim.note(f"break the connection of {connection.worker or connection.host}")
        connection.break_off()


def break_connections(sim: SimulatedJob) -> None:
    """All of one host, or of all hosts."""
    hosts = list(sim.agents)
    if sim.clock.chance(0.7):
        hosts = [sim.clock.random.choice(hosts)]
    sim.note(f"break all connections of {', '.join(hosts)}")
    for host in hosts:
        for connection in sim.network.connections(host):
            connection.break_off()


def cut_host(sim: SimulatedJob) -> None:
    """In one direction or both, with or without what its workers send each other."""
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
    sim.note(f"cut {agent.host} ({how}) for {seconds} s")
    if seconds > 1:
        for process in agent.processes.values():
            process.doomed = True
    sim.network.cut(agent.host, *ways)
    if data:
        sim.training.cut(agent.host)
    sim.clock.after(seconds, sim.heal, agent.host)


def slow_network(sim: SimulatedJob) -> None:
    """To and from one host."""
    host = sim.clock.random.choice(list(sim.agents))
    sim.note(f"slow network at {host}")
    sim.network.slow[host] = sim.clock.random.choice((3.0, 10.0))


# ---- operators -------------------------------------------------------------------------------------------------------


def scale(sim: SimulatedJob) -> None:
    """To any size that the job may have, or to one that it may not."""
    workers = sim.clock.random.randint(1, sim.workers + 2)
    sim.note(f"scale to {workers}")
    sim.driver.hear(ScaleRequested(0, workers))


def drain(sim: SimulatedJob) -> None:
    """Or have workers there again."""
    host, off = sim.clock.random.choice([*sim.hosts, "unknown"]), sim.clock.chance(0.3)
    sim.note(f"drain {host}{' no more' if off else ''}")
    sim.driver.hear(DrainRequested(0, host, off))


def remove(sim: SimulatedJob) -> None:
    process = _one(sim)
    if process is not None:
        sim.note(f"remove {process.worker}")
        sim.driver.hear(RemoveRequested(0, process.worker))


# ---- the driver ------------------------------------------------------------------------------------------------------


def crash_driver(sim: SimulatedJob) -> None:
    """At one of the next places where it gives up control."""
    driver = sim.driver
    if driver.up and driver.doom is None:
        driver.doom = sim.clock.random.randint(1, 60)
        driver.down_s = sim.clock.random.choice((0.05, 0.5, 4.0))
        sim.note(f"crash the driver for {driver.down_s} s")


def freeze_driver(sim: SimulatedJob) -> None:
    if sim.driver.up:
        seconds = sim.clock.random.choice((0.3, 1.2, 5.0))
        sim.note(f"freeze the driver for {seconds} s")
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
DAMAGED: list[Fault] = [spoil_all, spoil_all, leave, change_hosts, crash_driver]
ON_GPUS: list[Fault] = [hang_a_gpu, hang_the_network, slow_down]  # in jobs that train on GPUs


@dataclass
class Weather:
    """What a seed draws before its run begins."""

    faults: list[Fault] = field(default_factory=list)
    step_s: tuple[float, float] = (0.002, 0.03)
    network: Conditions = field(default_factory=Conditions)
    early_exits: float = 0.0  # share of exits that are heard before the last words of the process
    struck: float = 0.0  # share of new processes that are killed or frozen on their way
    # The driver does, where it needs one; else they run from the beginning.
    starts_agents: bool = False

    @property
    def loses_messages(self) -> bool:
        """Whether connections of living processes break."""
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
    def drawn(cls, seed: int, *, mild: bool) -> Weather:
        """The seed alone says which kinds of faults there are."""
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
