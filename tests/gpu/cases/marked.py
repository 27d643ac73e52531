"""The suite's tests with the marker gpu, in one process of pytest."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from gpu.machine import ROOT, Machine
from gpu.programs import environment
from gpu.results import Result, Skipped
from harness.program import Program

NEEDED = ("pytest", "pytest_timeout", "hypothesis")


def run(machine: Machine, result: Result, folder: Path) -> None:
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise Skipped(f"{', '.join(absent)} can't be imported here")
    folder.mkdir(parents=True, exist_ok=True)
    tests = ROOT / "tests"
    files = sorted(
        str(path)
        for path in tests.rglob("test_*.py")
        if path.parent.name != "gpu" and re.search(r"pytest\.mark\.gpu\b", path.read_text())
    )
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    program = Program(
        words, folder=ROOT, env=environment(machine), mark="GPU_TESTS", called="pytest"
    )
    try:
        code = program.wait(75 * machine.time_factor)
    finally:
        program.end()
        (folder / "output.txt").write_text(program.output)
    summary = program.lines[-1] if program.lines else ""
    result.figure("pytest says", summary)
    result.figure("files", [str(Path(each).relative_to(ROOT)) for each in files])
    for line in program.lines:
        if line.startswith("SKIPPED"):
            result.leave_out(line.partition("] ")[2].partition(": ")[0], line.rpartition(": ")[2])
    assert code == 0, f"pytest ended with {code}: {summary}\n" + "\n".join(program.lines[-40:])
