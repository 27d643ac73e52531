"""Starts the processes of a case: a script of ``workers``, alone or under elasticrun, and reads its notes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from elastic.chaos.invariants.invariants import check_journal
from elastic.driver.journal.journal import read
from gpu.machine import ROOT, SHARED, Machine
from harness import job
from harness.processes import clean_environment
from harness.program import Program

WORKERS = Path(__file__).parent / "workers"
STAY_AWAY = "--blacklist-cooldown-range 120 120"  # the slots of the dead stay empty
RETURN = "--blacklist-cooldown-range 0.1 0.5"
Note = dict[str, Any]
ELASTICRUN = (sys.executable, "-m", "elastic.driver.commandline.cli")  # it need not be installed


def environment(machine: Machine, **others: str) -> dict[str, str]:
    """Of a process that trains here; it finds this checkout whether or not it is installed."""
    env = clean_environment()
    paths = [env.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests"), _entry_points()]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env |= {"PYTHONUNBUFFERED": "1", "SMALL": str(int(machine.small)), "RANKS": str(machine.ranks)}
    if machine.shares_a_gpu:
        env = SHARED | env
    return env | others


@functools.cache
def _entry_points() -> str:
    """A folder by which torch finds our backend, as it does where hvd-elastic is installed; empty if it is."""
    if any(importlib.metadata.entry_points(group="torch.backends", name="elastic")):
        return ""
    folder = Path(tempfile.mkdtemp(prefix="elastic-entry-points-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    told = folder / "hvd_elastic_checkout-0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hvd-elastic-checkout\nVersion: 0\n"
    )
    (told / "entry_points.txt").write_text(
        "[torch.backends]\nelastic = elastic.torch_autoload:autoload\n"
    )
    return str(folder)


@contextlib.contextmanager
def checked_job(
    machine: Machine, folder: Path, flags: str, words: Sequence[object], **env: str
) -> Iterator[job.Job]:
    """A job of `harness.job` in which the dead return: at the end no process is left, and invariants are checked."""
    folder.mkdir(parents=True, exist_ok=True)
    started = job.Job(
        f"--min-np 1 {RETURN} {flags}",
        [*map(str, words)],
        folder=folder,
        env=environment(machine, **env),
        program=ELASTICRUN,
    )
    try:
        yield started
    finally:
        left = started.end()
        (folder / "output.txt").write_text(started.output)
    assert not left, f"these processes outlived their job: {left}"
    started.check_invariants()


class Job(Program):
    """``with Job(machine, folder, "gpt.py", np=2) as job``: at the end no process of it is left.

    ``np`` 0: the script runs by itself. Every wait has a deadline and fails with the end of the output.
    """

    def __init__(
        self, machine: Machine, folder: Path, script: str, *, np: int, flags: str = "", **env: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.machine = machine
        self.journal = folder / "journal.jsonl"
        command = [sys.executable, str(WORKERS / script)]
        if np:
            words = [*("-np", str(np), "--min-np", "1"), *flags.split()]
            words += ["--journal", str(self.journal)]
            command = [*ELASTICRUN, *words, *command]
        super().__init__(
            command,
            folder=folder,
            env=environment(machine, **env),
            mark="GPU_JOB",
            called=f"{script} with {np or 'no'} workers",
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = self.end()
        (self.folder / "output.txt").write_text(self.output)
        if error is None:
            assert not left, f"these processes outlived their job: {left}"
            if self.journal.exists() and read(self.journal)[1]:
                check_journal(self.journal, ended=(self.process.returncode or 0) >= 0)

    def done(self, limit_s: float) -> Job:
        """Waits for its success: ``limit_s`` seconds on a GPU, more on a made-up one."""
        self.succeed(limit_s * self.machine.time_factor)
        return self

    def notes(self, what: str, **fields: Any) -> list[Note]:
        """All workers' notes of a kind with these fields, by time."""
        found = []
        for path in (self.folder / "notes").glob("*.jsonl"):
            whole, _, _ = path.read_text().rpartition("\n")
            found += [json.loads(line) for line in whole.splitlines()]
        wanted = fields | {"what": what}
        return sorted((n for n in found if wanted.items() <= n.items()), key=lambda n: n["at"])


def spread(values: list[float]) -> dict[str, float]:
    """Of measured values, to three digits: the least, the median, the largest."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return {
        name: float(f"{value:.3g}")
        for name, value in (("min", ordered[0]), ("median", middle), ("max", ordered[-1]))
    }
