"""Hosts behind a headless service: changing names, missing pods, and a failing name server."""

from __future__ import annotations

import asyncio
import socket

from elastic.driver.discovery.kubernetes.headless_service import HeadlessServiceDiscovery
from elastic.driver.network.name_lookup import Found
from harness.golden import recorded

A, B, C, D = "10.0.0.6", "10.0.0.7", "10.0.0.10", "10.0.0.8"
A6, B6 = "fd00::6", "fd00::7"
NOT_KNOWN = OSError("workers.lab could not be resolved: Name or service not known")
LATE = OSError("workers.lab could not be resolved within 5 s")


class OutOfAnswers(Exception):
    """The conversation has ended."""


def watched(*answers: list[str] | OSError) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Return the yielded lists of hosts and the log while the name server gives these answers."""
    left = list(answers)
    log: list[tuple[str, str]] = []

    async def resolve(name: str, port: int, timeout_s: float) -> Found:
        assert (name, timeout_s) == ("workers.lab", 5.0)
        answer = left.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(int(socket.AF_INET6 if ":" in each else socket.AF_INET), each) for each in answer]

    async def sleep(seconds: float) -> None:
        assert seconds == 2.0
        if not left:
            raise OutOfAnswers

    async def conversation() -> list[list[str]]:
        discovery = HeadlessServiceDiscovery(
            "workers.lab",
            4,
            lambda level, text: log.append((level, text)),
            resolve=resolve,
            interval_s=2.0,
            sleep=sleep,
        )
        lists = []
        try:
            async for hosts in discovery.watch():
                assert set(hosts.values()) == {4}
                lists.append(list(hosts))
        except OutOfAnswers:
            pass
        return lists

    return asyncio.run(conversation()), log


def test_pods_are_added_and_removed():
    assert watched([A], [A, B], [A, B], [B]) == ([[A], [A, B], [B]], [])


def test_order_is_numerical_and_existing_hosts_keep_their_order():
    lists, _ = watched([C, B], [A, C, B], [C, A, B], [D, C, B, A], [D, A, B])
    assert lists == [[B, C], [B, C, A], [B, C, A, D], [B, A, D]]


def test_failing_name_server_does_not_change_the_hosts():
    assert watched([A, B], LATE, LATE, NOT_KNOWN, [B, A], [A]) == (
        [[A, B], [A]],
        [
            (
                "warning",
                "service workers.lab: workers.lab could not be resolved within 5 s; keeping 10.0.0.6:4,10.0.0.7:4",
            ),
            (
                "warning",
                "service workers.lab: workers.lab could not be resolved: Name or service not known;"
                " keeping 10.0.0.6:4,10.0.0.7:4",
            ),
            ("info", "service workers.lab was found again"),
        ],
    )


def test_answer_without_pods_does_not_change_the_hosts():
    lists, log = watched([A], [], [], [A])
    assert lists == [[A]]
    recorded("log", [text for _, text in log])


def test_pods_may_appear_later():
    lists, log = watched(NOT_KNOWN, NOT_KNOWN, [A])
    assert lists == [[A]]
    recorded("log", log[0][1])
    assert [level for level, _ in log] == ["warning", "info"]


def test_pod_with_both_families_is_one_host():
    assert watched([A6, A, B6, B], [A6, A])[0] == [[A, B], [A]]
    assert watched([A6, B6], [B6])[0] == [[A6, B6], [B6]]


def test_partial_answer_is_ignored():
    """The query for A records failed but the one for AAAA did not: the pods still exist."""
    lists, log = watched([A6, A, B6, B], [A6, B6], [A6, A, B6, B])
    assert lists == [[A, B]]
    assert [level for level, _ in log] == ["warning", "info"]
