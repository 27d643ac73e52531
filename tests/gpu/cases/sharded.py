"""Deaths in jobs whose state is sharded, by FSDP2 and by ZeroRedundancyOptimizer: commits kept, ranks equal."""

from __future__ import annotations

import os
from pathlib import Path

from gpu.machine import Machine
from gpu.programs import checked_job
from gpu.results import Result, Skipped
from harness.history import TRAINING, History

# Each start of slot 1 dies at one of them, two steps before a step at which the other waits for it.
PLACES = ("forward", "optimizer", "stepped")
EACH = 6  # steps


def run(machine: Machine, result: Result, folder: Path) -> None:
    if machine.ranks == 1:
        raise Skipped(machine.why_few)
    os.environ.pop("ELASTIC_WORKER", None)
    for kind in ("fully", "zero"):
        check_kills(machine, result, folder / kind, kind)


def check_kills(machine: Machine, result: Result, folder: Path, kind: str) -> None:
    places = PLACES[: 1 if machine.small else 3]
    hold = {place: EACH * number for number, place in enumerate(places, 1)}
    steps = EACH * (len(places) + 1)
    deaths = [
        f"slot=1,start={start},step={hold[place] - 2},place={place}"
        for start, place in enumerate(places, 1)
    ]
    env = {
        "DEVICE": "cuda",
        "SHARDED": kind,
        "OPTIMIZER": "Adam",
        "DIE": ";".join(deaths),
        "HOLD": ";".join(f"{step}:size=2" for step in hold.values()),
        "STEPS": str(steps),
        **({} if kind == "fully" else {"NO_ROOM": "1"}),
    }
    with checked_job(machine, folder, "-np 2", TRAINING, **env) as job:
        job.succeed(60 * machine.time_factor)
        killed = sum(event["code"] == -9 for event in job.events("WorkerExited"))
        result.figure(f"{kind}: killed in", places)
        assert killed == len(places), (killed, places)
        history = History(job)
        history.check_commits_kept(unsealed=1)
        history.check_written()
        done = history.all("done")
        assert [each["step"] for each in done] == [steps] * 2
        assert done[0]["parameters"] == done[1]["parameters"]
        result.figure(f"{kind}: worlds", [len(world["members"]) for world in job.worlds()])
