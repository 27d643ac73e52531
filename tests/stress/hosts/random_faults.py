"""Faults drawn from a seed, several at once, in rounds on one job. After each round all hosts must train again.

One host is spared by all faults: its worker must survive in one process. There is one exception: a driver that is cut
off, and cannot be replaced because etcd is down too, considers all hosts lost. The seed determines kinds, victims and
intervals of the faults; the progress of a recovery when the next fault comes depends on this machine.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic.chaos.inject.faulty_job import print_line
from stress.hosts import scenarios
from stress.hosts.cluster import DRIVER, ETCD, HOSTS, STANDBY, HostCluster, HostedJob
from stress.hosts.report import ScenarioOutcome

SPARED = HOSTS[0]
ON_HOSTS = (
    "kill host",
    "cut",
    "cut from",
    "cut towards",
    "kill worker",
    "kill agent",
    "stop agent",
)
ON_DRIVERS = ("kill driver", "stop driver", "kill driver's host", "cut driver's host")
ON_ETCD = ("kill etcd", "cut etcd")
MOST_GAP_S = 2.5
BACK_S = 150.0  # seconds for all hosts to train again


@dataclass(frozen=True)
class RandomFault:
    """A drawn fault. ``victim``: a host with workers, or empty. ``gap_s``: since the previous one."""

    kind: str
    victim: str
    gap_s: float

    def __str__(self) -> str:
        return f"{self.gap_s:.1f} s later {self.kind} {self.victim}".rstrip()


def draw(seed: int, rounds: int) -> list[list[RandomFault]]:
    """Draw rounds of faults. Pure. No host is hit twice in a round, and neither are driver and etcd."""
    dice = random.Random(seed)
    drawn = []
    for _ in range(rounds):
        victims = dice.sample(HOSTS[1:], k=dice.choice((0, 1, 1, 2, 3)))
        faults = [(dice.choice(ON_HOSTS), victim) for victim in victims]
        if dice.random() < 0.5:
            faults.append((dice.choice(ON_DRIVERS), ""))
        if dice.random() < 0.3 or not faults:
            faults.append((dice.choice(ON_ETCD), ""))
        dice.shuffle(faults)
        gaps = [dice.choice((0.0, 0.0, dice.uniform(0, MOST_GAP_S))) for _ in faults]
        drawn.append([RandomFault(*fault, gap) for fault, gap in zip(faults, gaps, strict=True)])
    return drawn


def play(bench: HostCluster, seed: int, rounds: int) -> ScenarioOutcome:
    """Run all rounds."""
    with bench.job(f"seed {seed}") as job:
        job.start()
        began = time.monotonic()
        spared = job.worker_pid(SPARED)
        for number, faults in enumerate(draw(seed, rounds), start=1):
            _ensure_standby(job)
            listed = "; ".join(map(str, faults))
            print_line(f"seed {seed}, round {number}: {listed}")
            stopped = []
            for fault in faults:
                time.sleep(fault.gap_s)
                stopped += _strike(bench, job, fault)
            time.sleep(random.Random(seed * 1000 + number).choice((0.0, 1.0, 4.0)))
            _heal(bench, job, stopped)
            try:
                job.trains(HOSTS, timeout=BACK_S)
            except AssertionError as late:
                raise AssertionError(f"after round {number} ({listed}): {late}") from None
        job.measure(f"{rounds} rounds", began, survivors=None)
        outcome = job.finish(all_heard=False)
    if job.worker_pid(SPARED) != spared and not any(map(_alone, draw(seed, rounds))):
        return ScenarioOutcome(
            outcome.name, failed=f"the worker of {SPARED}, which was spared, was lost"
        )
    return outcome


def _alone(faults: list[RandomFault]) -> bool:
    """Return whether a driver may have been isolated while there was no other."""
    kinds = {fault.kind for fault in faults}
    return "cut driver's host" in kinds and not kinds.isdisjoint(ON_ETCD)


def _strike(bench: HostCluster, job: HostedJob, fault: RandomFault) -> list[Callable[[], object]]:
    """Inject a fault. Return functions that undo it, beyond healing the links."""
    network, victim = bench.network, fault.victim
    leader = job.leader()
    match fault.kind:
        case "kill host":
            network.kill_host(victim)
        case "cut":
            network.cut(victim)
        case "cut from" | "cut towards":
            network.cut_one_way(victim, fault.kind.split()[1])
        case "kill worker":
            scenarios.kill_worker(job, victim)
        case "kill agent":
            job.agents[victim].kill()
        case "stop agent":
            agent = job.agents[victim]
            agent.signal(signal.SIGSTOP)
            return [lambda: agent.signal(signal.SIGCONT)]
        case "kill driver":
            leader.kill()
        case "stop driver":
            leader.signal(signal.SIGSTOP)
            return [lambda: leader.signal(signal.SIGCONT)]
        case "kill driver's host":
            network.kill_host(leader.host.name)
        case "cut driver's host":
            network.cut(leader.host.name)
        case "kill etcd":
            bench.etcd.kill()
        case "cut etcd":
            network.cut(ETCD)
    return []


def _heal(bench: HostCluster, job: HostedJob, stopped: list[Callable[[], object]]) -> None:
    for undo in stopped:
        undo()
    for host in bench.network.hosts:
        bench.network.heal(host)
    if bench.etcd.process.poll() is not None:
        bench.start_etcd()
    _ensure_standby(job)
    for host in HOSTS:
        if job.agents[host].process.poll() is not None:
            job.start_agent(host)


def _ensure_standby(job: HostedJob) -> None:
    """Ensure that there are two drivers: a leader and a standby."""
    alive = [driver for driver in job.drivers if driver.process.poll() is None]
    free = {DRIVER, STANDBY} - {driver.host.name for driver in alive}
    for host in sorted(free):
        job.start_driver(on=host)
