"""Report of processes that outlive the last test and its fixtures, at the end of a run.

Their CPU time is in no budget, since only reaped children are counted there. All of them, including orphans, are found
by a mark in their environment and by their parent processes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import psutil
import pytest

MARK = "TEST_RUN"
# Children of the process itself that end with it and serve all of its tests.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "harness/forking.py")
COMMAND = 100  # shown characters of it


class Process(NamedTuple):
    """A live process."""

    parent: int
    used_s: float  # of processors
    command: str
    environment: Mapping[str, str]


def living() -> dict[int, Process]:
    """Return all processes with a readable environment, by pid; no zombies."""
    found = {}
    for each in psutil.process_iter(["ppid", "status", "cpu_times", "cmdline", "environ"]):
        read = each.info
        if read["environ"] is not None and read["status"] != psutil.STATUS_ZOMBIE:
            used_s = read["cpu_times"].user + read["cpu_times"].system
            command = " ".join(read["cmdline"] or ())
            found[each.pid] = Process(read["ppid"], used_s, command, read["environ"])
    return found


def started_by(me: int, mark: str, processes: Mapping[int, Process]) -> Iterator[int]:
    """Return the pids of descendants of this process."""
    known: set[int] = {pid for pid, each in processes.items() if each.environment.get(MARK) == mark}
    more = known | {me}
    while more:
        known |= more
        more = {pid for pid, each in processes.items() if each.parent in known} - known
    yield from sorted(known - {me})


def sentences(me: int, mark: str, processes: Mapping[int, Process]) -> list[str]:
    """Return a line for each remaining process."""
    told = []
    for each in (processes[pid] for pid in started_by(me, mark, processes)):
        if each.parent != me or not any(helper in each.command for helper in HELPERS):
            test = each.environment.get("PYTEST_CURRENT_TEST", "a test")
            used = f"{each.used_s:.1f} s of processors so far"
            told.append(f"left behind by {test}, {used}: {each.command[:COMMAND]}")
    return told


class Leftovers:
    """Checks each process that runs tests, and reports in the reporting process."""

    def __init__(self, config: pytest.Config) -> None:
        self._mark = uuid.uuid4().hex
        self._told: list[str] = []
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        os.environ[MARK] = self._mark

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        found = sentences(os.getpid(), self._mark, living())
        if self._output is None:
            self._told += found
        else:
            self._output["left_behind"] = found

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Hook of pytest-xdist: one of its processes has ended."""
        self._told += getattr(node, "workeroutput", {}).get("left_behind", [])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._told:
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Leftovers(config), "leftovers")
