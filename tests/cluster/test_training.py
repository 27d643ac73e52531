"""A release of the chart trains on while its cluster does what clusters do: real controllers, real pods, real steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster.api import Namespace, ready
from cluster.control_plane import ControlPlane, Node, eventually

pytestmark = pytest.mark.kubernetes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/harness/scripts/stepping_in_pods.py"
IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "ELASTIC_PREEMPTION": "off",
    "OMP_NUM_THREADS": "1",
}
NEVER_LATE = [
    {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute"}
    | {"tolerationSeconds": 0}
    for what in ("unreachable", "not-ready")
]


class Step(NamedTuple):
    step: int
    rank: int
    size: int
    at: float


class Release:
    """One job, as the chart installs it, whose steps are seen in a folder that all pods share."""

    def __init__(self, plane: ControlPlane, namespace: Namespace, folder: Path) -> None:
        self.plane = plane
        self.namespace = namespace
        self.folder = folder

    def values(self, workers: int, at_least: int = 1, **values: object) -> str:
        """A file of them."""
        volume = {"name": "steps", "hostPath": {"path": str(self.folder)}}
        given = {
            "job": {"command": ["python", str(SCRIPT), "/steps"], "minWorkers": at_least},
            "worker": {"number": workers, "graceSeconds": 10, "tolerations": NEVER_LATE},
            "volumes": [volume],
            "volumeMounts": [{"name": "steps", "mountPath": "/steps"}],
            # The interpreter of these tests may be readable by root alone.
            "podSecurityContext": {"runAsUser": 0, "runAsNonRoot": False},
            **values,
        }
        path = self.folder.parent / "values.json"
        path.write_text(json.dumps(given))
        return str(path)

    def install(self, workers: int, **values: Any) -> None:
        file = self.values(workers, **values)
        chart = str(ROOT / "charts/hvd-elastic")
        self.plane.helm("install", "job", chart, "-n", self.namespace.name, "-f", file)

    def k8s(self, *words: str) -> subprocess.Popen[str]:
        """``elasticrun k8s``, from outside the cluster."""
        return subprocess.Popen(
            [str(Path(sys.executable).parent / "elasticrun"), "k8s", *words],
            env=self.plane.environment() | {"POD_IP": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def k8s_says(self, *words: str) -> str:
        command = self.k8s(words[0], "-n", self.namespace.name, *words[1:])
        output, errors = command.communicate(timeout=60)
        assert command.returncode == 0, errors
        return output

    def k8s_run(self, *command: str, name: str = "job") -> subprocess.Popen[str]:
        words = ["--image", "train:1", "--workers", "1:2", "--name", name]
        words += ["-n", self.namespace.name, "--set", "driver.backoffLimit=0"]
        words += ["--values", self.values(2)]
        return self.k8s("run", *words, "--", *command)

    def removed(self) -> None:
        self.namespace.wait_gone("StatefulSet", "job-worker")
        assert "job" not in self.plane.helm("list", "-n", self.namespace.name, "-q").split()

    def steps(self) -> dict[str, list[Step]]:
        """Of each process."""
        found = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            lines = path.read_text().split("\n")[:-1]
            found[path.stem] = [Step(*json.loads(line)) for line in lines]
        return found

    def last(self) -> Step:
        return max(
            (each for steps in self.steps().values() for each in steps),
            key=lambda each: each.at,
            default=Step(0, 0, 0, 0.0),
        )

    def until(self, size: int, *, more: int = 20, timeout_s: float = 60.0) -> Step:
        """A world of this size makes so many steps; the last of them."""
        begun = self.last().step

        def there() -> bool:
            last = self.last()
            return last.size == size and last.step >= begun + more

        eventually(there, f"{size} workers make {more} steps\n{self.said()[-3000:]}", timeout_s)
        return self.last()

    def said(self) -> str:
        return "".join(self.plane.log(self.namespace, name) for name in self.drivers())

    def drivers(self) -> list[str]:
        names = [path.stem for path in (self.plane.folder / "logs").iterdir()]
        prefix = f"{self.namespace.name}_"
        mine = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return sorted(name for name in mine if name.startswith("job-driver"))

    def driver(self) -> str:
        """The pod that drives now."""
        running = [
            pod["metadata"]["name"]
            for pod in self.namespace.list("Pod")
            if pod["metadata"]["name"].startswith("job-driver") and ready(pod)
        ]
        assert len(running) == 1, running
        return str(running[0])

    def replace_driver(self, grace_s: int | None) -> None:
        """Its pod is deleted, and the next one goes on."""
        before = len(self.drivers())
        self.namespace.delete("Pod", self.driver(), grace_s=grace_s)
        self.until(2, more=50)
        eventually(lambda: len(self.drivers()) == before + 1, "another driver comes")
        eventually(lambda: self.said().count("workers to find again") == before, "it goes on")

    def scale(self, workers: int) -> None:
        name = f"statefulset/job-worker --replicas={workers}"
        self.plane.kubectl("-n", self.namespace.name, "scale", *name.split())

    def end(self) -> None:
        (self.folder / "stop").touch()
        self.namespace.wait(
            "Job", "job-driver", lambda job: job and job.get("status", {}).get("succeeded") == 1
        )

    def nothing_repeated(self) -> None:
        """No process made a step twice, and none was left out by all."""
        made: set[int] = set()
        for process, steps in self.steps().items():
            numbers = [each.step for each in steps]
            assert numbers == sorted(set(numbers)), process
            made |= {*numbers}
        assert made == {*range(1, max(made) + 1)}


@pytest.fixture
def release(control_plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> Iterator[Release]:
    folder = tmp_path / "steps"
    folder.mkdir()
    found = Release(control_plane, namespace, folder)
    yield found
    (folder / "stop").touch()


@pytest.fixture
def nodes(add_node: Callable[..., Node]) -> list[Node]:
    return [add_node(environment=IMAGE), add_node(environment=IMAGE)]


def test_it_grows_and_shrinks_by_kubectl_scale_and_completes(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    release.scale(3)
    release.until(3)
    release.scale(1)
    release.until(1)
    release.end()
    release.nothing_repeated()
    assert "goes away" in release.said()


@pytest.mark.nightly
def test_a_pod_that_is_deleted_or_evicted_leaves_at_a_commit_and_another_takes_its_place(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    release.namespace.delete("Pod", "job-worker-1")
    release.until(1, more=1)
    release.until(2)
    release.namespace.evict("job-worker-0")
    release.until(1, more=1)
    release.until(2)
    release.end()
    release.nothing_repeated()
    assert len(release.steps()) == 4


def test_a_driver_that_is_deleted_or_killed_is_followed_by_another_and_no_step_fails(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2)
    release.until(2)
    release.replace_driver(grace_s=None)
    release.replace_driver(grace_s=0)
    release.scale(3)
    release.until(3)
    release.end()
    release.nothing_repeated()
    assert len(release.steps()) == 3


@pytest.mark.nightly
def test_training_goes_on_while_the_api_server_is_away(release: Release, nodes: list[Node]) -> None:
    release.install(2)
    release.until(2)
    release.plane.kill_api_server()
    eventually(lambda: "can't be watched" in release.said(), "the driver says so")
    release.until(2, more=100)
    release.plane.start_api_server()
    eventually(lambda: "answers again" in release.said(), "it hears of pods again", 60.0)
    release.scale(3)
    release.until(3)
    release.end()
    release.nothing_repeated()


@pytest.mark.nightly
def test_a_pod_of_a_lost_node_is_replaced_and_what_still_runs_there_harms_nobody(
    release: Release, nodes: list[Node], add_node: Callable[..., Node]
) -> None:
    lost = add_node(environment=IMAGE, heartless=True)
    release.install(3)
    release.until(3)
    pods = {
        pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in release.namespace.list("Pod")
    }
    assert lost.name in pods.values(), pods
    if pods[release.driver()] == lost.name:
        pytest.skip("the driver is on that node")
    lost.freeze()
    for pid in lost.pids():
        os.kill(pid, signal.SIGSTOP)
    gone = sum(node == lost.name for node in pods.values())
    release.until(3 - gone)
    release.until(3, timeout_s=90.0)
    assert "its node" in release.said() and "is not heard of" in release.said()
    for pid in lost.pids():
        os.kill(pid, signal.SIGCONT)
    release.until(3, more=100)
    release.end()
    release.nothing_repeated()


@pytest.mark.nightly
def test_without_rights_it_finds_its_workers_by_their_service(
    release: Release, nodes: list[Node]
) -> None:
    release.install(2, rbac={"create": False})
    release.until(2)
    assert "give it list and watch of pods; asking the name server instead" in release.said()
    release.end()


def test_elasticrun_k8s_run_shows_the_job_and_removes_it_at_its_end(
    release: Release, nodes: list[Node]
) -> None:
    running = release.k8s_run("python", str(SCRIPT), "/steps")
    release.until(2)
    status = release.k8s_says("status", "job")
    assert "job job runs; 2 of 2 worker pods serve it" in status and "job-worker-1" in status
    assert release.k8s_says("scale", "job", "1") == "job: 2 -> 1 worker pods\n"
    release.until(1)
    (release.folder / "stop").touch()
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert "generation 1 has 2 workers" in output and "training has ended" in output
    assert output.count("training has ended") == 1
    release.removed()


@pytest.mark.nightly
def test_ctrl_c_removes_it_and_a_program_that_fails_gives_its_exit_code(
    release: Release, nodes: list[Node]
) -> None:
    running = release.k8s_run("python", str(SCRIPT), "/steps")
    release.until(2)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130 and "removed job job; exit code 130" in errors
    release.removed()
    failing = release.k8s_run("python", "-c", "raise SystemExit(7)", name="other")
    output, errors = failing.communicate(timeout=110)
    assert failing.returncode == 1, errors
    assert "every worker ended before training began, the last with exit code 7" in output
