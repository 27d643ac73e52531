"""A step of FSDP2 beside torch's NCCL, and the cost of its commits, as information; failures are a crash or a hang."""

from __future__ import annotations

from pathlib import Path

from gpu.machine import Machine
from gpu.programs import Job
from gpu.results import Result


def run(machine: Machine, result: Result, folder: Path) -> None:
    if machine.ranks == 1:
        result.leave_out("steps and commits among ranks", machine.why_few)
    sizes = [(2, True), (2, False)] if machine.small else [(8000, True), (8000, False)]
    for megabytes, room in sizes:
        env = {"MEGABYTES": str(megabytes), "ROOM": str(int(room))}
        with Job(
            machine, folder / f"{megabytes}-{int(room)}", "sharded_cost.py", np=machine.ranks, **env
        ) as job:
            job.done(60)
            what = f"{megabytes} MB, {'room' if room else 'no room'}"
            for backend in ("elastic", "nccl"):
                slowest = max(note["median_ms"] for note in job.notes("time", backend=backend))
                result.figure(f"{what}: step over {backend}, ms", round(slowest, 2))
            for name in ("blocked_ms", "stall_ms"):
                slowest = max(note[name] for note in job.notes("commit"))
                result.figure(f"{what}: commit, {name}", round(slowest, 2))
