"""The program of a job, from the command of its worker pods."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.driver.discovery.kubernetes.api_client import ApiClient, ApiError, ApiErrorKind
from elastic.driver.discovery.kubernetes.pod_program import WAIT_S, find_program, program_of
from elastic.errors import Invalid
from harness.golden import raises, recorded

AGENT = ["elasticrun", "agent", "--job", "$(JOB_NAME)", "--"]


def a_pod(command: list[str] | None, args: list[str] | None) -> Any:
    container: dict[str, Any] = {"name": "node"}
    container |= {} if command is None else {"command": command}
    container |= {} if args is None else {"args": args}
    return {"metadata": {"name": "bert-node-0-0-x7k2p"}, "spec": {"containers": [container]}}


def test_program_follows_the_first_two_dashes():
    assert program_of(a_pod(AGENT, ["python", "t.py", "--", "x"])) == ["python", "t.py", "--", "x"]
    assert program_of(a_pod([*AGENT, "python"], ["t.py"])) == ["python", "t.py"]
    assert program_of(a_pod(None, [*AGENT, "python"])) == ["python"]


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (["python"], ["train.py"]),
        (AGENT, None),
        (None, None),
        (AGENT, ["python", "train.py", "--name=$(POD_NAME)"]),
    ],
)
def test_pod_without_a_literal_program_is_rejected(command, args):
    with raises(Invalid):
        program_of(a_pod(command, args))


class Waiting:
    """A clock that advances by each pause."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def find(self, *answers: Any) -> list[str]:
        cluster = create_autospec(ApiClient, instance=True)
        cluster.namespace, cluster.selector = "lab", "app=w"
        left = [*answers]

        def answer(kind: Any) -> Any:
            each = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(each, Exception):
                raise each
            return each, "7"

        cluster.all.side_effect = answer
        return find_program(cluster, self.log.append, clock=lambda: self.now, pause=self.pause)

    def pause(self, seconds: float) -> None:
        self.now += seconds


def test_driver_waits_for_the_first_pod_and_logs_each_reason_once():
    waiting = Waiting()
    silent = ApiError(ApiErrorKind.UNREACHABLE, "refused")
    pods = [a_pod(AGENT, ["python", "t.py"])]
    assert waiting.find([], [], silent, silent, pods) == ["python", "t.py"]
    recorded("log", waiting.log)


def test_driver_gives_up_without_a_pod():
    waiting = Waiting()
    with raises(Invalid):
        waiting.find([])
    assert waiting.now == WAIT_S


def test_missing_permission_ends_the_wait():
    waiting = Waiting()
    with raises(Invalid):
        waiting.find(ApiError(ApiErrorKind.FORBIDDEN, "HTTP 403"))
    assert waiting.now == 0.0
