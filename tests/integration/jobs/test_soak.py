"""The soak, for seconds instead of minutes: measurements, decisions and report. Flatness takes longer."""

import json
import multiprocessing
import os
import shlex
import sys

import pytest

from harness.forked import MARK
from harness.processes import clean_environment, path_of_tests
from harness.program import Program
from stress.soak import resources


def test_a_process_is_measured_from_outside():
    before = resources.measure(os.getpid())
    assert before["rss_mb"] > 5
    assert before["threads"] >= 1
    reading, writing = os.pipe()
    try:
        after = resources.measure(os.getpid())
    finally:
        os.close(reading)
        os.close(writing)
    assert after["fds"] == before["fds"] + 2
    assert after["sockets"] == before["sockets"]


def test_open_shared_memory_segments_are_counted_as_used():
    path = resources.SEGMENTS / f"elastic-test-{os.getpid()}"
    before = resources.measure(os.getpid())["shm"]
    with path.open("wb"):
        assert resources.measure(os.getpid())["shm"] == before + 1
        assert str(path) not in resources.unused_segments()
    assert str(path) in resources.unused_segments()
    path.unlink()
    assert str(path) not in resources.unused_segments()


def test_semaphore_mapped_under_another_name_counts_as_used():
    before = resources.segments()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    names = resources.segments() - before
    assert names
    assert not names & resources.unused_segments()
    del semaphore


@pytest.mark.nightly
@pytest.mark.slow
def test_short_soak_measures_and_judges_without_leaks(tmp_path):
    flags = "--minutes 0.1 --fault-every 1 --workers 2 --faults kill,freeze --seed 3"
    words = ["soak", *shlex.split(flags)]
    words += ["--sample-every", "0.5", "--json", "soak.json", "--write-doc", "soak.md"]
    soak = Program(
        [sys.executable, "-m", "stress", *words],
        folder=tmp_path,
        env=clean_environment() | path_of_tests() | {"TMPDIR": str(tmp_path)},
        mark=MARK,
        forked=True,
    )
    code, said = soak.wait(110), soak.output
    assert soak.end() == []
    assert (tmp_path / "soak.json").exists(), said
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["report"]["code"] == 0, said
    assert found["report"]["steps"]["lost"] == 0
    assert found["report"]["broken"] == []
    assert found["report"]["faults"], said
    assert found["soak"]["left"] == []
    curves = {(curve["who"], curve["quantity"]["key"]) for curve in found["soak"]["curves"]}
    assert {("driver", "fds"), ("localhost:0#1", "rss_mb"), ("localhost:0#1", "shm")} <= curves
    assert set(found["growth"]) == {f"{who} {key}" for who, key in curves}
    assert code == (0 if found["passed"] else 1)
    assert found["passed"] == (not found["troubles"])
    page = (tmp_path / "soak.md").read_text()
    assert "python -m tests.stress soak --minutes=0.1" in page
    assert "| commits lost | 0 of " in page
