"""Every collective, operation and dtype on all ranks; and a communicator of one rank, which any NCCL makes."""

from __future__ import annotations

from pathlib import Path

from gpu.machine import Machine
from gpu.programs import Job, spread
from gpu.results import Result


def run(machine: Machine, result: Result, folder: Path) -> None:
    with Job(machine, folder / "one", "group_of_one.py", np=0, ROUNDS="3") as alone:
        alone.done(30)
        rounds = alone.notes("round")
        assert len(rounds) == 3 and all(each["drained"] for each in rounds), rounds
        for name in ("connected_ms", "raised_after_abort_ms", "drained_ms"):
            values = [each[name] for each in rounds if each[name] is not None]
            result.figure(f"group of one: {name}", spread(values) if values else None)
    with Job(machine, folder / "all", "collectives.py", np=machine.ranks) as job:
        job.done(40)
        assert len(job.notes("done")) == machine.ranks
        result.figure("ranks", machine.ranks)
        result.figure("combinations", job.notes("collectives")[0]["combinations"])
        result.figure("first_ms", max(each["seconds"] for each in job.notes("first")) * 1e3)
        timed = {f"{each['megabytes']} MB": round(each["ms"], 3) for each in job.notes("timed")}
        result.figure("allreduce_ms", timed)
    if machine.ranks == 1:
        result.leave_out("collectives among ranks", machine.why_few)
