"""A process of pytest-xdist that dies ends its test as failed, and neither the others nor the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.spread import longest_first

HARNESS = Path(__file__).parents[1]
NAMES = ("first", "second", "last")


def test_what_takes_longest_begins_first():
    first, ray, unit = "cluster", "tests/integration/ray/test_ray_faults.py", "tests/unit/test_x.py"
    scopes = [unit, ray, "tests/unit/test_a.py", first]
    assert longest_first(scopes) == [first, ray, unit, "tests/unit/test_a.py"]


@pytest.mark.slow
def test_a_run_ends_with_all_other_tests_run(tmp_path: Path):
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
