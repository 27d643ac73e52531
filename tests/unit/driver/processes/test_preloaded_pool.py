"""Preloaded processes: how they end."""

from __future__ import annotations

import asyncio
import subprocess
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.driver.processes import orphan_reaper_program, preloaded_pool
from elastic.driver.processes.preloaded_pool import AVAILABLE_BYTES_MIN, DEATH_S, PreparedProcesses

COMMAND = ["python", "train.py"]


class Kept:
    """Preloaded processes that exit some time after SIGKILL, on a clock that only waiting advances."""

    def __init__(
        self, count: int, monkeypatch: pytest.MonkeyPatch, *, dies_after_s: float = 0.0
    ) -> None:
        self.now, self.count, self.dies_after_s = 0.0, count, dies_after_s
        self.killed: dict[int, float] = {}
        self.processes: list[Any] = []
        self.gone: list[int] = []
        self.levels: list[str] = []
        self.ready = asyncio.Event()
        for name in ("QUIET_S", "LOOK_S"):
            monkeypatch.setattr(preloaded_pool, name, 0.0)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(preloaded_pool, "time", clock)
        monkeypatch.setattr(orphan_reaper_program, "kill_group", self._kill)
        self.prepared = PreparedProcesses(
            f"auto,{count}",
            spawn=self._spawn,
            gone=self.gone.append,
            available=lambda: AVAILABLE_BYTES_MIN,
            log=lambda level, text: self.levels.append(level),
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _kill(self, pid: int) -> None:
        self.killed[pid] = self.now

    def _spawn(self, *arguments: Any) -> Any:
        process = create_autospec(subprocess.Popen, instance=True)
        process.pid, process.returncode = 1 + len(self.processes), None
        process.stdout = process.stderr = None
        process.poll.side_effect = lambda: self._poll(process.pid)
        self.processes.append(process)
        if len(self.processes) == self.count:
            self.ready.set()
        return process

    def _poll(self, pid: int) -> int | None:
        killed_at = self.killed.get(pid)
        exited = killed_at is not None and self.now >= killed_at + self.dies_after_s
        return -9 if exited else None

    async def start(self) -> None:
        assert self.prepared.take(COMMAND, {}, None) is None
        await asyncio.wait_for(self.ready.wait(), 60)


async def test_close_when_processes_die_slowly_then_all_are_killed_before_the_wait(monkeypatch):
    kept = Kept(3, monkeypatch, dies_after_s=DEATH_S - 1)
    await kept.start()
    kept.prepared.close()
    assert kept.killed == {1: 0.0, 2: 0.0, 3: 0.0}
    assert sorted(kept.gone) == [1, 2, 3] and kept.levels == []
    assert kept.now < DEATH_S  # not for each of them


async def test_close_when_processes_do_not_die_then_each_is_reported_once_after_one_wait(
    monkeypatch,
):
    kept = Kept(2, monkeypatch, dies_after_s=2 * DEATH_S)
    await kept.start()
    kept.prepared.close()
    assert kept.levels == ["warning", "warning"] and kept.gone == []
    assert DEATH_S <= kept.now < DEATH_S + 1


async def test_take_when_the_process_does_not_fit_then_is_killed_and_reaped_without_a_wait(
    monkeypatch,
):
    kept = Kept(1, monkeypatch, dies_after_s=1.0)
    await kept.start()
    assert kept.prepared.take(["python3", "train.py"], {}, None) is None
    assert kept.killed == {1: 0.0} and kept.now == 0.0
    assert kept.levels == ["info"] and kept.gone == []  # why it was not used
    kept.now = 1.0
    while not kept.gone:
        await asyncio.sleep(0)
    assert kept.gone == [1] and kept.now == 1.0
