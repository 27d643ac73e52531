"""Run the stepper job under elasticrun, send signals to its workers and observe its steps, journal and processes.

It also contains the options and the table that these benchmarks share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

import results_output
import tests_on_path  # noqa: F401
from harness.job import Job
from harness.step_lines import Step, read

HERE = Path(__file__).resolve().parent
MARGIN_S = 2.0  # seconds of steps, so that all see that the end was decided
START_S = 120.0  # start of all workers, imports included, on a busy machine
TAIL = 32768  # bytes at the end of a file of steps: about 900 of them


@dataclass(frozen=True)
class Strike:
    """A signal to one worker of a full world. Times are CLOCK_MONOTONIC in seconds, as in the journal."""

    victim: Step  # its last observed step
    at: float
    resumed_at: float  # the slowest survivor's next step in a new world

    @property
    def lasted_ms(self) -> float:
        return (self.resumed_at - self.at) * 1e3


class Disturbed(Job):
    """A running job. A context manager that leaves no process behind.

    It trains an MLP of this width, by ``script``, optionally with ``way`` ddp, fsdp or zero; or ``example`` names one
    of `stepped_example`.
    """

    def __init__(
        self,
        workers: int,
        *flags: str,
        width: int = 128,
        way: str = "",
        example: str = "",
        script: str = "stepper.py",
    ) -> None:
        self.workers = workers
        folder = Path(tempfile.mkdtemp(prefix="elastic-bench-"))
        path = HERE / ("stepped_example.py" if example else script)
        program = [sys.executable, str(path), str(folder)]
        if example:
            program += [example, *(["1000000"] if example == "gpt" else [])]
        else:
            program += ["1000000", str(width), *([way] if way else [])]
        super().__init__(
            ["-np", str(workers), "--min-np", "1", *flags],
            program,
            folder=folder,
            env={
                "ELASTIC_PREEMPTION": "auto",
                "ELASTIC_PRELOAD": "auto",
                **os.environ,
                "OMP_NUM_THREADS": "1",
            },
            program=[sys.executable, "-m", "elastic.driver.commandline.cli"],
        )

    def __enter__(self) -> Disturbed:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the job ends with the benchmark
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def steps(self, kind: str = "steps") -> list[Step]:
        """Return all steps so far, by time; ``entries``: all calls of the training function."""
        found = []
        for path in self.folder.glob(f"*.{kind}"):
            found += read(path)[0]
        return sorted(found, key=lambda s: s.at)

    def replicas(self) -> str:
        """Compare the weights of all workers of the last world; for a job that has ended."""
        digests = [path.read_text() for path in self.folder.glob("*.weights")]
        if len(digests) != self.workers:
            return f"only {len(digests)} of {self.workers} workers ended normally"
        return "replicas equal" if len(set(digests)) == 1 else "replicas DIFFER"

    def costs(self) -> list[dict[str, Any]]:
        """Return the costs of a fully sharded state's commits, by worker."""
        return [json.loads(path.read_text()) for path in self.folder.glob("*.costs")]

    def strike(self, number: signal.Signals, rng: random.Random) -> Strike:
        """Send a signal to a random worker of a world that has trained for a while, and wait until all others train
        without it.
        """
        last = self.until(lambda: self.full(20), "a full world", START_S)
        victim = rng.choice(last)
        survivors = {s.pid for s in last} - {victim.pid}
        at = time.monotonic()
        os.kill(victim.pid, number)

        def resumed() -> dict[int, float] | None:
            first: dict[int, float] = {}
            for step in self._recent():
                if step.generation > victim.generation and step.pid in survivors:
                    first[step.pid] = min(step.at, first.get(step.pid, step.at))
            return first if first.keys() == survivors else None

        first = self.until(resumed, "the survivors' next step", 60)
        return Strike(victim, at, max(first.values()))

    def finish(self) -> int | None:
        """Let a full world finish, and return the exit code.

        None: workers have finished training but have not exited within a minute, in which case the measurements are
        still valid.
        """
        last = self.until(lambda: self.full(20), "a full world", START_S)
        request = self.folder / "stop.new"
        request.write_text(str(max(step.step for step in last) + self._steps_of(MARGIN_S)))
        request.rename(self.folder / "stop")
        try:
            return self.driver.wait(60)
        except subprocess.TimeoutExpired:
            return None

    def full(self, steps: int) -> list[Step] | None:
        """Wait until the newest world is complete and all its members have made ``steps`` steps and return the last
        step of each worker.
        """
        recent = self._recent()
        newest = max((s.generation for s in recent), default=0)
        counts: dict[int, list[Step]] = {}
        for step in recent:
            if step.generation == newest:
                counts.setdefault(step.pid, []).append(step)
        if len(counts) != self.workers or any(len(s) < steps for s in counts.values()):
            return None
        return [s[-1] for s in counts.values()]

    def _steps_of(self, seconds: float) -> int:
        """Estimate how many steps a worker makes in this time, from its last steps."""
        made = self._recent()
        last = max(made, key=lambda s: s.at)
        its = [s.at for s in made if (s.pid, s.generation) == (last.pid, last.generation)]
        return math.ceil(seconds * (len(its) - 1) / (max(its) - min(its))) + 1

    def _recent(self) -> list[Step]:
        found = []
        for path in self.folder.glob("*.steps"):
            found += read(path, max(0, path.stat().st_size - TAIL))[0][
                1:
            ]  # the first line may be incomplete
        return found


def longest_gap(steps: list[Step], pids: set[int], begin: float, end: float) -> float:
    """Return the most milliseconds between two steps of one of these workers, from ``begin`` to ``end``."""
    longest = 0.0
    for pid in pids:
        times = [s.at for s in steps if s.pid == pid and begin <= s.at <= end]
        longest = max([longest, *((b - a) * 1e3 for a, b in itertools.pairwise(times))])
    return longest


def percentile(values: list[float], share: float) -> float:
    """Return a percentile by the nearest-rank method."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """Create a parser with the options of these benchmarks."""
    parser = results_output.options_of(doc)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keras",
        dest="script",
        action="store_const",
        const="keras_stepper.py",
        default="stepper.py",
        help="a small Keras model under fit, instead of a loop with torch",
    )
    parser.add_argument(
        "--jax",
        dest="script",
        action="store_const",
        const="jax_stepper.py",
        help="an MLP in JAX, instead of a loop with torch",
    )
    return parser


def table_of(title: str, counted: str, rows: dict[str, list[float]]) -> Table:
    """Format milliseconds by measurement. ``counted`` names the unit of a value."""
    table = results_output.table(title, "", counted, "p50 ms", "p90 ms", "max ms")
    for name, values in rows.items():
        table.add_row(
            name,
            str(len(values)),
            f"{statistics.median(values):.0f}",
            f"{percentile(values, 0.9):.0f}",
            f"{max(values):.0f}",
        )
    return table
