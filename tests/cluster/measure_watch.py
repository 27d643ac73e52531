"""Measure what following 1,000 pods costs a driver, in a real control plane without kubelets.

    python -m cluster.measure_watch [PODS]        (in tests/, after `make kubernetes`)

Pods are created and reported as running, and 10 of them per second change. A separate process follows them as a driver
does.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.api import STRATEGIC_MERGE, Namespace
from cluster.control_plane import ControlPlane
from elastic.driver.discovery.kubernetes.api_objects import Json

WATCHED_S = 30.0
CHANGES_PER_S = 10


async def follow(wanted: int) -> None:
    """In the measured process."""
    from elastic.driver.discovery.kubernetes.api_client import ApiClient, Resource
    from elastic.driver.discovery.kubernetes.pod_discovery import PodDiscovery

    class Counted(ApiClient):
        lists = 0

        def all(self, kind: Resource) -> tuple[list[Json], str]:
            self.lists += kind is Resource.PODS
            return super().all(kind)

    started = time.monotonic()
    cluster = Counted("app=w", os.environ["NAMESPACE"])
    changes = 0

    async def watch() -> None:
        nonlocal changes
        discovery = PodDiscovery(cluster, lambda *_: None, noticed=lambda _: None)
        async for hosts in discovery.watch():
            changes += 1
            if changes == 1:
                took_ms = (time.monotonic() - started) * 1000
                print(
                    f"{len(hosts)} of {wanted} pods listed {took_ms:.0f} ms after the start",
                    flush=True,
                )
                own[0] = time.process_time()
                memory[0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    own, memory = [0.0], [0]
    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(WATCHED_S)
    watching.cancel()
    core = (time.process_time() - own[0]) / WATCHED_S
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{core:.2%} of a core while {CHANGES_PER_S} pods a second changed: {changes - 1} changes of hosts"
    )
    print(f"pods were listed {cluster.lists} times, and followed after")
    print(f"memory {memory[0] / 1024:.0f} MB after the list, {now / 1024:.0f} MB at most")


def make(namespace: Namespace, number: int) -> None:
    name = f"w-{number}"
    container = {"name": "w", "image": "none", "resources": {"limits": {"cpu": "1"}}}
    pod = {
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "w"}},
        "spec": {"containers": [container]},
    }
    namespace.create(pod)
    say(namespace, number, "Running")


def say(namespace: Namespace, number: int, phase: str) -> None:
    status = {"phase": phase, "podIP": f"10.1.{number // 250}.{number % 250 + 1}"}
    path = f"/api/v1/namespaces/{namespace.name}/pods/w-{number}/status"
    namespace.api.patch(path, {"status": status}, content=STRATEGIC_MERGE)


def main() -> None:
    pods = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    if os.environ.get("NAMESPACE"):
        asyncio.run(follow(pods))
        return
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir="/dev/shm"))
    plane = ControlPlane(folder, scheduler=False)
    try:
        plane.start()
        with plane.namespace() as namespace:
            with ThreadPoolExecutor(4) as pool:
                [*pool.map(lambda number: make(namespace, number), range(pods))]
            environ = plane.environment() | {"NAMESPACE": namespace.name, "PYTHONPATH": "."}
            process = subprocess.Popen(
                [sys.executable, "-m", "cluster.measure_watch", str(pods)],
                env=environ,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            print(process.stdout.readline(), end="", flush=True)
            number = 0
            while process.poll() is None:
                say(namespace, number % pods, "Failed" if number // pods % 2 == 0 else "Running")
                number += 1
                time.sleep(1 / CHANGES_PER_S)
            print(process.stdout.read(), end="")
    finally:
        plane.close()


if __name__ == "__main__":
    main()
