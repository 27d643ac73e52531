"""What does a node of a Ray cluster cost that dies with its workers? Beside Ray Train's TorchTrainer, in one run.

    python benchmarks/ray_train.py [--rounds 3] [--kills 10] [--json FILE]

A cluster of three nodes with a worker each and one to spare, on this machine. In each round both train the same model
with steps of the same length, one after the other, until the raylet and all processes of one node get a SIGKILL. Then
counted: the longest time in which no new step was done by anybody, and how many steps were done again. Ray Train has a
checkpoint every ten steps and as many attempts as it likes; hvd-elastic commits every step.

``--kills``: after that, one elastic job loses so many nodes, one after the other, each replaced by a new one: the time
to the slowest survivor's next step, the longest pause while a node comes, lost commits, and what is left behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from integration.ray_cluster import RayCluster, RayJob, ray_nodes
from integration.ray_stepping import Step, Stepping, committed_lost

NODES = 3
STEP_S = 0.05
EVERY = 10  # steps between two checkpoints of Ray Train's
BEFORE = 47  # steps before the fault: seven after a checkpoint
AFTER = 20  # new steps after it, at least
START_S = 180.0
TORCH_TRAINER = Path(__file__).with_name("ray_torch_trainer.py")
console = Console()


class TrainerStepping(Stepping):
    """A job of Ray Train's that writes the same lines."""

    def __init__(self, cluster: RayCluster, folder: Path, workers: int) -> None:
        self.cluster = cluster
        self.folder = folder
        arguments = [str(folder), str(workers), str(STEP_S), str(EVERY)]
        self.job = RayJob(cluster, TORCH_TRAINER, *arguments, folder=folder)


def elastic_job(cluster: RayCluster, folder: Path) -> Stepping:
    return Stepping(cluster, folder, NODES, NODES, STEP_S)


def trainer_job(cluster: RayCluster, folder: Path) -> Stepping:
    return TrainerStepping(cluster, folder, NODES)


def one_fault(
    cluster: RayCluster, make: Callable[[RayCluster, Path], Stepping], folder: Path
) -> dict[str, float]:
    """Longest time without a new step, in seconds, and steps done again."""
    replenish(cluster, NODES + 1)
    folder.mkdir()
    job = make(cluster, folder)
    try:
        at_step(job, BEFORE)
        members = {step.rank: step for step in job.steps()}
        node = job.node_of(members[NODES - 1].pid)
        before = job.steps()
        killed = time.monotonic()
        cluster.kill(node)
        at_step(job, max(step.step for step in before) + AFTER)
        finish(job)
        return measured(job.steps(), killed)
    finally:
        job.job.end()


def at_step(job: Stepping, number: int) -> None:
    job.wait(
        lambda: max((step.step for step in job.steps()), default=0) >= number,
        f"step {number}",
        START_S,
    )


def finish(job: Stepping) -> None:
    (job.folder / "stop").touch()
    job.job.wait(120)


def measured(steps: list[Step], killed: float) -> dict[str, float]:
    reached, at, gap = 0, 0.0, 0.0
    for step in steps:
        if step.step > reached:
            if step.at > killed:
                gap = max(gap, step.at - max(at, killed - STEP_S))
            reached, at = step.step, step.at
    before = [step for step in steps if step.at <= killed + 0.001]
    generation = max(step.generation for step in before)
    last = max(step.step for step in steps if step.generation == generation)
    following = min(step.step for step in steps if step.generation > generation)
    return {"gap_s": gap, "repeated": float(max(0, last - following + 1))}


def replenish(cluster: RayCluster, count: int) -> None:
    """So many nodes that run and that Ray takes for alive; the dead ones it has heard of."""
    cluster.until(
        lambda: all(node["runs"] or not node["alive"] for node in cluster.nodes()),
        "Ray to notice who is dead",
        90,
    )
    while len(workers_nodes(cluster)) < count:
        cluster.add(num_cpus=1)


def workers_nodes(cluster: RayCluster) -> list[str]:
    return [node["node"] for node in cluster.nodes() if node["runs"] and not node["head"]]


# ---- many losses of one job ------------------------------------------------------------------------------------------


def many_kills(cluster: RayCluster, folder: Path, kills: int) -> dict[str, Any]:
    replenish(cluster, NODES)
    actors, groups = len(cluster.actors()), len(cluster.placement_groups())
    folder.mkdir()
    # Always one place that waits: a node that comes gets a worker at once.
    job = Stepping(cluster, folder, NODES, NODES + kills + 1, STEP_S / 5)
    recoveries, joins = [], []
    try:
        job.world(NODES)
        for number in range(kills):
            world = {step.pid: job.node_of(step.pid) for step in job.world(NODES)}
            victim = sorted(world)[number % NODES]
            survivors = world.keys() - {victim}
            killed = time.monotonic()
            cluster.kill(world[victim])
            job.later(killed, set(survivors))
            generation = {s.pid: s.generation for s in job.steps() if s.at <= killed}
            next_steps = [
                min(s.at for s in job.steps() if s.pid == pid and s.generation > generation[pid])
                for pid in survivors
            ]
            recoveries.append(max(next_steps) - killed)
            added = time.monotonic()
            cluster.add(num_cpus=1)
            job.world(NODES)
            joins.append(longest_gap(job.steps(), survivors, added))
            console.print(
                f"kill {number + 1}: {recoveries[-1] * 1e3:.0f} ms, join: {joins[-1] * 1e3:.0f} ms"
            )
        steps = job.steps()
        finish(job)
    finally:
        outlived = job.job.end()
    cluster.until(lambda: len(cluster.actors()) <= actors, "no actors to be left")
    cluster.until(lambda: len(cluster.placement_groups()) <= groups, "no placement groups")
    return {
        "recovery_s": recoveries,
        "join_gap_s": joins,
        "lost_commits": committed_lost(steps),
        "actors_left": len(cluster.actors()) - actors,
        "groups_left": len(cluster.placement_groups()) - groups,
        "processes_left": len(outlived),
    }


def longest_gap(steps: list[Step], pids: set[int], since: float) -> float:
    """Between two steps of one of these processes."""
    gap = 0.0
    for pid in pids:
        times = [step.at for step in steps if step.pid == pid and step.at >= since]
        gap = max([gap, *(after - before for before, after in itertools.pairwise(times))])
    return gap


# ---- the table -------------------------------------------------------------------------------------------------------


def shown(rounds: dict[str, list[dict[str, float]]]) -> Table:
    table = Table(title=f"one of {NODES} nodes gets a SIGKILL with all its processes")
    for column in ("", "without a new step, median (s)", "largest (s)", "steps done again"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in rounds.items():
        gaps = [each["gap_s"] for each in found]
        again = [each["repeated"] for each in found]
        row = [
            f"{statistics.median(gaps):.2f}",
            f"{max(gaps):.2f}",
            f"{statistics.median(again):g}",
        ]
        table.add_row(name, *row)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10, help="0: leave this part out")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    try:
        import ray.train.torch  # noqa: F401
    except ImportError as error:
        print(
            f"this benchmark needs Ray Train: pip install 'ray[train]' ({error})", file=sys.stderr
        )
        return 2
    rounds: dict[str, list[dict[str, float]]] = {"hvd-elastic": [], "Ray Train": []}
    arms = {"hvd-elastic": elastic_job, "Ray Train": trainer_job}
    result: dict[str, Any] = {"rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="ray-train-") as name:
        folder = Path(name)
        (folder / "cluster").mkdir()
        with ray_nodes(folder / "cluster", [{"num_cpus": 1}] * (NODES + 1)) as cluster:
            for number in range(options.rounds):
                for arm in sorted(arms, reverse=bool(number % 2)):
                    place = folder / f"{number}-{arm.replace(' ', '-')}"
                    rounds[arm].append(one_fault(cluster, arms[arm], place))
                    console.print(f"round {number + 1}, {arm}: {rounds[arm][-1]}")
        if options.rounds:
            console.print(shown(rounds))
        if options.kills:
            (folder / "cluster2").mkdir()
            with ray_nodes(folder / "cluster2", [{"num_cpus": 1}] * NODES) as cluster:
                result["kills"] = kills = many_kills(cluster, folder / "kills", options.kills)
            console.print(
                f"{options.kills} nodes killed: next step p50"
                f" {statistics.median(kills['recovery_s']) * 1e3:.0f} ms, max"
                f" {max(kills['recovery_s']) * 1e3:.0f} ms; a node comes: longest pause p50"
                f" {statistics.median(kills['join_gap_s']) * 1e3:.0f} ms, max"
                f" {max(kills['join_gap_s']) * 1e3:.0f} ms; commits lost {kills['lost_commits']};"
                f" left behind: {kills['actors_left']} actors, {kills['groups_left']} placement"
                f" groups, {kills['processes_left']} processes"
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    sys.exit(main())
