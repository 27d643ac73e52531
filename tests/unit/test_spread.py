"""A process of pytest-xdist that dies ends its test as failed, and neither the others nor the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.spread import longest_first

HARNESS = Path(__file__).parents[1]


def test_what_takes_longest_begins_first():
    first, ray, unit = "cluster", "tests/integration/ray/test_ray_faults.py", "tests/unit/test_x.py"
    scopes = [unit, ray, "tests/unit/test_a.py", first]
    assert longest_first(scopes) == [first, ray, unit, "tests/unit/test_a.py"]


@pytest.mark.slow
@pytest.mark.parametrize("died", ["first", "last"])
def test_a_run_ends_with_all_other_tests_run(tmp_path: Path, died: str):
    dies = f"import os\ndef test_{{}}(): os._exit(3) if '{{}}' == '{died}' else None\n"
    for module in ("one", "two", "three"):
        tests = dies if module == "three" else dies.replace("os._exit(3)", "None")
        text = "".join(tests.format(name, name) for name in ("first", "second", "last"))
        (tmp_path / f"test_{module}.py").write_text(text)
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
    assert "1 failed, 8 passed" in done.stdout, done.stdout
    assert done.stdout.count("replacing crashed worker") == 1
    assert f"crashed while running 'test_three.py::test_{died}'" in done.stdout
