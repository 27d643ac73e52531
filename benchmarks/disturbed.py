"""Runs the stepper job under elasticrun and watches it: its steps, its journal, its worker
processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")
HERE = Path(__file__).parent
TAIL = 32768  # bytes at the end of a file of steps: some 900 of them


@dataclass(frozen=True)
class Step:
    """One completed step of one worker; ``at`` is CLOCK_MONOTONIC in seconds."""

    pid: int
    at: float
    generation: int
    size: int
    rank: int
    step: int


class Disturbed:
    """A running job. Use as a context manager; it leaves no process behind."""

    def __init__(self, workers: int, *flags: str, width: int = 128) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="elastic-bench-"))
        self.journal = self.directory / "journal.jsonl"
        program = [sys.executable, str(HERE / "stepper.py"), str(self.directory), "1000000"]
        command = [sys.executable, "-m", "elastic.driver.cli", "-np", str(workers)]
        command += ["--min-np", "1", "--journal", str(self.journal), *flags]
        self.log = open(self.directory / "log", "wb")  # noqa: SIM115 -- lives as long as the job
        self.driver = subprocess.Popen(
            [*command, *program, str(width)],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Disturbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.send_signal(signal.SIGTERM)
        try:
            self.driver.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.driver.pid, signal.SIGKILL)
        self.log.close()

    def steps(self) -> list[Step]:
        """All steps so far, by time."""
        found = []
        for path in self.directory.glob("*.steps"):
            for line in path.read_text().splitlines():
                parts = line.split()
                if len(parts) == 5:
                    found.append(Step(int(path.stem), float(parts[0]), *map(int, parts[1:])))
        return sorted(found, key=lambda s: s.at)

    def records(self) -> list[dict[str, Any]]:
        """The journal so far."""
        if not self.journal.exists():
            return []
        lines = self.journal.read_text().splitlines()
        return [json.loads(line) for line in lines[1:] if line.endswith("}")]

    def actions(self, kind: str) -> list[dict[str, Any]]:
        return [a for r in self.records() for a in r.get("actions", []) if a["type"] == kind]

    def wait(self, what: str, condition: Callable[[], Found | None], timeout_s: float) -> Found:
        """Polls a condition; ends the benchmark with the job's log if it does not come true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            if self.driver.poll() is not None:
                break
            time.sleep(0.02)
        tail = (self.directory / "log").read_text()[-3000:]
        raise SystemExit(f"waited {timeout_s:g} s in vain for {what}; the job's log ends:\n{tail}")

    def full(self, workers: int, steps: int) -> list[Step] | None:
        """The last step of each worker, once all of the newest world's have made ``steps`` in
        it.
        """
        recent = self._recent()
        newest = max((s.generation for s in recent), default=0)
        counts: dict[int, list[Step]] = {}
        for step in recent:
            if step.generation == newest:
                counts.setdefault(step.pid, []).append(step)
        if len(counts) != workers or any(len(s) < steps for s in counts.values()):
            return None
        return [s[-1] for s in counts.values()]

    def _recent(self) -> list[Step]:
        """The ends of all files: enough for the newest world."""
        found = []
        for path in self.directory.glob("*.steps"):
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL))
                lines = file.read().decode().splitlines()[1:]
            for line in lines:
                parts = line.split()
                if len(parts) == 5:
                    found.append(Step(int(path.stem), float(parts[0]), *map(int, parts[1:])))
        return found


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
