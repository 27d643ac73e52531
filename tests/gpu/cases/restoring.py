"""A commit contains the state at its call, however late the GPU copies it."""

from __future__ import annotations

from pathlib import Path

from gpu.machine import Machine
from gpu.programs import Job
from gpu.results import Result


def run(machine: Machine, result: Result, folder: Path) -> None:
    with Job(machine, folder, "restore.py", np=0) as job:
        job.done(35)
        restored = [f"{n['optimizer']}{', busy' * n['busy']}" for n in job.notes("restored")]
        result.figure("bits equal", restored)
        assert len(restored) == 6, restored
