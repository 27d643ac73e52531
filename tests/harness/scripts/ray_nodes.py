"""A separate Ray cluster on this machine, controlled by lines of JSON on stdin; see `harness.ray_cluster`.

    ray_nodes.py FOLDER '{"nodes": [{"num_cpus": 2}, ...], "redis": true, "dashboard": true, "system": {...}}'

Answers are lines of JSON on stdout: ``{"result": ...}`` or ``{"error": "..."}``; the first one says that the cluster
runs. Everything else is printed on stderr. The end of stdin stops the cluster.

Each node's processes, what they start included, inherit an environment variable with the node's mark. By it, and by who
started whom, a node can die as a machine does: at once, with all that ran on it, and nothing of its neighbours. The
mark alone is not enough: Ray writes its processes' titles over their environment.

What keeps the start of a head and two nodes at seven seconds of CPU, five of them Ray's imports for its own agents:
- RAY_enable_worker_prestart=0: no idle Python processes, one per CPU, before anybody asks (0.5 s of CPU each);
- no autoscaler, no log monitor, no pages of the dashboard: one service less, and less work for the others;
- RAY_enable_metrics_collection=0: nobody looks at metrics; those that can't be delivered cost 20 s at a program's end;
- RAY_USAGE_STATS_ENABLED=0: nothing is sent anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[2]))
from harness.ports import free_port
from harness.processes import in_session, marked

NODE_MARK = "TEST_RAY_NODE"
STORE_BYTES = 80_000_000
REDIS_START_S = 60.0
QUIET = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

Json = dict[str, Any]


class Bench:
    """The cluster and its operations: every public method is a command."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        from ray.cluster_utils import Cluster

        self._folder = folder
        self._redis: subprocess.Popen[bytes] | None = None
        self._sockets = os.environ["RAY_TMPDIR"]
        # Node id -> mark in the environment of all its processes.
        self._marks: dict[str, str] = {}
        head: Json = {
            "num_cpus": 0,
            "include_dashboard": bool(plan.get("dashboard")),
            "dashboard_port": free_port(),
            "dashboard_agent_listen_port": free_port(),
            "no_monitor": True,
            "temp_dir": os.environ["RAY_TMPDIR"] + "/ray",
            "_system_config": dict(plan.get("system") or {}),
        }
        if plan.get("redis"):
            head |= self._start_redis()
        # It would end our processes by a handler of SIGTERM, which threads can't set, and by a reaper of our group.
        self._cluster: Any = Cluster(shutdown_at_exit=False)
        self._add(head | dict(plan.get("head") or {}))
        self._started = [self._add(node) for node in plan.get("nodes") or []]

    # ---- nodes

    def hello(self) -> Json:
        """Return the cluster's address."""
        return {
            "address": self._cluster.address,
            "dashboard": self._cluster.head_node.webui_url or "",
            "session": self._cluster.head_node.get_session_dir_path(),
            "head": self._cluster.head_node.node_id,
            "nodes": self._started,
        }

    def nodes(self) -> list[Json]:
        """Return all nodes so far as reported by Ray, in no order."""
        draining = self._state.get_draining_nodes()
        running = {
            node.node_id
            for node in self._cluster.list_all_nodes()
            if "raylet" in dict(node.live_processes())
        }
        return [
            {
                "node": node["NodeID"],
                "ip": node["NodeManagerAddress"],
                "alive": node["Alive"],
                "runs": node["NodeID"] in running,  # Ray notices later
                "draining": node["NodeID"] in draining,
                "resources": node["Resources"],
                "head": node["NodeID"] == self._head_id,
            }
            for node in self._state.node_table()
        ]

    def add(self, **arguments: Any) -> str:
        """Add a node: num_cpus, num_gpus, resources, labels; return its id once Ray knows it."""
        return self._add(arguments)

    def kill(self, node: str) -> int:
        """Kill every process of this node with SIGKILL, as when a machine dies; return their number."""
        found = self._node(node)
        killed: set[int] = set()
        # Processes that fork meanwhile are found in the next round.
        while pids := pids_of([self._marks[node]]):
            if not killed:  # otherwise, it would restart killed processes
                found.all_processes["raylet"][0].process.send_signal(signal.SIGSTOP)
                pids = pids_of([self._marks[node]])
            killed |= kill(pids)
            self._reap()
        self._cluster.worker_nodes.discard(found)
        return len(killed)

    def kill_raylet(self, node: str) -> int:
        """Kill only the raylet with SIGKILL; its workers notice by themselves. Returns its pid."""
        found = self._node(node)
        raylet = found.all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait()
        return int(raylet.pid)

    def drain(self, node: str, deadline_s: float = 60.0, reason: str = "preemption") -> bool:
        """Drain like ``ray drain-node``; return whether it was accepted. ``reason``: preemption, or idle end."""
        from ray.core.generated import autoscaler_pb2 as messages

        name = f"DRAIN_NODE_REASON_{reason.upper().replace(' ', '_')}"
        number = messages.DrainNodeReason.Value(name)  # type: ignore[attr-defined]
        deadline_ms = int((time.time() + deadline_s) * 1000)
        accepted, why_not = self._client.drain_node(node, number, "test", deadline_ms)
        if not accepted:
            print(f"{node} is not drained: {why_not}", file=sys.stderr)
        return bool(accepted)

    def processes(self, node: str) -> list[int]:
        """Return the pids of all processes of this node, including its workers' children."""
        return sorted(pids_of([self._marks[node]]))

    # ---- the head's own service

    def kill_gcs(self) -> None:
        """Kill the GCS with SIGKILL. Without Redis its state is lost."""
        self._cluster.head_node.kill_gcs_server()

    def start_gcs(self) -> None:
        """Restart it with its state from Redis, at the same address."""
        if self._redis is None:
            raise ValueError("the GCS keeps nothing over a restart without redis=True")
        self._cluster.head_node.start_gcs_server()
        self._cluster.head_node._init_gcs_client()

    def restart_gcs(self) -> None:
        self.kill_gcs()
        self.start_gcs()

    # ---- inventory

    def actors(self) -> list[Json]:
        """Return every actor that is not dead."""
        return [
            {
                "actor": actor["ActorID"],
                "name": actor["Name"],
                "class": actor["ActorClassName"],
                "state": actor["State"],
                "node": actor["Address"]["NodeID"],
                "pid": actor["Pid"],
                "job": actor["JobID"],
            }
            for actor in self._state.actor_table(None, None, None).values()
            if actor["State"] != "DEAD"
        ]

    def placement_groups(self) -> list[Json]:
        """Return every placement group that has not been removed."""
        return [
            {
                "group": group["placement_group_id"],
                "name": group["name"],
                "state": group["state"],
                "bundles": list(group["bundles"].values()),
                "nodes": list(group["bundles_to_node_id"].values()),
            }
            for group in self._state.placement_group_table().values()
            if group["state"] != "REMOVED"
        ]

    def jobs(self) -> list[Json]:
        """Return every job with a running driver."""
        return [
            {"job": job["JobID"], "pid": job["DriverPid"], "entrypoint": job["Entrypoint"]}
            for job in self._state.job_table()
            if not job["IsDead"]
        ]

    def available(self) -> Json:
        """Return the free resources of all nodes."""
        return dict(self._state.available_resources())

    def stop(self) -> None:
        """End all of it, and leave no file outside of the caller's folder."""
        # A worker that was just forked has lost its parent by now, and a title may have replaced its mark.
        while pids := self._pids() - {os.getpid()}:
            kill(pids)
            self._reap()
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)

    # ---- implementation

    def _pids(self) -> set[int]:
        ours = [process.pid for process in in_session(os.getsid(0))]
        return pids_of(self._marks.values(), ours)

    @property
    def _state(self) -> Any:
        return self._cluster.global_state

    @property
    def _client(self) -> Any:
        return self._cluster.head_node.get_gcs_client()

    @property
    def _head_id(self) -> str:
        return str(self._cluster.head_node.node_id)

    def _add(self, arguments: Mapping[str, Any]) -> str:
        mark = secrets.token_hex(8)
        settings = {
            "object_store_memory": STORE_BYTES,
            "include_log_monitor": False,
            # Not os.environ, and no names that Ray selects: several nodes start at the same time.
            "env_vars": {NODE_MARK: mark},
            "raylet_socket_name": f"{self._sockets}/{mark}r",
            "plasma_store_socket_name": f"{self._sockets}/{mark}p",
        }
        node = self._cluster.add_node(**(settings | dict(arguments)))
        self._marks[node.node_id] = mark
        return str(node.node_id)

    def _node(self, node_id: str) -> Any:
        for node in self._cluster.worker_nodes:
            if node.node_id == node_id:
                return node
        if node_id == self._head_id:
            raise ValueError("the head node can't be killed: the cluster would be gone")
        raise ValueError(f"there is no node {node_id}")

    def _reap(self) -> None:
        """Reap a killed child of ours."""
        for node in self._cluster.list_all_nodes():
            for _, process in node.live_processes():
                process.poll()
        if self._redis is not None:
            self._redis.poll()
        time.sleep(0.01)

    def _start_redis(self) -> Json:
        """Start a server that only we can use. Its configuration is passed by stdin, because arguments are visible."""
        port, password = free_port(), secrets.token_hex(16)
        folder = self._folder / "redis"
        folder.mkdir()
        lines = [f"port {port}", "bind 127.0.0.1", f"requirepass {password}", f"dir {folder}"]
        lines += ['save ""', "appendonly no", "daemonize no", f"logfile {folder / 'log'}"]
        self._redis = subprocess.Popen(
            ["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert self._redis.stdin is not None
        self._redis.stdin.write("\n".join([*lines, ""]).encode())
        self._redis.stdin.close()
        deadline = time.monotonic() + REDIS_START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
            except OSError:
                if time.monotonic() > deadline or self._redis.poll() is not None:
                    log = folder / "log"
                    shown = log.read_text()[-2000:] if log.exists() else ""
                    raise RuntimeError(f"redis has not started\n{shown}") from None
                time.sleep(0.02)
            else:
                break
        return {"external_addresses": [f"127.0.0.1:{port}"] * 2, "redis_password": password}


def pids_of(marks: Iterable[str], others: Iterable[int] = ()) -> set[int]:
    """Return the live processes with one of these marks, these others, and their descendants; no zombies."""
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            children.setdefault(process.info["ppid"], []).append(process.pid)
    found: set[int] = set()
    todo = [process.pid for mark in marks for process in marked(f"{NODE_MARK}={mark}")]
    todo += others
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def kill(pids: Iterable[int]) -> set[int]:
    """Send SIGKILL to each; return those that existed."""
    killed = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return killed


def commands(bench: Bench, requests: Iterator[str], answer: Callable[[Json], None]) -> None:
    """Execute commands until the end of input or ``stop``."""
    for line in requests:
        request: Json = json.loads(line)
        name = request.pop("do")
        try:
            if name.startswith("_") or not hasattr(bench, name):
                raise ValueError(f"there is no command {name!r}")
            answer({"result": getattr(bench, name)(**request)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
        if name == "stop":
            return


def main() -> None:
    os.environ.update(QUIET | dict(json.loads(sys.argv[2]).get("env") or {}))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's output must not mix with answers

    def answer(what: Json) -> None:
        print(json.dumps(what), file=answers, flush=True)

    bench = Bench(Path(sys.argv[1]), json.loads(sys.argv[2]))
    try:
        answer({"result": bench.hello()})
        commands(bench, iter(sys.stdin.readline, ""), answer)
    finally:
        bench.stop()


if __name__ == "__main__":
    main()
