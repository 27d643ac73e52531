"""A compute job on one host and a training job on another, each started as on a single one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import wording
from harness.history import SCRIPTS
from stress.hosts.namespaces import Network, obstacle
from stress.hosts.programs import HostProgram

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
START_S = 90.0  # TensorFlow's imports, twice
ENV = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def impossible() -> str:
    if importlib.util.find_spec("tensorflow") is None:
        return "needs tensorflow: pip install 'hvd-elastic[frameworks]'"
    return obstacle()


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why := impossible()), reason=why),
]


@pytest.fixture
def network(tmp_path) -> Iterator[Network]:
    with Network(["a", "b"], tmp_path) as network:
        yield network


@pytest.mark.nightly
def test_training_gets_samples_from_another_host_and_is_notified_of_its_loss(
    network, tmp_path, request
):
    a, b = network.hosts.values()
    file = str(tmp_path / "compute.json")

    def horovodrun(host, *words):
        command = [str(HOROVODRUN), "-np", "1", *words]
        program = HostProgram(host, f"job-{host.name}", command, tmp_path, env=ENV)
        request.addfinalizer(program.end)
        return program

    service = ["-m", "horovod.tensorflow.data.compute_worker", "--dispatcher-side", "training"]
    horovodrun(a, "--network-interface", "eth0", sys.executable, *service, file)
    training = horovodrun(b, sys.executable, str(SCRIPTS / "data_service.py"), file)
    training.wait_for(rf"grpc://{re.escape(b.address)}:\d+", START_S)
    training.wait_for("each sample once: True", START_S)
    for pid in a.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    training.wait_for(wording.COMPUTE_JOB_GONE % (re.escape(a.address),), START_S)
