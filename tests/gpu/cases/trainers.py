"""Scripts of ``examples`` on GPUs: one worker is killed, the other continues, it returns."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gpu.machine import ROOT, Machine
from gpu.programs import checked_job
from gpu.results import Result

# What each needs, and what it is given.
SCRIPTS = {
    "ddp": ("torch", "--steps 3000 --device cuda"),
    "timm": ("torch", "--epochs 2 --samples 480 --pause 0.02 --device cuda"),
    "lightning": ("lightning", "--epochs 2 --samples 480 --pause 0.02 --device gpu"),
    "accelerate": ("accelerate", "--epochs 2 --samples 240 --pause 0.02 --device cuda"),
    "transformers": ("transformers", "--epochs 2 --samples 240 --pause 0.02 --device cuda"),
}
# Of a GPU: the one with the number of the process.
THEIR_OWN_CHOICE = ("accelerate", "transformers")


def run(machine: Machine, result: Result, folder: Path) -> None:
    failed: list[str] = []
    for name, (needed, arguments) in SCRIPTS.items():
        if importlib.util.find_spec(needed) is None:
            result.leave_out(name, f"{needed} can't be imported here")
            continue
        ranks = min(machine.ranks, 2)
        if machine.shares_a_gpu and name in THEIR_OWN_CHOICE:
            ranks = 1
            result.leave_out(f"{name}: two ranks", "it would take the second GPU for the second")
        try:
            result.figure(name, one(machine, folder / name, name, ranks, arguments))
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n".join(failed)


def one(machine: Machine, folder: Path, name: str, ranks: int, arguments: str) -> dict[str, object]:
    words = [ROOT / "examples" / f"{name}_elastic.py", *arguments.split()]
    with checked_job(machine, folder, f"-np {ranks}", words, ELASTIC_DIGESTS="1") as job:
        if ranks > 1:
            job.wait_for(r"^(\S+ )?step .*\b2 workers", 40 * machine.time_factor)
            job.kill(1)
        job.succeed(40 * machine.time_factor)
        sizes = [len(world["members"]) for world in job.worlds()]
        assert list(dict.fromkeys(sizes)) == [2, 1][2 - ranks :], sizes
        commits = {tuple(event["commit"]) for event in job.events("WorkerDigested")}
    return {"worlds": sizes, "commits with digests": len(commits)}
