"""GPU operations of a step with gradients to reduce."""

import json
import os
import sys
from pathlib import Path

import pytest

from harness.program import output_of

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu_launches.py"


def test_hundred_gradients_take_few_launches_and_no_synchronization_per_step(fake_cuda, tmp_path):
    """With a separate copy per gradient there are a hundred more. Two buckets: the mark is copied back beside one."""
    file = tmp_path / "figures.json"
    words = (sys.executable, PROGRAM, "--parameters", "100", "--json", file)
    output_of(*words, env=os.environ | fake_cuda(gpus=2), timeout=200)
    ours = json.loads(file.read_text())["100"]["DistributedOptimizer"]
    assert ours["launches"] <= 10
    assert ours["collectives"] == 2
    assert ours["synchronizations"] < 1


def test_sharded_step_costs_no_more_than_torchs_nccl_and_never_synchronizes(fake_cuda, tmp_path):
    file = tmp_path / "figures.json"
    words = (sys.executable, PROGRAM, "--fsdp", "4", "--json", file)
    output_of(*words, env=os.environ | fake_cuda(gpus=4), timeout=230)
    figures = json.loads(file.read_text())
    ours_of = ": elastic"
    ways = {name.removesuffix(ours_of) for name in figures if name.endswith(ours_of)}
    assert len(ways) == 5
    for way in ways:
        ours, torchs = figures[f"{way}: elastic"], figures[f"{way}: nccl"]
        for each in ("launches", "launched_bytes", "collectives", "copies", "allocations"):
            assert ours[each] <= torchs[each], (way, each)
        assert ours["synchronizations"] == 0, way
        assert ours["ahead"], way
