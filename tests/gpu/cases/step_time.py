"""Time of a step, as information: failures are a crash or a hang."""

from __future__ import annotations

from pathlib import Path

from gpu.machine import Machine
from gpu.programs import Job
from gpu.results import Result


def run(machine: Machine, result: Result, folder: Path) -> None:
    if machine.ranks == 1:
        result.leave_out("reduction among ranks", machine.why_few)
    runs = {
        "25": {
            "WAYS": "alone,ddp,ours",
            "MODELS": "gpt,small",
            "TRACE": str(folder / "trace.json.gz"),
        },
        "8": {"WAYS": "ours", "MODELS": "gpt,small"},
        "50": {"WAYS": "ours", "MODELS": "gpt,small"},
    }
    for mib, asked in runs.items():
        env = asked | {"HOROVOD_FUSION_THRESHOLD": str(int(mib) << 20)}
        with Job(machine, folder / f"{mib}MiB", "step_time.py", np=machine.ranks, **env) as job:
            job.done(45)
            for model in ("gpt", "small"):
                for way in asked["WAYS"].split(","):
                    slowest = max(n["median_ms"] for n in job.notes("time", model=model, way=way))
                    named = f"{model}: {way}" + (f", buckets of {mib} MiB" if way == "ours" else "")
                    result.figure(f"{named}, ms", round(slowest, 3))
    trace = folder / "trace.json.gz"
    result.figure("trace", str(trace) if trace.exists() else None)
