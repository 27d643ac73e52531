"""Program and environment of a health check."""

from __future__ import annotations

import sys

import pytest

from elastic.driver.processes.health_check_run import (
    COMMAND,
    TIMEOUT,
    command_of,
    environment_of,
    without_check,
)
from elastic.driver.settings import AUTO
from elastic.protocol.messages import Worker


@pytest.mark.parametrize(
    ("worker_command", "python"),
    [
        (["/opt/bin/python3", "train.py"], "/opt/bin/python3"),
        (["./run.sh"], sys.executable),
        ([], sys.executable),
    ],
)
def test_built_in_check_is_run_by_the_workers_python(worker_command, python):
    assert command_of(AUTO, worker_command)[0] == python


def test_command_is_run_by_a_shell():
    assert command_of("dcgmi diag -r 1", ["python"]) == ["sh", "-c", "dcgmi diag -r 1"]


def test_check_knows_its_host_and_slot_but_no_secret():
    env = {"PATH": "/bin", "ELASTIC_SECRET": "x", "ELASTIC_TLS_KEY": "k", COMMAND: AUTO}
    found = environment_of(Worker("gpu1", 3, 2), env)
    assert found == {"PATH": "/bin", "ELASTIC_HOST": "gpu1", "ELASTIC_SLOT": "3", COMMAND: AUTO}


def test_worker_does_not_inherit_the_check():
    assert without_check({"A": "1", COMMAND: AUTO, TIMEOUT: "9"}) == {"A": "1"}
