"""Bandwidth of hosts: real transfers, and a job on network namespaces in which one host has a slow link."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from elastic.driver.agents import bandwidth_transfer
from elastic.driver.agents.bandwidth_transfer import MEASURING, ROLE, BandwidthMeter
from elastic.driver.agents.messages import AgentId, BandwidthFound, BandwidthServed
from elastic.driver.events import BandwidthMeasured, HealthOutcome, KillWorker, Report
from elastic.driver.journal.journal import read
from elastic.driver.network.control_server import ControlServer
from elastic.driver.network.secret import derived
from elastic.driver.reasons import ReasonKind
from elastic.protocol.messages import Address
from harness.ports import free_ports
from harness.waiting import wait_until
from stress.hosts.cluster import CHANGE_S, HOSTS, START_S, HostCluster, HostedJob
from stress.hosts.namespaces import obstacle

LOOPBACK = "127.0.0.1"
SECRET = bytes(range(32))
VICTIM, REST = "d", ("a", "b", "c")
RATE, RATE_BYTES_S = "10mbit", 1.25e6


def meter(host: str, heard: list, secret: bytes = SECRET) -> BandwidthMeter:
    return BandwidthMeter(
        AgentId(host, 1), secret, (None, None), send=heard.append, log=lambda *line: None
    )


async def measured(
    caller: str = "b", expected: str = "b", secret: bytes = SECRET
) -> BandwidthMeasured:
    """Return what the agent of host b reports about the bandwidth to host a."""
    served: list[BandwidthServed] = []
    found: list[BandwidthFound] = []
    server = meter("a", served)
    serving = asyncio.ensure_future(server.serve(LOOPBACK, expected))
    while not served:
        await asyncio.sleep(0.001)
    assert served[0].address is not None
    await meter(caller, found, secret).call("a", served[0].address)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await server.close()
    return found[0].event


async def test_agents_measure_both_directions():
    event = await measured()
    assert (event.host, event.peer, event.trouble) == ("b", "a", "")
    assert event.sent is not None and event.sent > RATE_BYTES_S
    assert event.received is not None and event.received > RATE_BYTES_S


@pytest.mark.parametrize("other", [{"secret": bytes(32)}, {"expected": "c"}])
async def test_caller_without_the_secret_or_of_another_host_is_refused(other):
    event = await measured(**other)
    assert event.trouble and event.sent is event.received is None


async def test_peer_that_does_not_answer_is_no_low_bandwidth():
    server: ControlServer[AgentId] = ControlServer(
        secret=derived(SECRET, ROLE), log=lambda *line: None, callers=MEASURING, tls=None
    )
    address = await server.open(
        LOOPBACK,
        received=lambda agent, message: None,
        gone=lambda agent, silent: None,
        expected=lambda agent: True,
    )
    found: list[BandwidthFound] = []
    with patch.object(bandwidth_transfer, "LIMIT_S", 0.5):
        await meter("b", found).call("a", address)
    await server.close()
    assert found[0].event.trouble and found[0].event.sent is None


async def test_address_that_cannot_be_bound_is_reported():
    served: list[BandwidthServed] = []
    await meter("a", served).serve("192.0.2.1", "b")
    assert served[0].address is None and served[0].trouble


async def test_bandwidth_measurement_to_a_closed_port_is_reported():
    found: list[BandwidthFound] = []
    await meter("b", found).call("a", Address(LOOPBACK, free_ports(1)[0]))
    assert found[0].event.trouble and found[0].event.sent is None


# ---- a job -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path) -> Iterator[HostCluster]:
    with HostCluster(tmp_path) as bench:
        yield bench


def results(job: HostedJob) -> list[BandwidthMeasured]:
    """Return the results about the slow host."""
    _, entries = read(job.journals[0])
    return [
        each.event
        for each in entries
        if isinstance(each.event, BandwidthMeasured) and each.event.host == VICTIM
    ]


def rejected(job: HostedJob) -> list[KillWorker]:
    _, entries = read(job.journals[0])
    kills = [a for each in entries for a in each.actions if isinstance(a, KillWorker)]
    low = HealthOutcome.LOW_BANDWIDTH.value
    return [each for each in kills if each.reason.facts.get("outcome") == low]


def logged(job: HostedJob) -> list[Report]:
    """Return the log lines of failed health checks."""
    _, entries = read(job.journals[0])
    lines = [a for each in entries for a in each.actions if isinstance(a, Report) and a.about]
    unhealthy = [a for a in lines if a.about and a.about.kind is ReasonKind.UNHEALTHY]
    return [each for each in unhealthy if each.level == "error"]


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why := obstacle(sshd=True)), reason=why)
def test_host_with_a_slow_link_trains_only_once_its_link_is_fast(bench):
    with bench.job("slow link") as job:
        bench.network.slow(VICTIM, RATE)
        job.start_driver_by_ssh("--health-check", "auto")
        job.trains(REST, timeout=START_S)
        wait_until(lambda: len(rejected(job)) >= 3, "three rejections", CHANGE_S)
        assert {each.worker.host for each in rejected(job)} == {VICTIM}
        for event in results(job)[:3]:
            assert event.trouble == "" and event.sent is not None and event.received is not None
            assert 0.5 * RATE_BYTES_S < event.sent < 2 * RATE_BYTES_S
            assert 0.5 * RATE_BYTES_S < event.received < 2 * RATE_BYTES_S
        assert len(logged(job)) == 1
        bench.network.heal(VICTIM)
        job.trains(HOSTS)
        assert job.finish().troubles == []
