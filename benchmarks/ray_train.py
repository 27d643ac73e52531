"""Loss of a node of a Ray cluster: hvd-elastic compared with Ray Train, on the same cluster and at the same step.

Both train the same small model with three workers on three nodes. One node is killed: its raylet and all its processes.
Ray Train restarts its workers from the last checkpoint, one every 10 steps; hvd-elastic continues with the other two.

    python benchmarks/ray_train.py --rounds 3 --kills 50
    python benchmarks/ray_train.py --rounds 3 --kills 0       # the comparison alone, about three minutes

Then, for hvd-elastic alone: the cost of an added and of a drained node, N kills, and leaked resources.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

import results_output
import tests_on_path  # noqa: F401
from harness.ray_cluster import RayCluster, ray_nodes
from harness.ray_stepping import Stepping
from harness.step_lines import Step, committed_lost, repeated

HERE = Path(__file__).parent
WORKERS = 3
AT_STEP = 207  # seven after a checkpoint of Ray Train
STEP_S = 0.02
# additional actors that wait, so that a new node is used before Ray has noticed the end of another
SPARE = 5
OURS, THEIRS = "hvd-elastic", "Ray Train"
CONSOLE = results_output.console()

Start = Callable[[RayCluster, Path], Stepping]


def elastic_job(cluster: RayCluster, folder: Path, most: int = WORKERS) -> Stepping:
    return Stepping.elastic(cluster, folder, WORKERS, most, STEP_S)


def trainer_job(cluster: RayCluster, folder: Path) -> Stepping:
    return Stepping(cluster, folder, HERE / "ray_trainer.py", str(WORKERS), str(STEP_S))


@contextmanager
def running(start: Start, cluster: RayCluster) -> Iterator[Stepping]:
    """Run a job in a full world; end it normally if there is no error."""
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as folder:
        job = start(cluster, Path(folder))
        try:
            job.world(WORKERS)
            yield job
            job.finish()
        finally:
            job.job.end()


# ---- comparison ----------------------------------------------------------------------------------


def completed(steps: list[Step]) -> dict[tuple[int, int], float]:
    """Return when each step of each world was completed by all of its members."""
    lines: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in steps:
        lines[step.generation, step.step].append(step)
    return {key: max(s.at for s in of) for key, of in lines.items() if len(of) == of[0].size}


def one_fault(cluster: RayCluster, start: Start) -> dict[str, float]:
    """Measure the seconds without progress, repeated steps, and the seconds until all three workers train again."""
    with running(start, cluster) as job:
        world = job.world(WORKERS)
        places = defaultdict(list)
        for member in world:
            places[job.node_of(member.pid)].append(member)
        node = min(places, key=lambda name: len(places[name]))
        job.wait(lambda: job.steps()[-1].step >= AT_STEP, f"step {AT_STEP}")
        killed_at, generation = time.monotonic(), world[0].generation
        cluster.kill(node)

        def resumed() -> float | None:
            after = [s.at for s in job.steps() if s.generation > generation and s.size == WORKERS]
            return after[0] if after else None

        full_at = job.wait(resumed, "three workers resumed", 180.0)
        job.wait(lambda: job.steps()[-1].step >= 2 * AT_STEP, f"step {2 * AT_STEP}", 180.0)
        steps = job.steps()
    cluster.add(num_cpus=2)
    cluster.until(lambda: len(cluster.alive()) == WORKERS, "Ray to notice the dead node", 60.0)
    done = completed(steps)
    best = itertools.accumulate(sorted((at, number) for (_, number), at in done.items()), further)
    moments = [first for first, _ in dict.fromkeys(best)]
    gaps = [b - a for a, b in itertools.pairwise(moments) if b > killed_at]
    numbers = [number for _, number in done]
    return {
        "without_progress_s": max(gaps),
        "steps_repeated": len(numbers) - len(set(numbers)),
        "all_again_s": full_at - killed_at,
    }


def further(best: tuple[float, int], new: tuple[float, int]) -> tuple[float, int]:
    return new if new[1] > best[1] else best


def compare(rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    jobs: dict[str, Start] = {OURS: elastic_job, THEIRS: trainer_job}
    # Two slots per node: the remaining nodes have room for all three workers, so that Ray Train need not wait for a
    # node.
    with a_cluster(cpus=2) as cluster:
        for round_ in range(rounds):
            for name in (OURS, THEIRS) if round_ % 2 == 0 else (THEIRS, OURS):
                found[name].append(one_fault(cluster, jobs[name]))
                CONSOLE.print(f"round {round_ + 1}, {name}: {as_sentence(found[name][-1])}")
    return found


# ---- hvd-elastic alone ---------------------------------------------------------------------------


def changes(cluster: RayCluster, job: Stepping, count: int) -> dict[str, list[float]]:
    """Add and drain a node: the longest gap between steps of an old worker, and repeated steps."""
    found: dict[str, list[float]] = {"join_gap_ms": [], "drain_gap_ms": [], "drain_repeated": []}
    for _ in range(count):
        old = {member.pid for member in job.world(WORKERS)}
        began = time.monotonic()
        node = cluster.add(num_cpus=1)
        (new,) = {member.pid for member in job.world(WORKERS + 1)} - old
        job.later(time.monotonic(), old | {new})
        found["join_gap_ms"].append(longest_gap_ms(job.steps(), old, began))
        began, before = time.monotonic(), repeated(job.steps())
        cluster.drain(node, 60.0)
        job.gone(new)
        job.later(time.monotonic(), old)
        found["drain_gap_ms"].append(longest_gap_ms(job.steps(), old, began))
        found["drain_repeated"].append(repeated(job.steps()) - before)
    return found


def longest_gap_ms(steps: list[Step], pids: set[int], since: float) -> float:
    gaps = []
    for pid in pids:
        moments = [step.at for step in steps if step.pid == pid]
        gaps += [b - a for a, b in itertools.pairwise(moments) if b > since]
    return max(gaps) * 1e3


def kills(cluster: RayCluster, job: Stepping, count: int) -> dict[str, list[float]]:
    """Return the milliseconds from each kill to the slowest survivor's next step in a new world.

    Every other time only the raylet is killed; its workers end with it.
    """
    found: dict[str, list[float]] = {"machine_ms": [], "raylet_ms": []}
    for number in range(count):
        world = job.world(WORKERS)
        victim = world[number % WORKERS]
        survivors = {member.pid for member in world} - {victim.pid}
        node = job.node_of(victim.pid)
        at = time.monotonic()
        cluster.do("kill" if number % 2 == 0 else "kill_raylet", node=node)

        def next_steps(
            of: set[int] = survivors, after: int = victim.generation
        ) -> list[float] | None:
            first: dict[int, float] = {}
            for step in job.steps():
                if step.generation > after and step.pid in of:
                    first.setdefault(step.pid, step.at)
            return list(first.values()) if first.keys() == of else None

        resumed = max(job.wait(next_steps, "the survivors' next step"))
        found["machine_ms" if number % 2 == 0 else "raylet_ms"].append((resumed - at) * 1e3)
        cluster.add(num_cpus=1)
        if number % 10 == 9:
            CONSOLE.print(f"{number + 1} kills")
    job.world(WORKERS)
    return found


def inventory(cluster: RayCluster) -> dict[str, int]:
    """Return the number of hvd-elastic's actors, placement groups and processes in the cluster."""
    ours = (
        "elastic.driver.agents.agent_main",
        "elastic.launcher.run_function",
        "ray::AgentActor",
        "ray::DriverActo",
    )
    lines = [" ".join(process.info["cmdline"]) for process in cluster.running()]
    return {
        "actors": len(cluster.actors()),
        "placement groups": len(cluster.placement_groups()),
        "processes": sum(any(name in line for name in ours) for line in lines),
    }


def alone(count: int) -> dict[str, Any]:
    with a_cluster(cpus=1) as cluster:
        before = inventory(cluster)
        start = lambda cluster, folder: elastic_job(cluster, folder, WORKERS + SPARE)  # noqa: E731
        with running(start, cluster) as job:
            during = inventory(cluster)
            found: dict[str, Any] = changes(cluster, job, 3) | kills(cluster, job, count)
            steps = job.steps()
        cluster.until(lambda: not cluster.actors(), "no actors")
        cluster.until(lambda: not cluster.placement_groups(), "no placement groups")
        after = inventory(cluster)
    return found | {
        "commits_lost": committed_lost(steps),
        "before": before,
        "during": during,
        "after": after,
    }


# ---- reports -------------------------------------------------------------------------------------


@contextmanager
def a_cluster(cpus: int) -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as folder:
        nodes = [{"num_cpus": cpus}] * WORKERS
        with ray_nodes(Path(folder), nodes) as cluster:
            yield cluster


def as_sentence(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())


def side_by_side(found: dict[str, list[dict[str, float]]]) -> Table:
    rounds = len(found[OURS])
    title = f"one of {WORKERS} nodes dies: medians of {rounds} rounds (worst)"
    headings = ("s without progress", "steps repeated", "s until all train again")
    table = results_output.table(title, "", *headings)
    for name, each in found.items():
        cells = []
        for key, digits in (("without_progress_s", 2), ("steps_repeated", 0), ("all_again_s", 1)):
            values = [numbers[key] for numbers in each]
            cells.append(f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})")
        table.add_row(name, *cells)
    return table


def of_its_own(found: dict[str, Any]) -> Table:
    table = results_output.table(f"{OURS} alone", "", "count", "p50", "max")
    rows = {
        "machine killed -> slowest survivor's next step, ms": "machine_ms",
        "raylet killed -> slowest survivor's next step, ms": "raylet_ms",
        "node added: longest gap of an old worker, ms": "join_gap_ms",
        "node drained: longest gap of the others, ms": "drain_gap_ms",
        "node drained: steps repeated": "drain_repeated",
    }
    for name, key in rows.items():
        values = found[key]
        if values:
            numbers = statistics.median(values), max(values)
            table.add_row(name, str(len(values)), *(f"{number:.0f}" for number in numbers))
    return table


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison")
    parser.add_argument("--kills", type=int, default=50, help="0: the comparison alone")
    parser.set_defaults(json=Path("out/ray_train.json"))
    options = parser.parse_args()
    check = [sys.executable, "-c", "import ray.train.torch"]
    if subprocess.run(check, capture_output=True).returncode:
        raise SystemExit("Ray Train is not installed: run pip install 'ray[train]'")

    figures: dict[str, Any] = {}
    if options.rounds:
        figures["side_by_side"] = compare(options.rounds)
        CONSOLE.print(side_by_side(figures["side_by_side"]))
    if options.kills:
        found = figures["alone"] = alone(options.kills)
        CONSOLE.print(of_its_own(found))
        CONSOLE.print(f"commits lost: {found['commits_lost']}")
        for when in ("before", "during", "after"):
            CONSOLE.print(f"{when} {options.kills} kills:", found[when])
    results_output.write_json(options.json, figures)


if __name__ == "__main__":
    main()
