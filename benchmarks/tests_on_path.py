"""Make `harness` and `stress`, which are in the folder of the tests, importable by benchmarks. Must be imported before
them."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1] / "tests")
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
