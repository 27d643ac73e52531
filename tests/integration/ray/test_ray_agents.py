"""Agents on a real Ray cluster: their nodes, their workers' environment, their ends, and no leaks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import wording
from harness.history import SCRIPTS
from harness.ray_cluster import RayCluster, RayJob

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
SCRIPT = SCRIPTS / "ray_agents.py"
WAIT_S = 60.0

Told = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def job(with_redis: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayJob]:
    program = tmp_path_factory.mktemp("program")
    (program / "helper.py").write_text("")
    (program / "driver.py").write_text("raise SystemExit('the wrong driver')")
    running = RayJob(with_redis, SCRIPT, str(program), "agents")
    try:
        yield running
    finally:
        left = running.end()
    assert not left, f"these processes outlived the program: {left}"


@pytest.fixture
def told(job: RayJob) -> Told:
    """The facts of a line that the script prints under this name."""

    def of(name: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(job.wait_for(rf"^{name} (\{{.*)", WAIT_S)[1])
        return facts

    return of


def test_workers_run_in_the_users_runtime_env(told):
    found = told("looked")
    environ = found["environ"]
    assert environ["MINE"] == "7"
    assert environ["PYTHONBREAKPOINT"] == "0"
    assert Path(found["helper"]).parent == Path(found["cwd"]) == Path(environ["PWD"])
    first, second = environ["PATH"].split(":")[:2]
    assert (first, second) == (str(Path(sys.executable).parent), "/users/own")
    assert found["python"] == sys.executable
    assert found["call"] == "the call"


def test_variables_set_by_ray_for_the_actor_process_are_removed_for_workers(told):
    found = told("looked")
    environ = found["environ"]
    strange = {"RAY_JOB_ID", "RAY_RAYLET_PID", "SPT_NOENV", "RAY_LD_PRELOAD_ON_WORKERS"}
    assert not strange & set(environ)
    assert not any("/ray/_private" in each or "thirdparty" in each for each in found["path"])
    assert environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_worker_joins_the_cluster_and_the_namespace(told):
    found = told("joined")
    assert (found["nodes"], found["namespace"]) == (3, "mine")


def test_the_secret_is_in_no_argument_and_the_actors_have_their_names(told):
    found = told("placed")
    assert sorted(found["names"]) == [
        f"hvd-elastic-agent:agents:{name}" for name in ("left", "right")
    ]
    assert "73" * 32 not in " ".join(found["command"])


def test_agent_and_workers_end_when_their_actor_is_killed(told):
    assert told("actor-killed")["took_s"] < 20.0
    assert told("again")["swept"]


def test_actor_ends_when_its_agent_is_killed(told):
    found = told("agent-killed")
    assert found["took_s"] < 15.0 and not found["folder"]
    assert wording.WARNING_AGENT_LEFT_KILLED in found["log"]


def test_a_detached_agent_finds_the_next_driver(told):
    found = told("redirected")
    assert found["took_s"] < 15.0
    assert "hvd-elastic-agent:lasting:left" in found["names"]


def test_closing_leaves_no_process_no_folder_and_no_actor_name(told):
    found = told("closed")
    assert not any(found["alive"])
    assert found["folders"] and not found["kept"]
    assert found["names"] == []


def test_no_actor_remains_after_all_jobs_end(told, job, with_redis):
    assert told("names")["names"] == []
    job.succeed(WAIT_S)
    assert "AgentActor" not in {actor["class"] for actor in with_redis.actors()}
