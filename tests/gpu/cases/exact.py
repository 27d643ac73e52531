"""Exact training on a GPU: the weights are bit-identical to those of an undisturbed worker after a kill and a join."""

from __future__ import annotations

import re
from pathlib import Path

from gpu.machine import ROOT, Machine
from gpu.programs import checked_job
from gpu.results import Result

LAST = r"after (\d+) steps the weights are ([0-9a-f]+)"


def run(machine: Machine, result: Result, folder: Path) -> None:
    undisturbed = weights(machine, folder / "undisturbed", ranks=1, kill=False)
    result.figure("undisturbed, 1 worker", undisturbed)
    if machine.ranks == 1:
        again = weights(machine, folder / "again", ranks=1, kill=False)
        result.leave_out("two ranks", machine.why_few)
    else:
        again = weights(machine, folder / "killed", ranks=2, kill=True)
    result.figure("again" if machine.ranks == 1 else "2 workers, one killed", again)
    assert again == undisturbed


def weights(machine: Machine, folder: Path, *, ranks: int, kill: bool) -> list[str]:
    """Steps and digest of the weights at the end."""
    env = {
        "DEVICE": "cuda",
        "EPOCHS": "2" if machine.small else "8",
        "PAUSE": "0.02",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    words = [ROOT / "examples" / "exact.py"]
    with checked_job(machine, folder, f"-np {ranks} --digests", words, **env) as job:
        if kill:
            job.wait_for(r"epoch \d+ .* workers 2", 60 * machine.time_factor)
            job.kill(1)
        job.succeed(60 * machine.time_factor)
        found = re.search(LAST, job.output)
        assert found, job.output
        sizes = [len(world["members"]) for world in job.worlds()]
        assert ([2, 1] if kill else [1]) == list(dict.fromkeys(sizes))[:2], sizes
    return list(found.groups())
