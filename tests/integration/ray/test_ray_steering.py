"""A job on a Ray cluster is scaled up and down, a host is drained, a worker removed: by commands, and no step is
lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic.driver.reasons import ReasonKind, because
from harness import wording
from harness.ray_cluster import RayCluster, ray_nodes
from harness.ray_stepping import Stepping
from harness.step_lines import Step, committed_lost, repeated

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(400)]

WITHIN_S = (
    1.0  # from the last newcomer that is ready, or from the request, to a step of the new world
)
NODES, CPUS = 3, 4


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """Its drivers leave their records where no other job is found."""
    nodes = [{"num_cpus": CPUS}] * NODES
    with ray_nodes(tmp_path, nodes, env={"XDG_RUNTIME_DIR": str(tmp_path)}) as running:
        yield running


class Steered:
    """A job that begins with four workers, and may have no more until it is asked to."""

    def __init__(self, training: Stepping, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        self.training = training
        training.world(4)
        self.job = elastic.Job()

    def becomes(self, size: int, asked_at: float) -> list[Step]:
        """In time; a world of this size, newer than the request."""
        training = self.training

        def found() -> list[Step] | None:
            world = training.world(size)
            later = all(step.at > asked_at for step in world)
            return world if later and world[0].generation > before else None

        before = max(step.generation for step in training.steps() if step.at < asked_at)
        world = training.wait(found, f"a world of {size} after the request")
        generation = world[0].generation
        first = min(s.at for s in training.steps() if s.generation == generation)
        old = {step.pid for step in training.steps() if step.generation < generation}
        ready = [self.ready_at(step.pid) for step in world if step.pid not in old]
        took = first - max([asked_at, *ready])
        print(f"{size} workers after {took:.3f} s")  # pytest -rP shows it
        assert took < WITHIN_S, (size, took)
        return world

    def ready_at(self, pid: int) -> float:
        return float((self.training.folder / f"{pid}.ready").read_text())

    def rows(self) -> dict[str, dict[str, Any]]:
        """Of the workers that train now, by their names."""
        workers: dict[str, dict[str, Any]] = self.job.status()["rows"]["workers"]
        return {name: row for name, row in workers.items() if row.get("state") == "training"}


def test_job_on_ray_scales_from_4_to_8_to_3_with_a_drain_and_a_worker_removal(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "job"
    folder.mkdir()
    training = Stepping.elastic(cluster, folder, 4, 4)
    try:
        steered = Steered(training, monkeypatch, tmp_path)
        job = steered.job
        assert len(cluster.placement_groups()) == 4

        asked = time.monotonic()
        assert str(because(ReasonKind.SCALED, workers=8, before=4, leave=0, slots=8)) in job.scale(
            8
        )
        steered.becomes(8, asked)

        asked = time.monotonic()
        assert wording.THEM_LEAVE_2 in job.scale(3)
        world = steered.becomes(3, asked)
        # What it does not need any longer is free for others.
        cluster.until(lambda: len(cluster.placement_groups()) == 3, "three places to be held")

        victim = training.node_of(world[-1].pid)
        here = {step.pid for step in world if training.node_of(step.pid) == victim}
        [host] = [name for name in job.status()["rows"]["hosts"] if name.endswith(victim[:8])]
        asked = time.monotonic()
        told = job.drain(host)
        stay = {step.pid for step in world} - here
        world = steered.becomes(3, asked) if stay else training.world(3)
        assert {training.node_of(step.pid) for step in world}.isdisjoint({victim})
        assert stay < {step.pid for step in world}, told

        asked = time.monotonic()
        assert wording.LEAVES_AT_NEXT_COMMIT in job.remove(2)
        steered.becomes(2, asked)

        with pytest.raises(elastic.RequestRefused, match=wording.NOT_HOST_JOB):
            job.drain("elsewhere")
        training.finish()
        steps = training.steps()
        assert repeated(steps) == 0
        assert committed_lost(steps) == 0
    finally:
        outlived = training.job.end()
    assert not outlived
