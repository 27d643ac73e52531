"""Measure how long workers wait when other pods start, stop, or are lost: one job in a real control plane.

    python -m cluster.measure        (in tests/, after `make kubernetes`)

A gap is the longest time between two steps of any process that made steps before and after.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cluster.api import PATHS
from cluster.control_plane import ControlPlane, Node, eventually
from cluster.release import IMAGE, SPOT, Release
from elastic.driver.events import WorkerReady, WorkerResumed
from elastic.driver.journal import journal
from elastic.protocol.messages import Worker
from harness import wording


def joined(release: Release) -> None:
    """Return the time from a newcomer's readiness until it had made a step."""
    folder = release.plane.claim(release.namespace, "job-journal")
    [file] = [path for path in folder.rglob("journal*") if path.is_file()]
    ready: dict[Worker, float] = {}
    took_s: list[float] = []
    for entry in journal.read(file)[1]:
        match entry.event:
            case WorkerReady(worker, 0, running=True):
                ready[worker] = entry.at
            case WorkerResumed(worker) if worker in ready:
                took_s.append(entry.at - ready.pop(worker))
    shown = ", ".join(f"{each * 1000:.0f}" for each in took_s)
    print(f"    from ready to the first step in the world: {shown} ms")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir="/dev/shm"))
    plane = ControlPlane(folder)
    try:
        plane.start()
        with plane.namespace() as namespace:
            steps = folder / "steps"
            steps.mkdir()
            nodes = [plane.add_node(environment=IMAGE) for _ in range(4)]
            release = Release(plane, namespace, steps)
            release.install(3)
            release.until(3)
            measure(plane, release, nodes)
    finally:
        plane.close()


def measure(plane: ControlPlane, release: Release, nodes: list[Node]) -> None:
    namespace = release.namespace
    node_of = {node.name: node for node in nodes}

    def pod(name: str) -> dict:
        return next(each for each in namespace.list("Pod") if each["metadata"]["name"] == name)

    def told(what: str, act: Callable[[], object], size: int, back: int | None = None) -> None:
        since = time.time()
        act()
        release.until(size, more=5, timeout_s=90)
        took = release.last().at - since
        if back is not None:
            release.until(back, more=20, timeout_s=90)
        print(
            f"{what:42} gap {release.gap_s(since) * 1000:6.0f} ms, in the new world after {took:5.1f} s"
        )

    told("scale 3 -> 8", lambda: release.scale(8), 8)
    joined(release)
    told("scale 8 -> 2", lambda: release.scale(2), 2)
    told("scale 2 -> 3", lambda: release.scale(3), 3)
    joined(release)
    told("the API server is killed", plane.kill_api_server, 3)
    release.until(3, more=200)
    plane.start_api_server()
    told("a pod is deleted", lambda: namespace.delete("Pod", "job-worker-2"), 2, 3)
    told("a pod is evicted", lambda: namespace.evict("job-worker-1"), 2, 3)
    told("a pod is killed without notice", lambda: release.kill("job-worker-2"), 2, 3)
    driver = release.driver()
    told("the driver's pod is deleted", lambda: namespace.delete("Pod", driver), 3)
    eventually(lambda: release.said().count(wording.FIND_AGAIN) >= 1, "another driver")
    release.until(3, more=200)
    place = pod(release.driver())["spec"]["nodeName"]
    workers = {f"job-worker-{i}": pod(f"job-worker-{i}")["spec"]["nodeName"] for i in range(3)}
    away = next(node for node in workers.values() if node != place)
    path = f"{PATHS['Node']}/{away}"
    there = sum(node == away for node in workers.values())
    told("a node is cordoned", lambda: plane.kubectl("cordon", away), 3)
    told(
        "a spot taint on it", lambda: plane.api.patch(path, {"spec": {"taints": [SPOT]}}), 3 - there
    )
    plane.kubectl("uncordon", away)

    def only_the_spot_taint() -> bool:
        return [taint["key"] for taint in plane.api.get(path)["spec"]["taints"]] == [SPOT["key"]]

    # Its controller writes the whole list when it adds its own, and would restore what is deleted meanwhile.
    eventually(only_the_spot_taint, "the taint of what is cordoned is gone")
    plane.api.patch(path, {"spec": {"taints": []}})
    release.until(3, timeout_s=90)
    workers = {f"job-worker-{i}": pod(f"job-worker-{i}")["spec"]["nodeName"] for i in range(3)}
    away = next(n for n in workers.values() if n != pod(release.driver())["spec"]["nodeName"])
    there = sum(node == away for node in workers.values())

    told("a kubelet is frozen, its pods live", node_of[away].freeze, 3 - there, 3)
    node_of[away].thaw()
    eventually(lambda: len(node_of[away].pids()) == 0, "its pods are gone", 60.0)
    print(plane.kubectl("-n", namespace.name, "get", "pods", "-o", "wide"))
    release.until(3, more=100)
    workers = {f"job-worker-{i}": pod(f"job-worker-{i}")["spec"]["nodeName"] for i in range(3)}
    away = next(n for n in workers.values() if n != pod(release.driver())["spec"]["nodeName"])
    there = sum(node == away for node in workers.values())

    def lose() -> None:
        node_of[away].freeze()
        for pid in node_of[away].pids():
            os.kill(pid, signal.SIGSTOP)

    told("a node is lost (all of it frozen)", lose, 3 - there, 3)
    for pid in node_of[away].pids():
        os.kill(pid, signal.SIGCONT)
    release.until(3, more=100)
    print(plane.kubectl("-n", namespace.name, "get", "pods", "-o", "wide"))
    release.end()
    release.nothing_repeated()
    print("no step was repeated, none left out")
    print(release.said())


if __name__ == "__main__":
    main()
