"""Checkpoints are written to a disk that is full, missing, and slow: no step fails, and they continue. Needs root, to
mount one.

`AWAY_S` says for how long each time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage
from harness.history import SCRIPTS

TRAINING = ["python", str(SCRIPTS / "durable.py")]
AWAY_S = float(os.environ.get("AWAY_S", "8"))
BACK_S = 10.0  # after which the next one has to be there
ROOM = 8 << 20
WIDTH = 2000  # 1.2 MB each
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(200 + 3 * AWAY_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk"),
]


def mount(folder: Path, options: str) -> Callable[[], object]:
    """A file system in memory. Returns what takes it away."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
    return lambda: subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Callable[[], object]:
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast.unlink


FAILS = "can't be written to"
TROUBLES = {"full": fill, "away": lambda disk: mount(disk, "ro")}


def test_failing_disk_fails_no_step_and_is_used_again(job, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    # The first tensor takes AWAY_S.
    slow = f"durable-file slow={AWAY_S} rank=1"
    env = {"ENOUGH": str(tmp_path), "WIDTH": str(WIDTH), "ELASTIC_FAILPOINTS": slow}
    flags = "-np 2 --min-np 2 --checkpoint-every 1s --checkpoint-keep 2"
    remove = mount(disk, f"size={ROOM}")
    try:
        training = job(f"{flags} --checkpoint-dir {disk}", TRAINING, env=env)
        training.until(
            lambda: len(training.events("CheckpointMade")) > 1, "two checkpoints", 90 + AWAY_S
        )
        first, second, *_ = [event["commit"][1] for event in training.events("CheckpointMade")]
        storage = Storage(str(disk))
        waited: dict[str, float] = {}
        for name, trouble in TROUBLES.items():
            said = training.output.count(FAILS)
            end = trouble(disk)
            try:
                training.until(
                    lambda said=said: training.output.count(FAILS) > said, "a line about it", 60
                )
                time.sleep(AWAY_S)
            finally:
                end()
            back, made = time.monotonic(), len(training.events("CheckpointMade"))
            training.until(
                lambda made=made: len(training.events("CheckpointMade")) > made, "a newer one", 120
            )
            waited[name] = round(time.monotonic() - back, 1)
            assert training.output.count(FAILS) <= said + 2, "one line of each rank, not many"
        (tmp_path / "enough").touch()
        assert training.wait(90) == 0
        print("commits while one was written slowly:", second - first)
        print("seconds until durable again:", waited)
        assert training.actions("BreakWorld") == [], "a step failed"
        assert second - first > 5 and max(waited.values()) <= BACK_S, waited
        whole = catalog.entry(storage, catalog.names(storage)[-1]).manifest
        assert whole is not None and catalog.verify(storage, whole) == ""
    finally:
        remove()
