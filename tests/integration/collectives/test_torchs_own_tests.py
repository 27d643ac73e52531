"""torch's own tests of a backend, on ours instead of Gloo. Needs expecttest, which torch's test code imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "harness" / "scripts" / "torchs_own_tests.py"
FEWEST = 100  # that pass; torch skips the rest where there is no GPU

# What is known not to pass, and why.
EXCEPTIONS = {
    "test_ddp_logging_data_cpu": "DDP's log names the backend that carries its collectives: elastic, not gloo",
    "test_monitored_barrier_gloo_rank_0_timeout": "a timeout of 0 s names rank 1, or 0, by how fast a line runs",
}


SIZES = (3, 4, 8)  # of a world; in the larger ones what the smaller were too small for


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_torchs_own_tests_of_a_backend(tmp_path: Path):
    pytest.importorskip("expecttest")
    said: dict[str, tuple[str, str]] = {}
    names: list[str] = []
    for size in SIZES:
        found = run(tmp_path, size, names)
        said |= found
        names = [
            name for name, (what, why) in found.items() if what == "skipped" and "world size" in why
        ]
        assert names or size == SIZES[-1], "no test wants a larger world"
    failed = {name: why for name, (outcome, why) in said.items() if outcome == "failed"}
    unknown = {name: why for name, why in failed.items() if name not in EXCEPTIONS}
    assert not unknown, "\n\n".join(f"{name}: {why}" for name, why in unknown.items())
    assert sum(outcome == "passed" for outcome, _ in said.values()) >= FEWEST


def run(folder: Path, size: int, names: list[str]) -> dict[str, tuple[str, str]]:
    """By name what came of it and why; of all tests, where no names are given."""
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, SCRIPT, *names],
            env=os.environ | {"WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
        )
    assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["test_')]
    return {name: (outcome, why) for name, outcome, why in lines}
