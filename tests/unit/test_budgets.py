"""Folders of tests that take too long are reported."""

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import create_autospec

import pytest

import harness
from harness.budgets import Costs, folder_of, others, processors_s, too_dear
from harness.program import stdout_of

BUDGETS_S = {"a": 100.0, "b": 200.0, "c": 10.0}


def test_costs_are_assigned_to_the_folder_of_their_subject():
    assert folder_of("tests/unit/elastic/state/test_x.py::test_y[1/2]") == "tests/unit/elastic"
    assert folder_of("tests/integration/ray/test_x.py::test_y") == "tests/integration/ray"
    assert folder_of("tests/simulation/test_x.py::test_y") == "tests/simulation"
    assert folder_of("tests/unit/test_layers.py::test_y") == "tests/unit"


def test_folder_that_exceeds_its_budget_by_half_is_reported():
    assert too_dear({"a": 150.0, "b": 100.0, "c": 5.0}, BUDGETS_S) == (1.0, [])
    slower, (sentence,) = too_dear({"a": 151.0, "b": 100.0, "c": 5.0}, BUDGETS_S)
    assert slower == 1.0 and sentence == "a took 151 s; its budget is 100 s"


def test_small_folder_has_some_seconds_of_slack():
    assert too_dear({"a": 90.0, "b": 100.0, "c": 20.0}, BUDGETS_S)[1] == []
    assert len(too_dear({"a": 90.0, "b": 100.0, "c": 20.5}, BUDGETS_S)[1]) == 1


def test_slow_machine_scales_the_budgets_of_all_folders():
    slow = {"a": 300.0, "b": 500.0, "c": 40.0}
    assert too_dear(slow, BUDGETS_S) == (3.0, [])
    slower, (sentence,) = too_dear(slow | {"b": 1300.0}, BUDGETS_S)
    assert slower == 4.0 and sentence == "b took 1300 s; its budget is 800 s"


def test_folders_without_a_budget_or_cost_are_ignored():
    assert too_dear({"d": 9999.0}, BUDGETS_S) == (1.0, [])
    assert too_dear({"a": 151.0}, BUDGETS_S)[0] == 1.51


def test_light_tests_are_counted_by_processor_time(monkeypatch):
    """How long it takes says how busy the others are: what it uses of the processors counts."""
    monkeypatch.setattr("harness.budgets.others", lambda: 0.0)
    costs = Costs(enforced=True)

    def took(nodeid: str, duration_s: float, processors_s: float) -> None:
        report = create_autospec(pytest.TestReport, instance=True)
        report.nodeid, report.duration, report.processors_s = nodeid, duration_s, processors_s
        costs.pytest_runtest_logreport(report)

    for name in ("simulation/test_a", "unit/test_b", "unit/driver/test_c"):
        took(f"tests/{name}.py::test_it", 900.0, 20.0)
    took("tests/integration/collectives/test_ops.py::test_it[2-ranks]", 900.0, 500.0)
    took("tests/integration/collectives/test_store.py::test_it", 80.0, 500.0)
    session = create_autospec(pytest.Session, instance=True)
    costs.pytest_sessionfinish(session, pytest.ExitCode.OK)
    (sentence,) = costs.trouble
    assert sentence.startswith("light tests/integration/collectives took 500 s")
    assert "  900.0 s, of processors   20.0 s of " in "\n".join(costs.lines())


def test_processor_time_includes_child_processes():
    before_s = processors_s()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    with_child_s = processors_s()
    sum(range(10**7))
    assert before_s < with_child_s < processors_s()


def test_run_reports_the_processor_time_of_its_light_tests(tmp_path):
    folder = tmp_path / "tests/unit"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text("def test_it(): sum(range(10**7))")
    plugins = ("-p", "harness.spread", "-p", "harness.budgets", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", *plugins, "--rootdir", str(tmp_path), str(folder))
    env = {"PYTHONPATH": str(Path(harness.__path__[0]).parent)}
    said = stdout_of(*command, env=env)
    used = re.search(r"of processors +([\d.]+) s  light tests/unit", said)
    assert used is not None and float(used[1]) > 0.0


def test_running_processes_of_the_machine_are_counted():
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        assert others() > 1.5
    finally:
        for each in running:
            each.kill()
            each.wait()
