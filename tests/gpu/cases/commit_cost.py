"""Cost of commits, as information; failures are a crash, a hang, and a restore of other bits."""

from __future__ import annotations

from pathlib import Path

from gpu.machine import Machine
from gpu.programs import Job
from gpu.results import Result


def run(machine: Machine, result: Result, folder: Path) -> None:
    sizes = [(2, True), (8, True), (8, False)]
    if not machine.small:
        sizes = [(100, True), (1000, True), (1000, False), (4000, True), (4000, False)]
    costs = []
    for megabytes, room in sizes:
        env = {"MEGABYTES": str(megabytes), "ROOM": str(int(room))}
        if machine.made_up:
            env["FAKE_GPU_MB"] = "200"
        with Job(
            machine, folder / f"{megabytes}-{int(room)}", "commit_cost.py", np=0, **env
        ) as job:
            job.done(40)
            [cost] = job.notes("cost")
            costs.append({k: v for k, v in cost.items() if k not in ("what", "worker", "at")})
            result.figure("costs", costs)
