"""Lightning's ModelParallelStrategy with FSDP2: a fixed number of workers trains; elastic.run refuses it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from elastic.errors import Fixed
from harness.history import SCRIPTS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    # Its import takes seconds, and every process of pytest collects this module.
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning"),
]
TRAINING = ["python", SCRIPTS / "model_parallel.py"]


def test_a_fixed_number_of_workers_trains(job: Any):
    training = job("-np 2", TRAINING, env={"HOW": "fixed"})
    training.succeed(200)
    assert len([*training.folder.glob("trained.*")]) == 2


@pytest.mark.parametrize("how", ["run", "ours"])
def test_a_trainer_of_a_fully_sharded_module_is_refused_in_an_elastic_job(job: Any, how: str):
    training = job("-np 2 --min-np 2", TRAINING, env={"HOW": how})
    assert training.wait(250) == 1
    kinds = {each.read_text() for each in training.folder.glob("refused.*")}
    assert kinds == {Fixed.MODULE.value}
    assert not [*training.folder.glob("trained.*")]
