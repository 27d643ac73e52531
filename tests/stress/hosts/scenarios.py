"""Fault scenarios of a job on many hosts: each trains, injects a fault, recovers, and is judged.

Scenarios wait for events in the workers' notes and the journal, not for time to pass, except during lasting faults.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from harness import wording
from stress.hosts.cluster import DRIVER, HOSTS, STANDBY, START_S, HostCluster, HostedJob
from stress.hosts.report import Mark, ScenarioOutcome

Scenario = Callable[[HostCluster], ScenarioOutcome]

LEASE_S = 2.0
VICTIM = "d"
REST = tuple(host for host in HOSTS if host != VICTIM)
ANOTHER = "b"
AWAY_S = 3.0  # outage of etcd
LASTS_S = 6.0  # duration of a fault that is to be tolerated: three leases
# etcd counts leases in whole seconds, and checks them twice a second
BY_LEASE_MS = 1e3 * (LEASE_S + 2)

RECOVERS = CUT = Mark(next_step_ms=1e3 * LEASE_S + 500, interrupted=True)
UNNOTICED = Mark(failed=0, interrupted=False)
ADOPTED = Mark(failed=0, interrupted=False, adopted_ms=2000)
ADOPTED_BY_LEASE = Mark(failed=0, interrupted=False, adopted_ms=BY_LEASE_MS)
ADOPTED_HURT = Mark(adopted_ms=2000, interrupted=True)


def host_killed(bench: HostCluster) -> ScenarioOutcome:
    """A host loses power, and comes back later."""
    with bench.job("host killed") as job:
        job.start()
        at = bench.network.kill_host(VICTIM)
        job.trains(REST, after=at)
        job.measure("one of four hosts loses power", at, survivors=3, mark=CUT)
        bench.network.heal(VICTIM)
        at = time.monotonic()
        job.start_agent(VICTIM)
        job.trains(HOSTS, after=at)
        job.measure("the host returns, and its worker joins", at, survivors=3, mark=Mark(failed=0))
        return job.finish()


def link_cut(bench: HostCluster) -> ScenarioOutcome:
    """All packets to and from a host are dropped."""
    return _cut(bench, "link cut", "in both directions", bench.network.cut)


def link_cut_from(bench: HostCluster) -> ScenarioOutcome:
    """Packets from a host are dropped."""
    cut = bench.network.cut_one_way
    return _cut(bench, "link cut from", "for packets from the host", lambda h: cut(h, "from"))


def link_cut_towards(bench: HostCluster) -> ScenarioOutcome:
    """Packets to a host are dropped."""
    cut = bench.network.cut_one_way
    return _cut(bench, "link cut towards", "for packets to the host", lambda h: cut(h, "towards"))


def _cut(bench: HostCluster, name: str, how: str, cut: Callable[[str], float]) -> ScenarioOutcome:
    with bench.job(name) as job:
        job.start()
        at = cut(VICTIM)
        job.trains(REST, after=at)
        job.measure(f"the link of a host is cut {how}", at, survivors=3, mark=CUT)
        at = bench.network.heal(VICTIM)
        job.trains(HOSTS, after=at)
        job.measure("the link is restored", at, survivors=3, mark=Mark(failed=0))
        return job.finish()


def loss(bench: HostCluster) -> ScenarioOutcome:
    """Two of a hundred packets to and from a host are lost."""
    lose = bench.network.lose
    return _bad_link(bench, "loss", "2 % loss", lambda host: lose(host, 0.02), RECOVERS)


def slow_link(bench: HostCluster) -> ScenarioOutcome:
    """A host has a link of 10 Mbit/s."""
    slow = bench.network.slow
    return _bad_link(bench, "slow link", "10 Mbit/s", lambda host: slow(host, "10mbit"), RECOVERS)


def long_way(bench: HostCluster) -> ScenarioOutcome:
    """A host has a round-trip time of 200 ms. Each step needs several round trips."""
    delay, how = bench.network.delay, "a round-trip time of 200 ms"
    # Ten round trips: to regroup, to connect, and for the four collectives of a first step.
    recovers = Mark(next_step_ms=2000, interrupted=True)
    return _bad_link(bench, "long way", how, lambda host: delay(host, 0.1), recovers)


def _bad_link(
    bench: HostCluster, name: str, how: str, spoil: Callable[[str], float], recovers: Mark
) -> ScenarioOutcome:
    """Train over a bad link, and survive a failure elsewhere meanwhile."""
    with bench.job(name) as job:
        job.start()
        at = spoil(VICTIM)
        time.sleep(LASTS_S)
        job.trains(HOSTS, after=time.monotonic())
        job.measure(f"a host's link has {how}", at, survivors=4, mark=UNNOTICED)
        at = kill_worker(job, ANOTHER)
        job.trains(HOSTS, after=at)
        job.measure(
            "a worker of another host is killed during the fault", at, survivors=3, mark=recovers
        )
        return job.finish()


def etcd_killed(bench: HostCluster) -> ScenarioOutcome:
    """etcd is down twice; a worker is killed during an outage, and one after etcd has returned with its data."""
    with bench.job("etcd killed") as job:
        job.start()
        at = bench.etcd.kill()
        time.sleep(LASTS_S)
        job.trains(HOSTS, after=time.monotonic())
        bench.start_etcd()
        job.trains(HOSTS, after=time.monotonic())
        job.measure(f"etcd is unavailable for {LASTS_S:g} s", at, survivors=4, mark=UNNOTICED)
        at = kill_worker(job, ANOTHER)
        job.trains(HOSTS, after=at)
        job.measure("a worker is killed after the outage of etcd", at, survivors=3, mark=RECOVERS)
        bench.etcd.kill()
        at = kill_worker(job, ANOTHER)
        time.sleep(AWAY_S)
        bench.start_etcd()
        job.trains(HOSTS, after=at)
        mark = Mark(next_step_ms=1e3 * AWAY_S + 2500, interrupted=True)  # changes wait for etcd
        job.measure(
            f"a worker is killed while etcd is unavailable for {AWAY_S:g} s",
            at,
            survivors=3,
            mark=mark,
        )
        return job.finish()


def driver_killed(bench: HostCluster) -> ScenarioOutcome:
    """The driver is killed, with a standby."""
    with bench.job("driver killed") as job:
        job.start()
        stand_by(job)
        followed = job.followed()
        at = job.drivers[0].kill()
        _adopted(job, "the driver is killed while a standby driver runs", at, followed(at), ADOPTED)
        return job.finish()


def drivers_host_killed(bench: HostCluster) -> ScenarioOutcome:
    """The driver's host loses power, so its lease in etcd has to expire."""
    with bench.job("driver's host killed") as job:
        job.start()
        stand_by(job)
        followed = job.followed()
        at = bench.network.kill_host(DRIVER)
        _adopted(job, "the driver's host loses power", at, followed(at), ADOPTED_BY_LEASE)
        return job.finish()


def drivers_link_cut(bench: HostCluster) -> ScenarioOutcome:
    """The driver's host is cut off: the driver believes that it leads until the link is healed."""
    with bench.job("driver's link cut") as job:
        job.start()
        stand_by(job)
        followed = job.followed()
        at = bench.network.cut(DRIVER)
        adopted_ms = followed(at)
        bench.network.heal(DRIVER)
        code = job.drivers[0].wait()
        what = f"the driver's link is cut and restored (the driver exits with code {code})"
        _adopted(job, what, at, adopted_ms, ADOPTED_BY_LEASE)
        return job.finish()


def drivers_blip(bench: HostCluster) -> ScenarioOutcome:
    """The only driver is cut off for two leases, and training continues."""
    with bench.job("driver's blip") as job:
        for host in HOSTS:
            job.start_agent(host)
        job.start_driver("--driver-timeout", "60")
        job.trains(HOSTS, timeout=START_S)
        at = bench.network.cut(DRIVER)
        time.sleep(2 * LEASE_S)
        bench.network.heal(DRIVER)
        job.trains(HOSTS, after=time.monotonic())
        what = f"the only driver is disconnected for {2 * LEASE_S:g} s"
        job.measure(what, at, survivors=4, mark=UNNOTICED)
        return job.finish()


def driver_resumed(bench: HostCluster) -> ScenarioOutcome:
    """A driver that started its agents by ssh is killed and restarted."""
    with bench.job("driver resumed") as job:
        job.start_driver_by_ssh("--resume")
        job.trains(HOSTS, timeout=START_S)
        followed = job.followed()
        at = job.drivers[0].kill()
        job.start_driver_by_ssh("--resume")
        _adopted(
            job,
            "the driver is killed and immediately restarted with `--resume`",
            at,
            followed(at),
            ADOPTED,
        )
        return job.finish()


def _adopted(job: HostedJob, what: str, at: float, adopted_ms: float, mark: Mark) -> None:
    """Check that training was not affected, and that the new driver handles the next failure."""
    job.trains(HOSTS, after=time.monotonic())
    job.measure(what, at, survivors=4, mark=mark, adopted_ms=adopted_ms)
    at = kill_worker(job, ANOTHER)
    job.trains(HOSTS, after=at)
    job.measure("a worker is killed after the failover", at, survivors=3, mark=RECOVERS)


def driver_and_worker_killed(bench: HostCluster) -> ScenarioOutcome:
    """Driver and worker are killed at the same time: the standby finds a world that has lost a member."""
    with bench.job("driver and worker killed") as job:
        job.start()
        stand_by(job)
        followed = job.followed()
        victim = job.worker_pid(ANOTHER)
        at = job.drivers[0].signal(signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        adopted_ms = followed(at)
        job.trains(HOSTS, after=at)
        what = "the driver and a worker are killed at the same time"
        job.measure(what, at, survivors=3, mark=ADOPTED_HURT, adopted_ms=adopted_ms)
        return job.finish()


def two_drivers(bench: HostCluster) -> ScenarioOutcome:
    """Two drivers are started at the same time: one leads. After being stopped and continued, it must no longer act."""
    with bench.job("two drivers") as job:
        for host in HOSTS:
            job.start_agent(host)
        job.start_driver()
        job.start_driver(on=STANDBY)
        job.trains(HOSTS, timeout=START_S)
        acts = job.leader()
        followed = job.followed()
        at = acts.signal(signal.SIGSTOP)
        adopted_ms = followed(at)
        acts.signal(signal.SIGCONT)
        code = acts.wait()
        what = f"the leader of two drivers is stopped and continued (the leader exits with code {code})"
        _adopted(job, what, at, adopted_ms, ADOPTED_BY_LEASE)
        return job.finish()


def agent_killed(bench: HostCluster) -> ScenarioOutcome:
    """An agent is killed and restarted."""
    with bench.job("agent killed") as job:
        job.start()
        at = job.agents[VICTIM].kill()
        job.trains(REST, after=at)
        job.measure(
            "an agent is killed, which also ends its worker", at, survivors=3, mark=RECOVERS
        )
        at = time.monotonic()
        job.start_agent(VICTIM)
        job.trains(HOSTS, after=at)
        job.measure("the agent is restarted", at, survivors=3, mark=Mark(failed=0))
        return job.finish()


def ssh(bench: HostCluster) -> ScenarioOutcome:
    """The driver starts its agents by ssh, and a host is lost."""
    with bench.job("ssh") as job:
        job.start_driver_by_ssh()
        job.trains(HOSTS, timeout=START_S)
        at = bench.network.kill_host(VICTIM)
        job.trains(REST, after=at)
        job.measure(
            "a host whose agent was started over ssh loses power", at, survivors=3, mark=CUT
        )
        return job.finish()


def stand_by(job: HostedJob) -> None:
    """Start a standby driver. Returns once it stands by."""
    job.start_driver(on=STANDBY).wait_for(wording.STANDING_BY)


def kill_worker(job: HostedJob, host: str) -> float:
    at = time.monotonic()
    os.kill(job.worker_pid(host), signal.SIGKILL)
    return at


SCENARIOS: dict[str, Scenario] = {
    "host-killed": host_killed,
    "link-cut": link_cut,
    "link-cut-from": link_cut_from,
    "link-cut-towards": link_cut_towards,
    "loss": loss,
    "slow-link": slow_link,
    "long-way": long_way,
    "etcd-killed": etcd_killed,
    "driver-killed": driver_killed,
    "drivers-host-killed": drivers_host_killed,
    "drivers-link-cut": drivers_link_cut,
    "drivers-blip": drivers_blip,
    "driver-resumed": driver_resumed,
    "driver-and-worker-killed": driver_and_worker_killed,
    "two-drivers": two_drivers,
    "agent-killed": agent_killed,
    "ssh": ssh,
}
