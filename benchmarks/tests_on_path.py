"""Makes `harness` and `stress`, in the folder of the tests, importable by benchmarks. Import it before them."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1] / "tests")
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
