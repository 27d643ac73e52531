"""torch's own tests of a backend for process groups, run against ours. A program: NAME... of tests, or none for all.

They are those of `torch.testing._internal.distributed.distributed_test`, which comes with torch. Ours stands in the
place of Gloo, as in workers of elasticrun, so that whatever torch asks of Gloo is asked of ours. Each test forks its
ranks: a start of each would import torch again. A line of JSON for each test on stdout: its name, what came of it, why.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from typing import Any

RANKS = os.environ.setdefault("WORLD_SIZE", "2")
os.environ |= {
    "BACKEND": "gloo",
    "ELASTIC_TORCH_BACKEND": "elastic",
    "TEMP_DIR": "",  # each test makes its own
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "90",
}

import torch  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from elastic.collectives import single_rank  # noqa: E402, F401

# So that the ranks need not import them.
from elastic.collectives.groups import group_factory  # noqa: E402, F401
from elastic.torch_backend import backend_override, registration  # noqa: E402, F401

torch.set_num_threads(1)
# Events of its own backends in a profile, which C++ ends in another thread. Ours are different: see
# `FollowingGroup.call`.
distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
sync: Any = distributed_test.Barrier.sync
# 10 s are too short on two busy cores.
sync.__func__.__defaults__ = (None, 60)


class TestElastic(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, *args: Any, **options: Any) -> None:
        os.environ |= {"RANK": str(rank), "MASTER_PORT": "1"}  # they rendezvous in a file
        super()._run(rank, *args, **options)


class Told(unittest.TestResult):
    def say(self, test: Any, outcome: str, why: str) -> None:
        print(json.dumps([test._testMethodName, outcome, why]), file=sys.__stdout__, flush=True)

    def addSuccess(self, test: Any) -> None:
        self.say(test, "passed", "")

    def addSkip(self, test: Any, reason: str) -> None:
        self.say(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:
        self.say(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addFailure = addError


if __name__ == "__main__":
    names = sys.argv[1:] or unittest.TestLoader().getTestCaseNames(TestElastic)
    unittest.TestSuite(TestElastic(name) for name in names).run(Told())
