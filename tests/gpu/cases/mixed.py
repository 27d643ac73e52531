"""Several communicators of one GPU, used from backward, from hooks and by name, some by ranks that have joined."""

from __future__ import annotations

from pathlib import Path

from gpu.machine import Machine
from gpu.programs import Job
from gpu.results import Result


def run(machine: Machine, result: Result, folder: Path) -> None:
    steps = 20 if machine.small else 500
    with Job(machine, folder, "mixed.py", np=machine.ranks, STEPS=str(steps)) as job:
        job.done(60)
        result.figure("ranks", machine.ranks)
        done = job.notes("trained")[0]["steps"]
        result.figure("steps", done)
        result.figure("step_ms", round(max(each["ms"] for each in job.notes("trained")), 2))
        assert len(job.notes("done")) == machine.ranks
    if done < steps:
        result.leave_out(f"steps after {done}", "time was up; they did not hang")
    if machine.ranks == 1:
        result.leave_out("several ranks", machine.why_few)
