"""One exception has one traceback on the screen, however many ranks raise it or lose a peer by it."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from harness.history import SCRIPTS
from harness.job import Job

pytestmark = pytest.mark.forked
# No slot is used again meanwhile: its next worker would raise a second exception.
FIXED, ELASTIC = "", "--min-np 1 --blacklist-cooldown-range 60 60"
MORE = 6  # lines beside the traceback
CLASSES = {
    "value": "ValueError",
    "chained": "RuntimeError",
    "group": "ExceptionGroup",
    "hook": "ValueError",
    "loader": "KeyError",
    "syntax": "SyntaxError",
    "own": "KeyError",
}


def ended(job: Any, ranks: int, kind: str, where: str, flags: str) -> Job:
    running: Job = job(f"-np {ranks} {flags}", ["python", SCRIPTS / "raising.py", kind, where])
    assert running.wait(90) != 0
    return running


def after(running: Job) -> list[str]:
    """Return the output from the first exception on."""
    lines = running.output.splitlines()
    first = next(at for at, line in enumerate(lines) if line.endswith("] RAISES"))
    return [line for line in lines[first:] if not line.endswith("] RAISES")]


def plain(running: Job, kind: str) -> int:
    """Lines that Python alone would have printed."""
    name = CLASSES.get(kind.removeprefix("all-"))
    return int((running.folder / f"plain.{name}").read_text()) if name else 0


def is_brief(running: Job, kind: str) -> None:
    lines = after(running)
    of_workers = [line for line in lines if line.startswith("[")]
    least = plain(running, kind)
    assert len(lines) <= least + MORE, running.output
    assert len(of_workers) <= least, running.output
    assert not any("run_loop.py" in line for line in lines), "our frames are folded"
    name = CLASSES.get(kind.removeprefix("all-"))
    assert lines[-1].startswith("elastic | "), "the driver has the last word"
    if name:
        assert any("raising.py" in line or "broken.py" in line for line in of_workers)
        named = [line for line in of_workers if re.search(rf"\] (  \| )?{name}\b", line)]
        assert len(named) == (2 if kind.endswith("loader") else 1), "torch quotes its own process"


@pytest.mark.parametrize(
    ("kind", "where", "flags"),
    [
        ("value", "inside", FIXED),
        ("value", "inside", ELASTIC),
        ("all-value", "before", ELASTIC),
        ("exit", "before", FIXED),
    ],
)
def test_an_exception_is_printed_once_and_the_reason_last(job, kind, where, flags):
    is_brief(ended(job, 4, kind, where, flags), kind)


KINDS = [
    "value",
    "chained",
    pytest.param("group", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="3.11")),
    "hook",
    "loader",
    "syntax",
    "exit",
]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("flags", [FIXED, ELASTIC], ids=["fixed", "elastic"])
@pytest.mark.parametrize("where", ["before", "inside"])
@pytest.mark.parametrize("everywhere", ["", "all-"], ids=["one", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_any_kind_is_printed_once(job, kind, where, flags, everywhere, ranks):
    if (kind, where, flags) == ("exit", "inside", ELASTIC):
        pytest.skip("a worker that leaves is lost, and the others go on")
    is_brief(ended(job, ranks, everywhere + kind, where, flags), everywhere + kind)


def test_caught_tracebacks_of_a_script_are_printed_and_log_files_have_all_frames(job):
    running = ended(job, 2, "all-own", "inside", "--output-filename logs")
    shown = after(running)
    for rank in range(2):
        caught = f"] ValueError: a sample of rank {rank} is damaged"
        assert sum(line.endswith(caught) for line in shown) >= 1, running.output
        kept = (running.folder / f"logs/rank.{rank}/stderr").read_text()
        assert kept.count("Traceback (most recent call last):") == 2
        assert "run_loop.py" in kept and kept.rstrip().endswith("KeyError: 'own'")
    assert sum(line.endswith("] KeyError: 'own'") for line in shown) == 1


def test_verbose_prints_all_traceback_frames(job):
    running = ended(job, 2, "all-value", "inside", "--verbose")
    shown = after(running)
    assert any("run_loop.py" in line for line in shown)
    assert sum("] ValueError: a sample" in line for line in shown) == 1
