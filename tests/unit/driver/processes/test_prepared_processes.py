"""Preloaded processes: how they end."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import pytest

from elastic.driver.processes import orphan_reaper, prepared_processes
from elastic.driver.processes.prepared_processes import AVAILABLE_BYTES_MIN, PreparedProcesses

COMMAND = ["python", "train.py"]


class SlowToDie:
    """A process that exits some time after SIGKILL."""

    stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, seconds: float) -> int:
        if self.returncode is None:
            raise subprocess.TimeoutExpired(COMMAND, seconds)
        return self.returncode


class Kept:
    """Preloaded processes that run, and what was recorded of them."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepared_processes, "QUIET_S", 0.0)
        self.killed: list[int] = []
        monkeypatch.setattr(orphan_reaper, "kill_group", self.killed.append)
        self.count = count
        self.processes: list[SlowToDie] = []
        self.gone: list[int] = []
        self.levels: list[str] = []
        self.ready = asyncio.Event()
        self.prepared = PreparedProcesses(
            f"auto,{count}",
            spawn=self._spawn,
            gone=self.gone.append,
            available=lambda: AVAILABLE_BYTES_MIN,
            log=lambda level, text: self.levels.append(level),
        )

    def _spawn(self, *arguments: Any) -> Any:
        self.processes.append(SlowToDie(1 + len(self.processes)))
        if len(self.processes) == self.count:
            self.ready.set()
        return self.processes[-1]

    async def start(self) -> None:
        assert self.prepared.take(COMMAND, {}, None) is None
        await asyncio.wait_for(self.ready.wait(), 60)


def test_close_when_processes_die_slowly_then_all_are_killed_without_a_wait_or_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        kept = Kept(2, monkeypatch)
        await kept.start()
        kept.prepared.close()
        assert sorted(kept.killed) == [1, 2]
        assert sorted(kept.prepared.dying()) == [1, 2]
        kept.processes[0].returncode = -9
        assert kept.prepared.dying() == [2]
        assert kept.gone == [1]
        kept.processes[1].returncode = -9
        assert kept.prepared.dying() == []
        assert kept.gone == [1, 2]
        assert kept.levels == []

    asyncio.run(run())


def test_take_when_the_process_does_not_fit_then_it_is_killed_and_reaped_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        kept = Kept(1, monkeypatch)
        await kept.start()
        assert kept.prepared.take(["python3", "train.py"], {}, None) is None
        assert kept.killed == [1]
        assert kept.levels == ["info"]  # why it was not used
        kept.processes[0].returncode = -9
        kept.prepared.close()
        assert kept.prepared.dying() == []
        assert kept.gone == [1]

    asyncio.run(run())
