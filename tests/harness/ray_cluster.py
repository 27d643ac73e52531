"""Real Ray clusters for tests, several nodes on this machine; and programs that use them. Never imports ray.

A cluster is a process, `scripts/ray_nodes.py`, with ports, folder, and Redis of its own. It ends when
this process ends, in whatever way. All processes of the cluster have a mark in their environment and are killed then.
"""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.processes import clean_environment, in_session, kill_all, marked
from harness.program import GRACE_S, SHOWN_LINES, Program
from harness.waiting import wait_until

CLUSTER_MARK = "TEST_RAY_CLUSTER"
JOB_MARK = "TEST_RAY_JOB"
START_S = 90.0
COMMAND_S = 60.0
STOP_S = 30.0  # for a busy machine; it takes half a second
NODES = Path(__file__).with_name("scripts") / "ray_nodes.py"

Json = dict[str, Any]


class RayCluster:
    """A cluster that runs: ``address`` is for ray.init and RAY_ADDRESS. The head has no CPUs: it gets no worker.

    ``nodes`` are arguments of nodes beside the head, as for `add`. With ``redis`` its GCS can be restarted. With
    ``dashboard`` jobs can be submitted to the URL ``dashboard``. ``system`` is Ray's ``_system_config``, ``head`` more
    arguments for the head's node, ``env`` what all its processes have in their environment.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[Mapping[str, Any]] = (),
        *,
        redis: bool = False,
        dashboard: bool = False,
        system: Mapping[str, Any] | None = None,
        head: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        # Unix sockets' paths may have 107 characters, and Ray's are long already.
        self._temporary = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        self._log = folder / "ray_nodes.log"
        plan = {
            "nodes": [dict(node) for node in nodes],
            "redis": redis,
            "dashboard": dashboard,
            "system": dict(system or {}),
            "head": dict(head or {}),
            "env": dict(env or {}),
        }
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(NODES), str(folder), json.dumps(plan)],
                env=ray_environment()
                | {"RAY_TMPDIR": str(self._temporary), CLUSTER_MARK: self._mark},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            hello = self._answer("start", START_S)
        except BaseException:
            self.stop()
            raise
        self.address: str = hello["address"]
        self.dashboard = f"http://{hello['dashboard']}" if dashboard else ""
        self.session = Path(hello["session"])  # logs are in its ``logs``
        self.head: str = hello["head"]
        self.started: list[str] = hello["nodes"]  # ids of ``nodes``, in their order

    # ---- nodes

    def nodes(self) -> list[Json]:
        """Return all nodes so far: node (id), ip, alive, runs (earlier than alive), draining, resources, head."""
        return list(self.do("nodes"))

    def alive(self) -> list[str]:
        """Return the ids of the nodes that Ray believes alive, without the head."""
        return [node["node"] for node in self.nodes() if node["alive"] and not node["head"]]

    def add(self, **arguments: Any) -> str:
        """Add a node (num_cpus, num_gpus, resources, labels); return its id."""
        return str(self.do("add", **arguments))

    def kill(self, node: str) -> int:
        """Kill the machine: SIGKILL to all processes of this node. Returns their number."""
        return int(self.do("kill", node=node))

    def kill_raylet(self, node: str) -> int:
        """Kill only this raylet; return its pid."""
        return int(self.do("kill_raylet", node=node))

    def drain(self, node: str, deadline_s: float = 60.0, reason: str = "preemption") -> bool:
        """Drain like ``ray drain-node``; return whether it was accepted."""
        return bool(self.do("drain", node=node, deadline_s=deadline_s, reason=reason))

    def processes(self, node: str) -> list[int]:
        """Return the pids of all processes of this node."""
        return list(self.do("processes", node=node))

    # ---- the head

    def restart_gcs(self) -> None:
        """Kill it, and start a new one with the same address and state; needs ``redis``."""
        self.do("restart_gcs")

    def kill_gcs(self) -> None:
        self.do("kill_gcs")

    def start_gcs(self) -> None:
        self.do("start_gcs")

    # ---- inventory

    def actors(self) -> list[Json]:
        """Return the actors that are not dead: actor, name, class, state, node, pid, job."""
        return list(self.do("actors"))

    def placement_groups(self) -> list[Json]:
        """Return the groups that are not removed: group, name, state, bundles, nodes."""
        return list(self.do("placement_groups"))

    def jobs(self) -> list[Json]:
        """Return the jobs with a running driver: job, pid, entrypoint."""
        return list(self.do("jobs"))

    def available(self) -> dict[str, float]:
        """Return the free resources."""
        return dict(self.do("available"))

    def until(self, true: Callable[[], bool], awaited: str, timeout: float = 30.0) -> None:
        wait_until(true, awaited, timeout)

    # ---- implementation

    def do(self, command: str, **arguments: Any) -> Any:
        """Run any command of ``ray_nodes.py``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(command, COMMAND_S)

    def _answer(self, command: str, timeout: float) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        # An answer is one line, and only one is pending, so buffered data does not mislead select.
        readable, _, _ = select.select([stdout], [], [], timeout)
        assert readable, self._story(f"waited {timeout} s for the answer to {command!r}")
        line = stdout.readline()
        assert line, self._story(f"the cluster ended at {command!r}")
        answer = json.loads(line)
        assert "error" not in answer, f"{command}: {answer['error']}"
        return answer["result"]

    def running(self) -> list[psutil.Process]:
        """Return its processes: those in its session, and those with its mark; Ray writes titles over environments."""
        found = [*marked(f"{CLUSTER_MARK}={self._mark}"), *in_session(self._process.pid)]
        return [*{*found}]

    def _story(self, trouble: str) -> str:
        return "\n  ".join(
            [trouble, *self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]]
        )

    def stop(self) -> list[psutil.Process]:
        """End it; return the processes that outlived it, which are killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        left = self.running()
        kill_all(self.running)
        self._process.wait(GRACE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
        return left


class RayJob(Program):
    """A Python program that is a driver of a cluster; RAY_ADDRESS says where.

    Its processes are those on this side: the program and its children. What Ray starts for it is the cluster's.
    """

    def __init__(
        self,
        cluster: RayCluster,
        script: Path | str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        own = {"RAY_ADDRESS": cluster.address, "PYTHONUNBUFFERED": "1"}
        super().__init__(
            [sys.executable, str(script), *arguments],
            folder=folder or cluster.folder,
            env=ray_environment() | own | dict(env or {}),
            mark=JOB_MARK,
        )


@contextlib.contextmanager
def ray_nodes(
    folder: Path, nodes: Sequence[Mapping[str, Any]] = (), **settings: Any
) -> Iterator[RayCluster]:
    """Start a cluster for the block; see `RayCluster`."""
    cluster = RayCluster(folder, nodes, **settings)
    try:
        yield cluster
    finally:
        left = cluster.stop()
    assert not left, f"these processes outlived their cluster: {left}"


def ray_environment() -> dict[str, str]:
    """Return our environment without traces of a job or a cluster, and without Ray's usage reports."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}
    return clean_environment("RAY_") | quiet
