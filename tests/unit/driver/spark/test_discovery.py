"""Hosts of Spark: the first list, decommissioned executors, and the time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from typing import Any

import pytest

from elastic.driver.spark import discovery as discovery_module
from elastic.driver.spark.discovery import SparkDiscovery
from elastic.driver.spark.task_environment import host_of

A, B, C = (host_of("node", str(number), number) for number in range(3))


class Bench:
    """A discovery, with its calls."""

    def __init__(self, **settings: Any) -> None:
        self.expired: list[str] = []
        self.lines: list[tuple[str, str]] = []
        self.leaving: set[str] = set()
        self.asked = threading.Event()
        usual: dict[str, Any] = {"wanted": 2, "least": 2, "start_s": 60.0}
        self.discovery = SparkDiscovery(
            **{**usual, **settings},
            expired=self.expired.append,
            leaving=self._leaving,
            log=lambda level, text: self.lines.append((level, text)),
        )

    def _leaving(self, executors: Collection[str]) -> set[str]:
        self.asked.set()
        return self.leaving & set(executors)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "LOOK_S", 0.001)
    monkeypatch.setattr(discovery_module, "SETTLE_S", 0.001)


async def test_first_list_has_all_slots():
    bench = Bench()
    lists = bench.discovery.watch()
    first = asyncio.ensure_future(anext(lists))
    bench.discovery.connected({A: 1})
    await asyncio.sleep(0)
    assert not first.done()
    bench.discovery.connected({A: 1, B: 1})
    assert await first == {A: 1, B: 1}
    await lists.aclose()


async def test_job_begins_with_the_least_if_no_more_are_coming():
    bench = Bench(wanted=3, least=1)
    bench.discovery.connected({A: 2})
    lists = bench.discovery.watch()
    assert await anext(lists) == {A: 2}
    bench.discovery.connected({A: 2, B: 1})
    assert await anext(lists) == {A: 2, B: 1}
    bench.discovery.connected({B: 1})
    assert await anext(lists) == {B: 1}
    await lists.aclose()


async def test_job_is_stopped_if_too_few_tasks_start_in_time():
    bench = Bench(start_s=0.0)
    lists = bench.discovery.watch()
    first = asyncio.ensure_future(anext(lists))
    while not bench.expired:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    assert len(bench.expired) == 1


async def test_decommissioned_executor_is_left_out():
    bench = Bench()
    bench.discovery.connected({A: 1, B: 1})
    lists = bench.discovery.watch()
    assert await anext(lists) == {A: 1, B: 1}
    bench.leaving = {"0", "2"}
    assert await anext(lists) == {B: 1}
    assert bench.lines[0][0] == "info"
    bench.discovery.connected({A: 1, B: 1, C: 1})
    await lists.aclose()


async def test_failed_query_does_not_change_the_hosts_and_is_logged_once():
    bench = Bench()

    def fail(executors: Collection[str]) -> set[str]:
        bench.asked.set()
        raise ConnectionRefusedError

    bench.discovery._leaving = fail
    bench.discovery.connected({A: 1, B: 1})
    lists = bench.discovery.watch()
    assert await anext(lists) == {A: 1, B: 1}
    following = asyncio.ensure_future(anext(lists))
    for _ in range(3):
        await asyncio.to_thread(bench.asked.wait)
        bench.asked.clear()
    bench.discovery.connected({A: 1, B: 2})
    assert await following == {A: 1, B: 2}
    assert [level for level, _ in bench.lines] == ["warning"]
    await lists.aclose()
