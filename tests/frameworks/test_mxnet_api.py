"""`horovod.mxnet`, in worlds of 2 and 3 processes: see `in_mxnet`. MXNet needs a numpy that others refuse, and so an
environment of its own: make mxnet.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from frameworks.behaviours import FIRST_S, of_module

SCRIPTS = Path(__file__).parents[2] / "examples" / "horovod"
NEEDS = ("mxnet",)

pytestmark = pytest.mark.nightly


test_mxnet = of_module("in_mxnet", [2, 3])


def test_a_script_of_gluon_trains_on_two_workers(job):
    running = job("-np 2", ["python", SCRIPTS / "mxnet_gluon.py"])
    running.succeed(FIRST_S)
    (accuracy,) = {m[1] for line in running.lines if (m := re.search(r"accuracy: (.*)", line))}
    assert float(accuracy) > 0.9


def test_elastic_loop_loses_a_worker_and_gets_a_replacement(job):
    running = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 0.1 0.2 -H localhost:2",
        ["python", SCRIPTS / "mxnet_elastic.py", "--steps", "1200", "--pause", "0.02"],
    )
    running.wait_for(r"step 20 of 2 workers", FIRST_S)
    running.kill(0)
    running.wait_for_world(1)
    running.wait_for_world(2, FIRST_S)
    running.succeed(FIRST_S)
    ends = [
        m[1] for line in running.lines if (m := re.search(r"ended after 1200 steps: (.*)", line))
    ]
    assert len(ends) == 2 and len(set(ends)) == 1
    steps = {int(m[1]) for line in running.lines if (m := re.search(r"step (\d+) of", line))}
    assert sorted(steps) == list(range(0, 1200, 20))
