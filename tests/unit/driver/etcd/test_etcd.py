"""etcd client without an etcd: detection and logging of outages, valid names and addresses."""

from __future__ import annotations

import asyncio

import pytest

from elastic.driver.etcd.client import EtcdClient
from elastic.driver.etcd.connection import Unavailable
from elastic.driver.etcd.keys import (
    LeaderAddress,
    LeaderRecord,
    check_host,
    job_root,
    leader_of,
    read_leader,
    split_address,
)
from elastic.driver.etcd.outage_detection import Availability
from elastic.driver.network.credentials import EtcdAccess
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.errors import Invalid
from harness.golden import raises

AWAY = because(ReasonKind.STORE_SILENT, store="e:1", text="connection refused")


def contact() -> Availability:
    return Availability("e:1", 100.0, grace_s=3.0, gap_s=2.5)


def test_short_outage_is_not_logged():
    etcd = contact()
    assert etcd.failed("connection refused", 101.0) is None
    assert etcd.failed("no leader", 102.9) is None
    assert etcd.answered(103.0) is None


def test_long_outage_and_its_end_are_logged_once():
    etcd = contact()
    assert etcd.answered(110.0) is None
    assert etcd.failed("connection refused", 113.0) == ("warning", AWAY)
    assert etcd.failed("connection refused", 114.0) is None
    assert etcd.failed("something else", 150.0) is None
    back = because(ReasonKind.STORE_BACK, store="e:1", silent_s=60.0)
    assert etcd.answered(170.0) == ("info", back)
    assert etcd.answered(170.1) is None
    assert etcd.failed("connection refused", 173.1) == ("warning", AWAY)


def test_idle_time_is_no_outage():
    etcd = contact()
    assert etcd.answered(1000.0) is None


def test_connection_is_unsettled_for_a_while_after_an_outage():
    etcd = contact()
    etcd.answered(102.0)
    assert etcd.unsettled_s(102.0, 6.0) == 0.0
    etcd.answered(104.5)
    assert etcd.unsettled_s(104.5, 6.0) == 6.0
    etcd.answered(105.5)
    assert etcd.unsettled_s(106.5, 6.0) == 4.0
    assert etcd.unsettled_s(111.0, 6.0) == 0.0


@pytest.mark.parametrize("job", ["", "a/b", "a\nb", "x" * 201])
def test_invalid_job_names_are_rejected(job):
    with raises(Invalid):
        job_root(job)


def test_host_may_be_an_address():
    assert check_host("::1") == "::1"
    assert check_host("gpu7.example") == "gpu7.example"
    for name in ("", "a b", "a/b", "a:2"):
        with pytest.raises(Invalid):
            check_host(name)


def test_address_of_the_driver_is_parsed():
    assert leader_of(LeaderRecord(3, *split_address("[::1]:99"))) == LeaderAddress("[::1]:99", 3)
    assert leader_of(LeaderRecord(3, *split_address("a:99"))) == LeaderAddress("a:99", 3)
    assert leader_of(LeaderRecord(3)) is None
    assert leader_of(None) is None
    assert read_leader(b"\xff") is None
    assert read_leader(b"{}") is None


@pytest.mark.parametrize("address", ["", "a", "a:", "a:0", "a:65536", ":9", "a:b"])
def test_invalid_address_is_rejected(address):
    with raises(Invalid):
        split_address(address)


@pytest.mark.parametrize("endpoints", [[], ["a"], ["a:1", "http://b:2"], ["a:1", "b:70000"]])
def test_invalid_endpoints_are_rejected(endpoints):
    async def make() -> None:
        EtcdClient(EtcdAccess(endpoints), lambda level, text: None)

    with raises(Invalid):
        asyncio.run(make())


async def test_subscriber_is_notified_of_an_outage():
    lines: list[tuple[str, str]] = []
    reasons: list[Reason] = []
    etcd = EtcdClient(EtcdAccess(["127.0.0.1:9"]), lambda *line: lines.append(line), grace_s=0.0)
    etcd.set_listener(reasons.append)
    with pytest.raises(Unavailable):
        await etcd.get("/hvd-elastic/x", within_s=0.2)
    await etcd.close()
    assert [reason.kind for reason in reasons] == [ReasonKind.STORE_SILENT]
    assert lines == [("warning", str(reasons[0]))]
