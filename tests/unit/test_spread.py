"""A dead process of pytest-xdist fails its test, and neither the others nor the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import execnet
import pytest
from xdist.remote import Producer
from xdist.workermanage import WorkerController

from harness.spread import longest_first, pytest_xdist_make_scheduler, together

HARNESS = Path(__file__).parents[1]
NAMES = ("first", "second", "last")


def test_longest_scopes_are_scheduled_first():
    first, ray, unit = "cluster", "tests/integration/ray/test_ray_faults.py", "tests/unit/test_x.py"
    scopes = [unit, ray, "tests/unit/test_a.py", first]
    assert longest_first(scopes) == [first, ray, unit, "tests/unit/test_a.py"]


def test_replacement_process_gets_no_work_before_its_collection(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """Two that die at once: the first to take a place is ready, and the second is not."""
    monkeypatch.setattr(request.config.option, "tx", ["2*popen"], raising=False)
    monkeypatch.setattr(request.config.option, "filler", False)
    scheduler = pytest_xdist_make_scheduler(request.config, Producer("scheduler"))
    tests = [f"test_{module}.py::test_{name}" for module in "abcdefgh" for name in NAMES]

    def comes() -> Any:
        gateway = create_autospec(execnet.Gateway, instance=True, id="gw")
        node = create_autospec(
            WorkerController, instance=True, shutting_down=False, gateway=gateway
        )
        scheduler.add_node(node)
        return node

    first, second = comes(), comes()
    scheduler.add_node_collection(first, tests)
    scheduler.add_node_collection(second, tests)
    scheduler.schedule()
    died = [scheduler.remove_node(first), scheduler.remove_node(second)]
    assert len(set(died)) == 2
    third, fourth = comes(), comes()
    scheduler.add_node_collection(third, tests)
    scheduler.schedule()
    assert third.send_runtest_some.called and not fourth.send_runtest_some.called
    scheduler.add_node_collection(fourth, tests)
    scheduler.schedule()
    assert fourth.send_runtest_some.called


def test_filler_gets_light_tests_and_other_processes_get_them_last(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(request.config.option, "tx", ["3*popen"], raising=False)
    monkeypatch.setattr(request.config.option, "filler", True)
    scheduler = pytest_xdist_make_scheduler(request.config, Producer("scheduler"))
    rooms = ["unit/a", "unit/b", "integration/c", "integration/d", "simulation/e", "cluster/f"]
    tests = [f"tests/{room}.py::test_{name}" for room in rooms for name in NAMES]
    nodes = [create_autospec(WorkerController, instance=True, shutting_down=False) for _ in "abc"]
    for number, node in zip((2, 0, 1), nodes, strict=True):  # who is ready first is the last
        node.gateway = create_autospec(execnet.Gateway, instance=True, id=f"gw{number}")
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    filler, *others = nodes

    def has(node: Any) -> list[str]:
        """The rooms of all that it was told to run."""
        told = [at for call in node.send_runtest_some.call_args_list for at in call.args[0]]
        return [rooms[at // len(NAMES)] for at in told[:: len(NAMES)]]

    def ends_one(node: Any) -> None:
        unit = next(
            unit for unit in scheduler.assigned_work[node].values() if False in unit.values()
        )
        for test in unit:
            scheduler.mark_test_complete(node, tests.index(test))

    scheduler.schedule()
    assert [has(node) for node in nodes] == [["unit/a"], ["integration/c"], ["integration/d"]]
    for node in nodes:
        ends_one(node)
    assert has(filler) == ["unit/a", "unit/b"] and not filler.shutdown.called
    assert [has(node)[1] for node in others] == ["cluster/f", "simulation/e"]
    ends_one(filler)
    assert len(has(filler)) == 2 and filler.shutdown.called


@pytest.mark.slow
def test_run_completes_all_other_tests_after_a_crash(tmp_path: Path):
    """Whether the first of a file dies or the last."""
    for module, dies in (("one", ""), ("two", "first"), ("three", "last")):
        bodies = {name: "os._exit(3)" if name == dies else "None" for name in NAMES}
        tests = "".join(f"def test_{name}(): {body}\n" for name, body in bodies.items())
        (tmp_path / f"test_{module}.py").write_text(f"import os\n{tests}")
    (tmp_path / "conftest.py").write_text("from harness.spread import *\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {HARNESS}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 7 passed" in done.stdout, done.stdout
    assert done.stdout.count("replacing crashed worker") == 2
    for died in ("test_two.py::test_first", "test_three.py::test_last"):
        assert f"crashed while running '{died}'" in done.stdout


def test_modules_that_share_a_cluster_run_consecutively_in_one_process():
    first, other, second = (
        f"tests/integration/ray/test_ray_{name}.py::test_it"
        for name in ("discovery", "faults", "journal")
    )
    sizes = [f"tests/conformance/test_ops.py::test_it[{size}-ranks]" for size in (1, 2)]
    names = [sizes[0], first, other, sizes[1], second, f"{other}s"]
    assert together(names) == [sizes[0], first, second, other, sizes[1], f"{other}s"]
