"""Ranks that share a batch train like one that has all of it, and have the same bits."""

from __future__ import annotations

from pathlib import Path

from gpu.machine import Machine
from gpu.programs import Job
from gpu.results import Result

APART = 1e-5  # of the norm of all parameters
SECONDS = 40  # where ranks share a GPU, they may not come to all the steps


def run(machine: Machine, result: Result, folder: Path) -> None:
    parameters = str(folder / "parameters.pt")
    env = {"STEPS": "20" if machine.small else "200", "SAVE": parameters}
    more = {"SECONDS": str(SECONDS), "ELASTIC_DIGESTS": "1"}
    with Job(machine, folder / "ours", "gpt.py", np=machine.ranks, **env, **more) as job:
        job.done(75)
        notes = job.notes("step")
        done = job.notes("done")
        steps = done[0]["step"]
        by_step: dict[int, set[str]] = {}
        for each in notes:
            by_step.setdefault(each["step"], set()).add(each["sha"])
        middle = sorted(each["ms"] for each in notes)[len(notes) // 2]
        result.figure("ranks", machine.ranks)
        result.figure("parameters", job.notes("made")[0]["parameters"])
        result.figure("steps", steps)
        result.figure("step_ms_with_digests", round(middle, 1))
        result.figure("peak_gpu_mb", round(done[0]["peak_gpu_mb"]))
    assert len(done) == machine.ranks
    assert all(len(each) == 1 for each in by_step.values()), f"ranks hold different bits: {by_step}"
    assert len(by_step) == steps // 10 > 1
    if steps < int(env["STEPS"]):
        result.leave_out(f"steps after {steps}", f"they would have taken more than {SECONDS} s")
    env["STEPS"] = str(steps)
    with Job(machine, folder / "plain", "plain_gpt.py", np=0, **env) as plain:
        plain.done(50)
        losses = {each["step"]: each["loss"] for each in plain.notes("step")}
        far = plain.notes("done")[0]["differ_by"]
    Path(parameters).unlink()
    worst = max(abs(each["loss"] / losses[each["step"]] - 1) for each in notes)
    result.figure("parameters_differ_by", far)
    result.figure("losses_differ_by", worst)
    result.figure("losses", [round(losses[10], 4), round(losses[steps], 4)])
    assert losses[steps] < losses[10], "nothing was learned"
    assert far <= APART, f"the parameters differ from those of one rank by {far:.1e} of their norm"
    if machine.ranks == 1:
        result.leave_out("digests of two ranks", machine.why_few)
