"""The runner of the GPU cases: the number of ranks that a machine allows, and no case hides another."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpu import listed, machine, running
from gpu.listed import Case
from gpu.machine import Machine
from harness.golden import raises, recorded

HERE = Machine(gpus=1, ranks=1, why_few="", versions={}, made_up=False, small=True)


@pytest.mark.parametrize(
    ("gpus", "nccl", "ranks"),
    [
        (0, (), 0),
        (1, (2, 29, 7), 1),
        (1, (2, 30), 2),
        (1, (2, 31, 1), 2),
        (2, (2, 18), 2),
        (8, (2, 30), 8),
    ],
)
def test_single_gpu_allows_two_ranks_from_nccl_2_30_on(gpus, nccl, ranks):
    possible, why_few = machine.ranks_possible(gpus, nccl)
    assert possible == ranks
    assert bool(why_few) == (ranks == 1)


def test_each_case_has_its_own_module_and_number():
    folder = Path(running.__file__).parent / "cases"
    assert {case.name for case in listed.CASES} == {path.stem for path in folder.glob("*.py")}
    assert [case.number for case in listed.CASES] == list(range(1, len(listed.CASES) + 1))
    assert [case.name for case in listed.chosen("4,frozen")] == ["killed", "frozen"]
    with raises(ValueError):
        listed.chosen("1,99")


def outcome_of(
    body: str, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> running.Outcome:
    """Of a case with this function ``run``."""
    cases = tmp_path / "more" / "gpu" / "cases"
    cases.mkdir(parents=True)
    (cases / "planted.py").write_text(
        f"import os, subprocess, sys, time\ndef run(machine, result, folder):\n    {body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    return running.run_one(Case(99, "planted", limit_s, ""), HERE, tmp_path, time.monotonic() + 60)


@pytest.mark.slow
def test_case_that_hangs_is_ended_with_its_children_and_keeps_its_figures(tmp_path, monkeypatch):
    body = (
        "from gpu.programs import environment; env = environment(machine); child = subprocess.Popen(['sleep', '99'],"
        " env=env, start_new_session=True); result.figure('child', child.pid); time.sleep(99)"
    )
    outcome = outcome_of(body, 5.0, tmp_path, monkeypatch)
    assert outcome["ok"] is False
    recorded("messages", outcome["reason"])
    left = Path(f"/proc/{outcome['figures']['child']}/stat")
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] == "Z"


def test_case_that_crashes_fails_with_its_last_output(tmp_path, monkeypatch):
    body = "print('its last words', flush=True); os._exit(0)"
    outcome = outcome_of(body, 20.0, tmp_path, monkeypatch)
    assert outcome["ok"] is False
    assert "crashed" in outcome["reason"]
    recorded("messages", outcome["reason"])


def test_gpu_case_may_be_skipped_with_a_reason(tmp_path, monkeypatch):
    body = "from gpu.results import Skipped; raise Skipped('there is no second GPU')"
    outcome = outcome_of(body, 20.0, tmp_path, monkeypatch)
    assert outcome["ok"] is None
    recorded("messages", outcome["reason"])
