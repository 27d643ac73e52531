"""Time until an operator's command takes effect, and lost steps: on one machine, with agents and etcd, and on Ray.

    python benchmarks/steering.py [--launchers machine etcd ray] [--json FILE]

A job of four workers is scaled to 8, then to 3; one worker is removed; it is scaled to 5, and a host of some workers is
drained. It measures the time until each member of the first world with the requested members has made a step. The time
begins when the last newcomer is ready to train or, if there are no newcomers, with the command, so the imports of
newcomers are not included.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import elastic
import results_output
import tests_on_path  # noqa: F401
from elastic.driver.network.secret import make_secret_file
from faulted_job import Disturbed
from harness.etcd import one_etcd
from harness.ray_cluster import ray_nodes
from harness.ray_stepping import Stepping
from harness.step_lines import Step, StepFiles, committed_lost, repeated
from measurements import Mark

WITHIN_S = 1.0  # limit
# deadlines in seconds; a new worker imports torch next to running workers
START_S, CHANGE_S = 90.0, 120.0
SETTLED = 5  # steps of each member before the next command
ONE_MACHINE, ETCD, RAY = "one machine", "agents and etcd", "Ray"
CONSOLE = results_output.console()


@dataclass(frozen=True)
class Effect:
    """Effect of one command.

    Args:
        newcomers: number of new members in the resulting world.
    """

    launcher: str
    command: str
    size: int
    newcomers: int
    seconds: float


class Steered:
    """A job that trains, and the effects of commands."""

    def __init__(self, launcher: str, folder: Path, job: elastic.Job) -> None:
        self.launcher = launcher
        self.files = StepFiles(folder)
        self.job = job
        self.effects: list[Effect] = []

    def world(self, condition: Callable[[list[Step]], bool], expected: str) -> list[Step]:
        """Return the last step of each member once all of them have made a step and fulfil the condition."""
        deadline = time.monotonic() + CHANGE_S
        while time.monotonic() < deadline:
            world = self.files.newest_world()
            if world and condition(world):
                return world
            time.sleep(0.02)
        raise SystemExit(f"{self.launcher}: no {expected} within {CHANGE_S:g} s")

    def settled(self, size: int) -> list[Step]:
        """Wait for a world of this size that has trained for a while."""
        begun = self.world(lambda world: len(world) == size, f"{size} workers")
        after = {step.pid: step.step + SETTLED for step in begun}
        return self.world(
            lambda world: all(step.step >= after.get(step.pid, 0) for step in world), "more steps"
        )

    def hosts(self) -> dict[int, str]:
        """Return the host of each worker, by process id."""
        rows = self.job.status()["rows"]["workers"].values()
        return {row["pid"]: row["host"] for row in rows if row["pid"]}

    def told(
        self, command: str, send: Callable[[], str], condition: Callable[[list[Step]], bool]
    ) -> list[Step]:
        """Send a command, and measure until a newer world fulfils the condition."""
        before = self.files.newest_world()[0].generation
        asked_at = time.monotonic()
        send()
        world = self.world(lambda now: now[0].generation > before and condition(now), command)
        steps = self.files.steps()
        old = {step.pid for step in steps if step.generation <= before}
        first: dict[int, float] = {}
        for step in steps:
            if step.generation == world[0].generation:
                first.setdefault(step.pid, step.at)
        new = first.keys() - old
        ready = [float((self.files.folder / f"{pid}.ready").read_text()) for pid in new]
        took = max(first.values()) - max([asked_at, *ready])
        self.effects.append(Effect(self.launcher, command, len(world), len(new), took))
        CONSOLE.print(f"{self.launcher}: {command} took effect after {took * 1e3:.0f} ms")
        return world

    def go_through(self) -> None:
        job = self.job

        def of(size: int) -> Callable[[list[Step]], bool]:
            return lambda world: len(world) == size

        self.settled(4)
        self.told("scale 8", lambda: job.scale(8), of(8))
        self.settled(8)
        self.told("scale 3", lambda: job.scale(3), of(3))
        last = self.settled(3)[-1].pid
        self.told("remove 2", lambda: job.remove(2), lambda world: last not in pids(world))
        self.told("scale 5", lambda: job.scale(5), of(5))
        there = {pid: host for pid, host in self.hosts().items() if pid in pids(self.settled(5))}
        counts = [*there.values()]
        host = min(counts, key=lambda name: (counts.count(name), name))
        going = {pid for pid in there if there[pid] == host}
        self.told("drain", lambda: job.drain(host), lambda world: pids(world).isdisjoint(going))


def pids(world: list[Step]) -> set[int]:
    return {step.pid for step in world}


# ---- launchers -----------------------------------------------------------------------------------


@contextlib.contextmanager
def one_machine(folder: Path) -> Iterator[Steered]:
    hosts = ["-H", "localhost:4,127.0.0.2:4"]
    with Disturbed(4, "--max-np", "4", *hosts) as job:
        job.until(lambda: job.full(SETTLED), "four workers", START_S)
        yield Steered(ONE_MACHINE, job.folder, elastic.Job())


@contextlib.contextmanager
def agents_and_etcd(folder: Path) -> Iterator[Steered]:
    """Run two agents; commands find the job through etcd."""
    secret = folder / "secret"
    make_secret_file(str(secret))
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(one_etcd(folder / "etcd")).access.endpoints[0]
        common = ["--etcd", etcd, "--job", "steered", "--secret-file", str(secret)]
        for host in ("a", "b"):
            stack.enter_context(agent(folder, [*common, "--host", host, "--slots", "4"]))
        job = stack.enter_context(Disturbed(4, "--max-np", "4", *common))
        job.until(lambda: job.full(SETTLED), "four workers", START_S)
        found = elastic.Job("steered", etcd=etcd, secret_file=str(secret))
        yield Steered(ETCD, job.folder, found)


@contextlib.contextmanager
def agent(folder: Path, flags: list[str]) -> Iterator[None]:
    words = [sys.executable, "-m", "elastic.driver.commandline.cli", "agent", *flags]
    with open(folder / "agents.log", "ab") as log:
        running = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
    try:
        yield
    finally:
        running.terminate()
        running.wait(60)


@contextlib.contextmanager
def on_ray(folder: Path) -> Iterator[Steered]:
    """Run on three nodes with room for twice the workers."""
    nodes = [{"num_cpus": 4}] * 3
    job_folder = folder / "job"
    job_folder.mkdir()
    with ray_nodes(folder, nodes, env={"XDG_RUNTIME_DIR": str(folder)}) as cluster:
        training = Stepping.elastic(cluster, job_folder, 4, 4)
        try:
            training.world(4)
            yield Steered(RAY, job_folder, elastic.Job())
            training.finish()
        finally:
            training.job.end()


LAUNCHERS = {"machine": one_machine, "etcd": agents_and_etcd, "ray": on_ray}


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument(
        "--launchers", nargs="+", choices=LAUNCHERS, default=[*LAUNCHERS], metavar="LAUNCHER"
    )
    options = parser.parse_args()
    effects: list[Effect] = []
    lost = 0
    for name in options.launchers:
        with tempfile.TemporaryDirectory(prefix="steering-") as folder:
            os.environ["XDG_RUNTIME_DIR"] = folder  # no other job is found there
            with LAUNCHERS[name](Path(folder)) as steered:
                steered.go_through()
                launcher = steered.launcher
            steps = steered.files.steps()
        again, gone = repeated(steps), committed_lost(steps)
        lost += again + gone
        table = results_output.table(
            f"{launcher}: {again} steps made again, {gone} commits lost",
            "",
            "workers",
            "newcomers",
            "in effect after ms",
        )
        for each in steered.effects:
            table.add_row(
                each.command, str(each.size), str(each.newcomers), f"{each.seconds * 1e3:.0f}"
            )
        CONSOLE.print(table)
        effects += steered.effects
    marks = [
        Mark("in effect after s, the slowest", WITHIN_S, max(each.seconds for each in effects)),
        Mark("steps made again and commits lost", 0, lost),
    ]
    results_output.conclude(
        CONSOLE, options.json, {"effects": [asdict(each) for each in effects]}, marks
    )


if __name__ == "__main__":
    main()
