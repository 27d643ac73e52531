"""Cost of each folder of tests, printed after a run. With ``--budgets``, as in `make test`, a run fails if a folder
exceeds its budget by half.

The cost of a folder is the total time of its tests, including their set-up, over all processes. Light tests give way to
the others (see `spread`), so their cost is their CPU time. The budgets are for `make test` on an idle machine with two
cores. A slow or busy machine slows down all folders alike, while a folder that has grown exceeds the others. Budgets
are therefore scaled by the median of all folders' costs relative to their budgets if it is more than 1, separately for
light tests. A folder may have tests of both kinds. The comparison is fair only if all tests of a kind wait for
processors equally. If other programs keep the machine busy at the start of a run, costs are only printed. The programs
are counted at that moment, because the load average includes make's installation.
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import pytest

from harness.spread import light, scope

BUDGETS_S = {
    "": {
        "tests/cluster": 30.0,
        "tests/frameworks": 140.0,
        "tests/integration/collectives": 30.0,
        "tests/integration/etcd": 35.0,
        "tests/integration/hosts": 105.0,
        "tests/integration/jobs": 300.0,
        "tests/integration/launchers": 40.0,
        "tests/integration/ray": 105.0,
    },
    "light ": {
        "tests/charts": 12.0,
        "tests/conformance": 2.0,
        "tests/integration/collectives": 11.0,
        "tests/simulation": 22.0,
        "tests/unit": 16.0,
        "tests/unit/chaos": 1.0,
        "tests/unit/driver": 28.0,
        "tests/unit/elastic": 48.0,
        "tests/unit/horovod": 3.0,
        "tests/unit/stress": 2.0,
    },
}
TOO_MUCH = 1.5  # factor of the budget
SLACK_S = 10.0  # a small folder may vary by more than half
IDLE = 0.5  # at most as many other runnable tasks per core
LOOKS, LOOK_S = 20, 0.01


def folder_of(nodeid: str) -> str:
    """Return ``tests/unit/elastic`` for ``tests/unit/elastic/state/test_sampler.py::test_it``."""
    parts = nodeid.partition("::")[0].split("/")[:-1]
    return "/".join(parts[:3] if parts[1:2] in (["unit"], ["integration"]) else parts[:2])


def too_dear(
    costs_s: Mapping[str, float], budgets_s: Mapping[str, float]
) -> tuple[float, list[str]]:
    """Return the slowdown of all folders, at least 1, and a sentence for each that exceeds its budget despite it."""
    ratios = [costs_s[folder] / budget for folder, budget in budgets_s.items() if folder in costs_s]
    slower = max(1.0, statistics.median(ratios)) if ratios else 1.0
    return slower, [
        f"{folder} took {cost:.0f} s; its budget is {budgets_s[folder] * slower:.0f} s"
        for folder, cost in sorted(costs_s.items())
        if folder in budgets_s
        and cost > slower * max(budgets_s[folder] * TOO_MUCH, budgets_s[folder] + SLACK_S)
    ]


def processors_s() -> float:
    """Return the CPU time of this process so far, with all its threads and reaped children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def others() -> float:
    """Return the number of other tasks of this machine that run or wait for a core: the mean of some samples."""
    found = 0
    for _ in range(LOOKS):
        running = re.search(r"^procs_running (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
        found += int(running[1]) - 1 if running is not None else 0
        time.sleep(LOOK_S)
    return found / LOOKS


class Meter:
    """Attaches the CPU time of a test's part to its report, in the process that runs it."""

    def __init__(self) -> None:
        self._before_s = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._before_s = processors_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = processors_s()
        report.processors_s = now_s - self._before_s  # type: ignore[attr-defined]  # travels with it
        self._before_s = now_s
        return report


class Costs:
    """Adds up the reports, in the reporting process."""

    def __init__(self, enforced: bool) -> None:
        self.enforced = enforced
        self.busy = others() / (os.cpu_count() or 1) if enforced else 0.0
        self.took_s: dict[str, dict[str, float]] = {kind: defaultdict(float) for kind in BUDGETS_S}
        self.costs_s: dict[str, dict[str, float]] = {kind: defaultdict(float) for kind in BUDGETS_S}
        self.slower: dict[str, float] = {}
        self.trouble: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = "light " if light(scope(report.nodeid)) else ""
        cost_s = getattr(report, "processors_s", 0.0) if kind else report.duration
        folder = folder_of(report.nodeid)
        self.took_s[kind][folder] += report.duration
        self.costs_s[kind][folder] += cost_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        for kind, budgets_s in BUDGETS_S.items():
            self.slower[kind], trouble = too_dear(self.costs_s[kind], budgets_s)
            if self.enforced and self.busy <= IDLE:
                self.trouble += [f"{kind}{sentence}" for sentence in trouble]
        if self.trouble and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> Iterator[str]:
        for kind, budgets_s in BUDGETS_S.items():
            for folder, took in sorted(self.took_s[kind].items()):
                known = self.enforced and folder in budgets_s
                used = f", of processors {self.costs_s[kind][folder]:6.1f} s" if kind else ""
                budget = f" of {budgets_s[folder]:4.0f} s" if known else ""
                yield f"{took:7.1f} s{used}{budget}  {kind}{folder}"
        for kind, slower in self.slower.items():
            if self.enforced and slower > 1.0:
                yield f"budgets are scaled by {slower:.1f}: most {kind}folders took that much longer"
        if self.enforced and self.busy > IDLE:
            yield f"budgets are not enforced: {self.busy:.1f} others per core wanted to run at first"
        yield from (f"over budget: {sentence}" for sentence in self.trouble)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budgets", action="store_true", help="fail where a folder of tests takes too long"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in a process of pytest-xdist
        config.pluginmanager.register(Costs(config.getoption("--budgets")), "costs")
    config.pluginmanager.register(Meter(), "meter")
