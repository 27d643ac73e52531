"""Everything is killed, including the driver, while a checkpoint is written or read; repeatedly.

A chain of jobs on one folder. Each is stopped at a place that is drawn, killed there with all its processes, and
followed by the same command with another number of workers. `DURABLE_KILLS` says how many kills a chain has.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage
from harness.history import SCRIPTS

TRAINING = ["python", SCRIPTS / "durable.py"]
KILLS = int(os.environ.get("DURABLE_KILLS", "10"))
PLACES = ("durable-file", "durable-share", "durable-manifest", "durable-sealed", "durable-load")
SIZES = (1, 2, 2, 3, 3, 4, 8)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(60 * KILLS)]


def newest(storage: Storage) -> int:
    """The step that the newest whole checkpoint holds; 0: there is none. Each that has a manifest must be whole."""
    step = 0
    for name in catalog.names(storage):
        entry = catalog.entry(storage, name)
        assert entry.manifest is not None or entry.torn, f"{name}: {entry.trouble}"
        if entry.manifest is not None:
            assert catalog.verify(storage, entry.manifest) == "", f"{name} is damaged"
            step = entry.manifest.values["step"]
    return step


def kill_all(running) -> None:
    """The driver first, then all others, as fast as signals go, and again until no process is left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.driver.pid, signal.SIGKILL)
    while left := running.processes():
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        running.driver.poll()
        time.sleep(0.01)
    running.driver.wait(10)


@pytest.mark.parametrize("seed", range(2))
def test_no_durable_commit_is_lost_when_all_processes_are_killed_at_any_place(
    job, tmp_path: Path, seed: int
):
    drawn = random.Random(seed)
    folder = tmp_path / "checkpoints"
    storage = Storage(str(folder))
    for number in range(KILLS):
        durable = newest(storage)
        size = drawn.choice(SIZES)
        place = drawn.choice(PLACES if durable else PLACES[:-1])
        hit = 1 if place == "durable-load" else drawn.randint(1, 6)
        rules = tmp_path / f"rules-{number}"
        rules.write_text(f"{place} wait={tmp_path / 'never'} hit={hit} id=here")
        env = {"ELASTIC_FAILPOINTS": f"@{rules}"}
        flags = f"-np {size} --min-np 1 --checkpoint-every 10commits --checkpoint-dir {folder}"
        running = job(flags, TRAINING, env=env)
        running.unchecked = "it is cut off"
        running.until(
            lambda rules=rules: list(tmp_path.glob(f"{rules.name}.here.*")),
            f"a worker at {place}",
            60.0,
        )
        kill_all(running)
        begun = [int(step) for step in re.findall(r"rank 0 begins at (\d+)", running.output)]
        assert begun in ([durable], [] if place == "durable-load" else [durable]), (number, begun)
        assert "other bits" not in running.output
        assert newest(storage) >= durable, f"kill {number}, at {place}: a durable commit is gone"
