"""Deaths around the reduction, the update and the commit: the suite's training script on GPUs, and its checks."""

from __future__ import annotations

import os
from pathlib import Path

from gpu.machine import Machine
from gpu.programs import checked_job
from gpu.results import Result, Skipped
from harness.history import TRAINING, History

# The n-th start of slot 1 dies at the n-th place, in its second step. Where it is away, the other waits for it.
PLACES = ("bucket", "optimizer-step", "snapshot")
IN_SCRIPT = ("backward", "optimizer", "commit", "saved")


def run(machine: Machine, result: Result, folder: Path) -> None:
    if machine.ranks == 1:
        raise Skipped(machine.why_few)
    places = [*PLACES, *(IN_SCRIPT[:1] if machine.small else IN_SCRIPT)]
    hold = [6 * number for number in range(1, len(places) + 1)]
    steps = hold[-1] + 6
    rules = [
        f"{place} kill slot=1 incarnation={n} hit={hit(place)}" for n, place in enumerate(PLACES, 1)
    ]
    deaths = [
        f"slot=1,start={n},step={hold[n - 2] + 2},place={place}"
        for n, place in enumerate(IN_SCRIPT, len(PLACES) + 1)
        if place in places
    ]
    env = {
        "DEVICE": "cuda",
        "ELASTIC_DIGESTS": "1",
        "ELASTIC_FAILPOINTS": "; ".join(rules),
        "DIE": ";".join(deaths),
        "HOLD": ";".join(f"{step}:size=2" for step in hold),
        "STEPS": str(steps),
    }
    os.environ.pop("ELASTIC_WORKER", None)
    with checked_job(machine, folder, "-np 2", TRAINING, **env) as job:
        job.succeed(70 * machine.time_factor)
        sizes = [len(world["members"]) for world in job.worlds()]
        result.figure("worlds", sizes)
        deaths_seen = sum(event["code"] == -9 for event in job.events("WorkerExited"))
        result.figure("killed at", places)
        assert deaths_seen == len(places), (deaths_seen, places)
        history = History(job)
        history.check(steps=steps)
        commits = {tuple(event["commit"]) for event in job.events("WorkerDigested")}
        result.figure("commits whose digests agree", len(commits))
        assert len(history.all("done")) == 2


def hit(place: str) -> int:
    """The second step's: a snapshot of one state is of two values, and the first is made before training."""
    return 4 if place == "snapshot" else 2
