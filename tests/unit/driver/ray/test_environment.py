"""Environment of workers on a Ray node, imports of their agent, and reasons why an actor did not start."""

from __future__ import annotations

import pytest

from elastic.driver.launch.agent_modules import agents_path, users_modules
from elastic.driver.ray.node.environment import environ_of_bytes, without_rays_own, workers_environ
from elastic.driver.ray.start_failures import exit_cause, why_no_actor
from harness.golden import recorded

OF_RAY = {
    "RAY_JOB_ID": "01000000",
    "RAY_RAYLET_PID": "77",
    "RAY_LD_PRELOAD_ON_WORKERS": "0",
    "SPT_NOENV": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
}


def test_variables_set_by_ray_are_removed_and_all_other_variables_kept():
    environ = {**OF_RAY, "HOME": "/h", "RAY_USE_TLS": "1", "RAY_TMPDIR": "/t"}
    kept = {"HOME": "/h", "RAY_USE_TLS": "1", "RAY_TMPDIR": "/t"}
    assert without_rays_own(environ, {}, {}) == kept


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"])
def test_variables_set_by_the_user_are_kept(name):
    environ = {**OF_RAY, name: "3"}
    assert without_rays_own(environ, {name: "3"}, {}) == {name: "3"}


def test_breakpoint_of_the_user_is_restored():
    assert without_rays_own(OF_RAY, {"PYTHONBREAKPOINT": "0"}, {}) == {"PYTHONBREAKPOINT": "0"}
    assert without_rays_own({"PYTHONBREAKPOINT": "my.debugger"}, {}, {}) != {}


def test_thread_limits_of_the_node_are_kept_and_ones_set_by_ray_removed():
    environ = {"OMP_NUM_THREADS": "1"}
    assert without_rays_own(environ, {}, {"OMP_NUM_THREADS": "1"}) == environ
    assert without_rays_own(environ, {}, {"OMP_NUM_THREADS": "8"}) == {}


def made(environ: dict[str, str], modules: list[str]) -> dict[str, str]:
    return workers_environ(
        environ,
        {},
        {},
        programs="/venv/bin",
        modules=modules,
        address="head:6379",
        namespace="mine",
        call="/tmp/x/call",
        folder="/work",
    )


def test_path_starts_with_the_actors_python():
    assert made({"PATH": "/a:/venv/bin:/b"}, [])["PATH"] == "/venv/bin:/a:/b"
    assert made({}, [])["PATH"] == "/venv/bin"


def test_workers_import_the_actors_modules_without_rays_internals():
    own = ["/lib.zip", "/lib", "/lib/lib-dynload", "/venv/site", "/src"]
    path = ["/venv/site/ray/thirdparty_files", "/pkg", "", *own, "/pkg", "/late"]
    modules = users_modules(path, own, "/venv/site/ray")
    assert modules == ["/pkg", "/late"]
    assert made({"PYTHONPATH": "/elsewhere"}, modules)["PYTHONPATH"] == "/pkg:/late"
    assert "PYTHONPATH" not in made({"PYTHONPATH": "/elsewhere"}, [])


def test_workers_join_the_same_cluster_and_get_only_the_drivers_gpus():
    found = made({**OF_RAY, "PWD": "/"}, [])
    assert found == {
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": "/venv/bin",
        "PWD": "/work",
        "RAY_ADDRESS": "head:6379",
        "RAY_NAMESPACE": "mine",
        "ELASTIC_CALL": "/tmp/x/call",
    }


def test_user_files_do_not_precede_the_imports_of_an_agent():
    own = ["/lib.zip", "/lib", "/lib/lib-dynload", "/venv/site"]
    assert agents_path(own, "/venv/site", ["/pkg"]) == [*own, "/pkg"]
    # From the user's files; Python's own modules still come first.
    assert agents_path(own, "/pkg", ["/other", "/pkg"]) == [
        *own[:3],
        "/pkg",
        "/venv/site",
        "/other",
    ]


def test_environment_block_of_the_kernel_is_parsed():
    block = b"A=1\0B=x=y\0broken\0C=\0raw=\xff\0"
    assert environ_of_bytes(block) == {"A": "1", "B": "x=y", "C": "", "raw": "\ufffd"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "ActorUnschedulableError",
            "The actor is not schedulable: The node specified via NodeAffinitySchedulingStrategy doesn't exist",
        ),
        (
            "ActorDiedError",
            "The actor died unexpectedly.\n\tclass_name: A\nThe actor died because its node has died. Node Id: x",
        ),
        (
            "ActorDiedError",
            "The actor died because of an error raised in its creation task, \x1b[36mray::A()\x1b[39m\n"
            "RuntimeError: The actor with name AgentActor failed to import on the worker. This may be ...\n"
            "ModuleNotFoundError: No module named 'elastic'",
        ),
        (
            "RuntimeEnvSetupError",
            "Failed to set up runtime environment.\n[Node 1.2.3.4] Traceback\nValueError: no such conda.",
        ),
        ("TimeoutError", ""),
        ("RpcError", "failed to connect\nmore"),
    ],
)
def test_reason_for_a_missing_actor_is_found(kind, text):
    recorded("messages", why_no_actor("alpha", "ab12cd34ef", kind, text, limit_s=30.0))


def test_reason_for_a_dead_actor_is_found():
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: AgentActor\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR."
    )
    recorded("messages", exit_cause("alpha", text))
