"""Jobs on many hosts, each a network namespace: real agents, real etcd, real sshd. The essential handful.

The rest is played by `python -m tests.stress hosts`, which also writes docs/hosts.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stress.hosts import scenarios
from stress.hosts.cluster import HOSTS, HostCluster
from stress.hosts.namespaces import obstacle
from stress.hosts.report import Mark
from stress.hosts.scenarios import ADOPTED, CUT, VICTIM

THREE = HOSTS[1:]  # each host starts an agent and a worker, which take seconds of processor time
TWO = tuple(host for host in THREE if host != VICTIM)
SLACK = 5.0  # how fast it is, the command measures: a machine that runs tests does other things too


pytestmark = [
    pytest.mark.etcd,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why := obstacle(sshd=True)), reason=why),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[HostCluster]:
    with HostCluster(tmp_path_factory.mktemp("hosts"), slack=SLACK) as bench:
        bench.start_etcd()
        yield bench


def test_job_survives_loss_of_its_driver_a_cut_link_and_loss_of_a_host(bench):
    with bench.job("in a row", hosts=THREE) as job:
        job.start()
        scenarios.stand_by(job)
        followed = job.followed()
        at = job.drivers[0].kill()
        adopted_ms = followed(at)
        job.trains(THREE)
        job.measure("driver killed", at, survivors=3, mark=ADOPTED, adopted_ms=adopted_ms)
        at = bench.network.cut(VICTIM)
        job.trains(TWO, after=at)
        job.measure("link cut", at, survivors=2, mark=CUT)
        at = bench.network.heal(VICTIM)
        job.trains(THREE, after=at)
        job.measure("link healed", at, survivors=2, mark=Mark(failed=0))
        at = bench.network.kill_host(VICTIM)
        job.trains(TWO, after=at)
        job.measure("host killed", at, survivors=2, mark=CUT)
        assert job.finish().troubles == []


@pytest.mark.nightly
def test_stopped_driver_cannot_act_after_its_successor_takes_over(bench):
    assert scenarios.two_drivers(bench).troubles == []


@pytest.mark.nightly
def test_a_job_started_by_ssh_continues_with_another_driver(bench):
    assert scenarios.driver_resumed(bench).troubles == []
