"""Checkpoints are written to an S3 server that answers 503, closes connections, and hangs: no step fails."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage
from harness import wording
from harness.history import SCRIPTS
from harness.object_store import moto_server, one_store

TRAINING = ["python", str(SCRIPTS / "durable.py")]
AWAY_S = 8.0
BACK_S = 10.0  # after which the next one has to be there
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        moto_server() is None or importlib.util.find_spec("s3fs") is None,
        reason="needs moto_server in the path or in MOTO_BIN, and s3fs; pip install moto[server] s3fs",
    ),
]


def test_failing_object_store_fails_no_step_and_is_used_again(
    job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with one_store(tmp_path, "bucket") as (door, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        url = "s3://bucket/run"
        flags = f"-np 2 --min-np 2 --checkpoint-every 1s --checkpoint-dir {url}"
        training = job(flags, TRAINING, env={**env, "ENOUGH": str(tmp_path)})
        training.wait_for(wording.COMMIT_DURABLE_2, 60)
        storage = Storage(url)
        waited = {}
        for trouble in ("503", "close", "hang"):
            met, said = door.refused, training.output.count(wording.CANT_BE_WRITTEN)
            door.trouble = trouble
            time.sleep(AWAY_S)
            assert door.refused > met, f"nobody asked while the store was in trouble: {trouble}"
            door.trouble = ""
            back, made = time.monotonic(), len(training.events("CheckpointMade"))
            training.until(
                lambda made=made: len(training.events("CheckpointMade")) > made, "a newer one", 120
            )
            waited[trouble] = round(time.monotonic() - back, 1)
            assert training.output.count(wording.CANT_BE_WRITTEN) <= said + 2, (
                "one line of each rank, not many"
            )
        (tmp_path / "enough").touch()
        assert training.wait(90) == 0
        print("seconds until durable again:", waited)
        assert training.actions("BreakWorld") == [], "a step failed"
        assert max(waited.values()) <= BACK_S, waited
        entries = [catalog.entry(storage, name) for name in catalog.names(storage)]
        whole = [entry.manifest for entry in entries if entry.manifest is not None]
        assert all(each.torn or each.manifest is not None for each in entries)
        assert [catalog.verify(storage, each) for each in whole] == [""] * len(whole)
