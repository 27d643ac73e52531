"""A job of `scripts/ray_stepping.py` on a Ray cluster: its steps and places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from harness.ray_cluster import RayCluster, RayJob
from harness.step_lines import Step, StepFiles

SCRIPT = Path(__file__).with_name("scripts") / "ray_stepping.py"
START_S = 90.0  # on a busy machine; a new worker takes about five seconds

Found = TypeVar("Found")


class Stepping:
    """A job that runs until `finish`."""

    def __init__(self, cluster: RayCluster, folder: Path, script: Path, *arguments: str) -> None:
        """Start a script that writes FOLDER/PID.steps like `scripts/ray_stepping.py`."""
        self.cluster = cluster
        self.folder = folder
        self._files = StepFiles(folder)
        self.job = RayJob(cluster, script, str(folder), *arguments, folder=folder)

    @classmethod
    def elastic(
        cls, cluster: RayCluster, folder: Path, workers: int, most: int, step_s: float = 0.02
    ) -> Stepping:
        """Start an elastic job of one to ``most`` workers."""
        return cls(cluster, folder, SCRIPT, str(workers), "1", str(most), str(step_s))

    def steps(self) -> list[Step]:
        """Return all steps so far, by time."""
        return self._files.steps()

    def world(self, size: int) -> list[Step]:
        """Wait for a newest world of ``size`` in which each member has made a step; return the last steps."""

        def found() -> list[Step] | None:
            world = self._files.newest_world()
            return world if len(world) == size else None

        return self.wait(found, f"a world of {size}")

    def later(self, than: float, pids: set[int], count: int = 5) -> None:
        """Wait until each of these processes has made this many steps after this time."""

        def done() -> bool:
            counts: defaultdict[int, int] = defaultdict(int)
            for step in reversed(self.steps()):
                if step.at <= than:
                    break
                counts[step.pid] += 1
            return all(counts[pid] >= count for pid in pids)

        self.wait(done, f"{count} steps more of {sorted(pids)}")

    def gone(self, pid: int) -> None:
        """Wait for the end of this process."""
        self.wait(lambda: not psutil.pid_exists(pid), f"the end of {pid}")

    def wait(
        self, found: Callable[[], Found | None], awaited: str, timeout: float = START_S
    ) -> Found:
        return self.job.until(found, awaited, timeout)

    def node_of(self, pid: int) -> str:
        """Return the node of this process."""
        for node in self.cluster.alive():
            if pid in self.cluster.processes(node):
                return node
        raise AssertionError(f"process {pid} is on no node")

    def finish(self) -> None:
        """Let all stop at the same step, with success."""
        (self.folder / "stop").touch()
        self.job.succeed(START_S)
