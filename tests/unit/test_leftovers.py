"""A run reports the processes that its tests have left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from harness.leftovers import MARK, Process, sentences

LEAVES = """
import os, subprocess, sys
def test_a_child(): print(subprocess.Popen(["sleep", "1000"]).pid, file=open("pids", "a"))
def test_an_orphan():
    script = "import subprocess; print(subprocess.Popen(['sleep', '2000']).pid, file=open('pids', 'a'))"
    subprocess.run([sys.executable, "-c", script], check=True)
def test_none(): subprocess.run([sys.executable, "-c", ""], check=True)
"""


def test_only_descendants_and_orphans_of_the_run_are_reported():
    mine, test = {MARK: "m"}, {"PYTEST_CURRENT_TEST": "test_x.py::test_y (call)"}
    processes = {
        1: Process(0, 1.0, "init", {}),
        2: Process(1, 1.0, "pytest", {MARK: "of another run"}),
        3: Process(2, 0.5, "child without the mark", test),
        4: Process(3, 1.0, "its child", {}),
        5: Process(1, 1.0, "orphan", mine),
        6: Process(5, 1.0, "its child with another", {MARK: "of a nested run"}),
        7: Process(1, 1.0, "neighbour", {MARK: "of another run"}),
        8: Process(2, 1.0, "python -c from multiprocessing.resource_tracker import main", mine),
        9: Process(2, 1.0, "python tests/harness/forking.py 7", mine),
        10: Process(9, 1.0, "python tests/harness/forking.py 7", mine),  # a job that it has forked
    }
    told = sentences(2, "m", processes)
    assert [line.rpartition(": ")[2] for line in told] == [
        "child without the mark",
        "its child",
        "orphan",
        "its child with another",
        "python tests/harness/forking.py 7",
    ]
    assert told[0].startswith("left behind by test_x.py::test_y (call), 0.5 s of processors so far")


@pytest.mark.parametrize("processes", [(), ("-p", "xdist", "-n", "1")])
def test_run_reports_processes_left_behind_by_its_tests(tmp_path, processes):
    (tmp_path / "test_it.py").write_text(LEAVES)
    plugins = ("-p", "harness.leftovers", "-p", "no:cacheprovider", *processes)
    command = (sys.executable, "-m", "pytest", *plugins, "--rootdir", str(tmp_path), "test_it.py")
    env = {**os.environ, "PYTHONPATH": str(Path(harness.__path__[0]).parent)}
    try:
        said = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True).stdout
        told = [line for line in said.splitlines() if line.startswith("left behind by ")]
        assert sorted(line.rpartition(": ")[2] for line in told) == ["sleep 1000", "sleep 2000"]
        assert all("test_it.py::test_a" in line for line in told)
        assert said.count("3 passed") == 1
    finally:
        for pid in (tmp_path / "pids").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
