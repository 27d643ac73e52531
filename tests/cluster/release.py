"""One job, as the chart installs it, whose steps are visible in a folder that all of its pods share."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from cluster.api import Namespace, ready
from cluster.control_plane import MARK, ControlPlane, eventually
from harness import wording
from harness.processes import marked

ROOT = Path(__file__).parents[2]
CHART = str(ROOT / "charts/hvd-elastic")
SCRIPT = ROOT / "tests/harness/scripts/stepping_in_pods.py"
IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "ELASTIC_PREEMPTION": "off",
    "OMP_NUM_THREADS": "1",
}
SPOT = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule", "value": "x"}
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
    """A release of the chart, in a separate namespace. ``folder``: files with the steps of each of its processes."""

    def __init__(self, plane: ControlPlane, namespace: Namespace, folder: Path) -> None:
        self.plane = plane
        self.namespace = namespace
        self.folder = folder

    def values(self, workers: int, at_least: int = 1, **values: object) -> str:
        """Write the values to a file."""
        volume = {"name": "steps", "hostPath": {"path": str(self.folder)}}
        given = {
            "job": {"command": ["python", str(SCRIPT), "/steps"], "minWorkers": at_least},
            "worker": {"number": workers, "graceSeconds": 10, "tolerations": NEVER_LATE},
            "volumes": [volume],
            "volumeMounts": [{"name": "steps", "mountPath": "/steps"}],
            # The interpreter of these tests may be readable for root only.
            "podSecurityContext": {"runAsUser": 0, "runAsNonRoot": False},
            **values,
        }
        path = self.folder.parent / "values.json"
        path.write_text(json.dumps(given))
        return str(path)

    def install(self, workers: int, **values: Any) -> None:
        self.helm("install", "job", CHART, "-f", self.values(workers, **values))

    def upgrade(self, workers: int, *flags: str, **values: Any) -> None:
        self.helm("upgrade", "job", CHART, "-f", self.values(workers, **values), *flags)

    def helm(self, *words: str) -> str:
        return self.plane.helm(*words, "-n", self.namespace.name)

    def k8s(self, *words: str) -> subprocess.Popen[str]:
        """Run ``elasticrun k8s`` from outside the cluster."""
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

    def k8s_refuses(self, *words: str) -> str:
        """Expect a refusal with this sentence."""
        command = self.k8s(words[0], "-n", self.namespace.name, *words[1:])
        output, errors = command.communicate(timeout=60)
        assert command.returncode == 2 and output == "", output + errors
        return errors

    def k8s_run(self, *command: str, name: str = "job") -> subprocess.Popen[str]:
        words = ["--image", "train:1", "--workers", "1:2", "--name", name]
        words += ["-n", self.namespace.name, "--set", "driver.backoffLimit=0"]
        words += ["--values", self.values(2)]
        return self.k8s("run", *words, "--", *command)

    def removed(self) -> None:
        self.namespace.wait_gone("StatefulSet", "job-worker")
        assert "job" not in self.helm("list", "-q").split()

    def steps(self) -> dict[str, list[Step]]:
        """Return the steps of each process."""
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

    def gap_s(self, since: float) -> float:
        """Return the longest time between two steps of a process that has made steps before and after then."""
        longest = 0.0
        for steps in self.steps().values():
            times = [each.at for each in steps]
            if times and times[0] < since:
                near = [at for at in times if at >= since - 0.1]
                longest = max([longest, *(b - a for a, b in itertools.pairwise(near))])
        return longest

    def until(self, size: int, *, more: int = 20, timeout_s: float = 60.0) -> Step:
        """Wait until a world of this size makes this many steps; return the last of them."""
        begun = self.last().step

        def there() -> bool:
            last = self.last()
            return last.size == size and last.step >= begun + more

        try:
            eventually(there, f"{size} workers make {more} steps", timeout_s)
        except AssertionError as error:  # the driver's output is relevant now
            raise AssertionError(f"{error}\n{self.said()[-6000:]}") from None
        return self.last()

    def said(self) -> str:
        return "".join(self.plane.log(self.namespace, name) for name in self.drivers())

    def drivers(self) -> list[str]:
        """Return its pods, the newest last."""
        begun = f"{self.namespace.name}_"
        found = (self.plane.folder / "logs").glob(f"{begun}job-driver*")
        newest_last = sorted(found, key=lambda path: path.stat().st_mtime)
        return [path.stem.removeprefix(begun) for path in newest_last]

    def driver(self) -> str:
        """Return the pod that drives now."""
        running = [
            pod["metadata"]["name"]
            for pod in self.namespace.list("Pod")
            if pod["metadata"]["name"].startswith("job-driver") and ready(pod)
        ]
        assert len(running) == 1, running
        return str(running[0])

    def replace_driver(self, grace_s: int | None) -> None:
        """Delete its pod, and wait for the next one."""
        before = len(self.drivers())
        self.namespace.delete("Pod", self.driver(), grace_s=grace_s)
        self.until(2, more=50)
        eventually(lambda: len(self.drivers()) == before + 1, "another driver comes")
        eventually(lambda: self.said().count(wording.WORKERS_FIND_AGAIN) == before, "it goes on")

    def kill(self, pod: str) -> None:
        """Kill all its processes together; its container is restarted."""
        ours = {process.pid for process in marked(f"{MARK}={self.plane.mark}")}
        for process in marked(f"POD_NAME={pod}"):
            if process.pid in ours:
                process.kill()

    def scale(self, workers: int) -> None:
        name = f"statefulset/job-worker --replicas={workers}"
        self.plane.kubectl("-n", self.namespace.name, "scale", *name.split())

    def end(self) -> None:
        (self.folder / "stop").touch()
        self.namespace.wait(
            "Job", "job-driver", lambda job: job and job.get("status", {}).get("succeeded") == 1
        )

    def nothing_repeated(self) -> None:
        """Check that no process made a step twice, and that no step is missing."""
        made: set[int] = set()
        for process, steps in self.steps().items():
            numbers = [each.step for each in steps]
            assert numbers == sorted(set(numbers)), process
            made |= {*numbers}
        assert made == {*range(1, max(made) + 1)}
