"""The cases as tests: gpu1 on one GPU, gpu8 with a rank on each of eight. `python -m tests.gpu` is the alternative."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpu import machine, running
from gpu.listed import CASES, Case
from gpu.machine import Machine

pytestmark = pytest.mark.timeout(1200)
ALL = [pytest.param(case, id=case.name) for case in CASES if case.name != "marked"]


def judge(case: Case, here: Machine, folder: Path) -> None:
    outcome = running.run_one(case, here, folder, time.monotonic() + 1000)
    if outcome["ok"] is None:
        pytest.skip(outcome["reason"])
    assert outcome["ok"], outcome


@pytest.mark.gpu1
@pytest.mark.parametrize("case", ALL)
def test_case_passes_on_one_gpu(case, tmp_path):
    judge(case, machine.look(2, None), tmp_path)


@pytest.mark.gpu8
@pytest.mark.parametrize("case", ALL)
def test_gpu_cases_pass_on_eight_gpus(case, tmp_path):
    judge(case, machine.look(8, None), tmp_path)
