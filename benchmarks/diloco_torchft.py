"""DiLoCo of hvd-elastic and of torchft over a slow link, while workers are killed and return.

    python benchmarks/diloco_torchft.py --python PATH [--hosts a b] [--kills 10] [--loss] [--json FILE]

PATH is the Python of an environment with torchft, which this package does not require:

    python -m venv torchft
    torchft/bin/pip install torchft==0.2.0 torch==2.13.0

Each host is a network namespace with one worker, and the link of host a has a limited rate, and delays each packet in
each direction. The driver and etcd, or torchft's lighthouse, are on the other side of the link. Both libraries train
the GPT of examples/gpt.py with the same rounds, in float32. Requires root and etcd.

`elasticrun` restarts killed workers. torchft leaves this to a launcher, so the benchmark starts the process again
as soon as it has exited. There are two settings for torchft: `torchft` has its defaults, with the lighthouse's options
of its README, and `torchft, tuned` has a shorter heartbeat timeout, and sends a fragment as one tensor.

For each kill and survivor, the longest gap between two inner steps counts, minus the median of the worker's inner
steps. A survivor has joined with the new worker when it has merged two fragments with it. --loss trains two workers
without faults instead, on a link without limits.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from rich.table import Table

import diloco
import groups
import models
import results_output
import tests_on_path  # noqa: F401
from diloco_faults import DiLoCoJob
from diloco_outages import DELAY, EVERY, FRAGMENTS, Kill, Quiet, Side, side_of
from harness.waiting import wait_until
from hierarchy import CONGESTION
from link_counter import samples_of
from stress.hosts.cluster import DRIVER, HostCluster
from stress.hosts.namespaces import check_possible
from stress.hosts.programs import HostProgram

QUIET_ROUNDS = 6  # without faults, before the first kill
START_S = 180.0  # seconds for a job to have trained its rounds without faults
JOIN_S = 180.0  # seconds for a new worker to train
PORT = 29510
STEPPER = Path(__file__).with_name("torchft_stepper.py")
COUNTER = Path(__file__).with_name("link_counter.py")
LOSS_S = 900.0  # seconds for a training with --loss


@dataclass(frozen=True)
class Setting:
    """Settings of torchft. ``bucket``: send a fragment as one tensor."""

    lighthouse: dict[str, int]  # options of torchft_lighthouse
    bucket: bool


SIDES = {
    "hvd-elastic": None,
    "torchft": Setting(
        {"min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10_000}, False
    ),
    "torchft, tuned": Setting(
        {
            "min_replicas": 1,
            "quorum_tick_ms": 20,
            "join_timeout_ms": 10_000,
            "heartbeat_timeout_ms": 1_000,
        },
        True,
    ),
}


class OwnJob(DiLoCoJob):
    """A job of this package with default settings."""

    def _start(self, host: str, name: str, words: Sequence[str]) -> HostProgram:
        self.programs.append(HostProgram(self.network.hosts[host], name, words, self.folder))
        return self.programs[-1]


class TorchftJob(DiLoCoJob):
    """Replica groups of one worker, which a thread starts again when they have exited, and a lighthouse."""

    python: Path
    setting: Setting

    def start(self) -> TorchftJob:
        words = [str(self.python.with_name("torchft_lighthouse")), "--bind", f"[::]:{PORT}"]
        for name, value in self.setting.lighthouse.items():
            words += [f"--{name}", str(value)]
        lighthouse = HostProgram(self.network.hosts[DRIVER], "lighthouse", words, self.folder)
        self.programs.append(lighthouse)
        self.over = threading.Event()
        self.supervisor = threading.Thread(target=self._supervise, daemon=True)
        self.supervisor.start()
        return self

    def _supervise(self) -> None:
        """Start workers. Processes of a host end with the thread that started them."""
        running: dict[str, HostProgram] = {}
        env = {"TORCHFT_LIGHTHOUSE": f"http://{DRIVER}:{PORT}", "RUST_LOG": "error"}
        while not self.over.wait(0.01):
            for number, host in enumerate(self.hosts):
                program = running.get(host)
                if program is None or program.process.poll():
                    options = {**self.options, "replica": number, "bucket": self.setting.bucket}
                    words = [str(self.python), str(STEPPER), str(self.folder), json.dumps(options)]
                    running[host] = HostProgram(
                        self.network.hosts[host], f"worker-{host}", words, self.folder, env=env
                    )
                    self.programs.append(running[host])

    def stop(self) -> None:
        self.over.set()
        self.supervisor.join()


@dataclass(frozen=True)
class Conditions:
    """Conditions that are equal for both libraries.

    Args:
        python: path of a Python with torchft.
        rate: of the link of the first host, as in 100mbit. Empty: no limit.
        step_s: sleep in an inner step in place of the model. 0: no sleep.
    """

    python: Path
    hosts: Sequence[str]
    rate: str
    latency_s: float
    step_s: float
    kills: int
    seed: int


@contextmanager
def job_of(
    setting: Setting | None, given: Conditions, steps: int = 0
) -> Iterator[tuple[HostCluster, DiLoCoJob]]:
    """Context of a job, which has been started.

    Args:
        setting: of torchft. None: a job of this package.
        steps: length of torchft's training. 0: it trains until it is killed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-")))
        bench = stack.enter_context(HostCluster(folder))
        for host in bench.network.hosts.values():
            host.run(["sh", "-c", f"echo reno > {CONGESTION}"])
        if given.rate:
            bench.network.slow(given.hosts[0], given.rate)
            bench.network.delay(given.hosts[0], given.latency_s)
        for part in ("steps", "rounds"):
            (folder / "job" / part).mkdir(parents=True)
        kind = OwnJob if setting is None else TorchftJob
        job = kind(bench, "faults", "faults", folder / "job", given.hosts)
        job.options = {"every": EVERY, "delay": DELAY, "step_s": given.step_s}
        if isinstance(job, TorchftJob):
            assert setting is not None
            job.python, job.setting = given.python, setting
            job.options["steps"] = steps
        else:
            bench.start_etcd()
            job.options |= {"fragments": FRAGMENTS, "islands": False}
        stack.callback(lambda: [program.end() for program in job.programs])
        job.start()
        if isinstance(job, TorchftJob):
            stack.callback(job.stop)  # first, so that it does not restart what is ended
        yield bench, job


def measure(name: str, given: Conditions) -> Side:
    """Train without faults, then kill one worker after the other, each when all have trained for a while."""
    chance, done = random.Random(given.seed), list[Kill]()
    hosts = given.hosts
    with job_of(SIDES[name], given) as (bench, job):
        record = bench.folder / "counter"
        bench.network.hosts[hosts[0]].popen([sys.executable, str(COUNTER), str(record)])
        enough = (QUIET_ROUNDS + 1) * EVERY

        def quiet() -> bool:
            counts = [len(each.commits()) for each in job.workers()]
            return len(counts) == len(hosts) and min(counts) > enough

        wait_until(quiet, "rounds without faults", START_S, look_s=0.5, state=job._state)
        [first] = [each for each in job.workers() if each.host == hosts[0]]
        times = [each.at for each in first.commits()][EVERY : enough + 1]
        round_s = (times[-1] - times[0]) / QUIET_ROUNDS
        for kill in range(given.kills):
            time.sleep(chance.uniform(1.0, 2.0) * round_s)
            host = hosts[kill % len(hosts)]
            pid, at = job.worker_pid(host), time.monotonic()
            os.kill(pid, signal.SIGKILL)
            done.append(Kill(pid, at, job.trains(hosts, after=at, timeout=JOIN_S)))
        time.sleep(2.0 * round_s)
        samples = samples_of(record.read_text())
        pids = [int(path.name.partition(".")[2]) for path in job._notes()]
        workers = dict(zip(pids, job.workers(), strict=True))
        records = job.rounds()
    sent = [count for at, count in samples if times[0] <= at <= times[-1]]
    step_ms = 1e3 * statistics.median(b - a for a, b in pairwise(times))
    rounds = Quiet(1e3 * round_s, step_ms, (sent[-1] - sent[0]) // QUIET_ROUNDS)
    return side_of(name, rounds, workers, records, done, len(hosts))


def losses_of(given: Conditions, steps: int) -> dict[str, float]:
    """Return the validation losses of two workers after the same tokens."""
    names = ["synchronous", "streamed, float32"]
    arguments = (names, [models.GPT_LR], steps, given.seed, EVERY)
    found = {each.training: each.loss for each in groups.ask(diloco.losses, 2, *arguments)}
    with job_of(Setting({"min_replicas": 2}, False), given, steps) as (_, job):
        file = job.folder / "loss"
        wait_until(file.exists, "the validation loss", LOSS_S, look_s=1.0, state=job._state)
        return found | {"torchft": float(file.read_text())}


# ---- output --------------------------------------------------------------------------------------


def range_text(values: Sequence[float], digits: int = 0) -> str:
    """Format the median and the longest."""
    if not values:
        return "none"
    return f"{statistics.median(values):.{digits}f}, {max(values):.{digits}f} ({len(values)})"


def table(sides: Sequence[Side], title: str) -> Table:
    found = results_output.table(title, "", *(each.name for each in sides))
    rows: dict[str, Callable[[Side], str]] = {
        "round without faults, s": lambda side: f"{side.quiet.round_ms / 1e3:.2f}",
        "median inner step with its commit, ms": lambda side: f"{side.quiet.step_ms:.0f}",
        "sent by host a in a round, KB": lambda side: f"{side.quiet.sent / 1e3:.0f}",
        "kill: longest gap minus step, ms": lambda side: range_text(
            [each.kill_ms for each in side.outages]
        ),
        "join: longest gap minus step, ms": lambda side: range_text(
            [each.join_ms for each in side.outages if each.join_ms is not None]
        ),
        "time lost by a survivor in a kill and a join, s": lambda side: range_text(
            [each.lost_s for each in side.outages], 1
        ),
        "from the kill until the new worker trains, s": lambda side: range_text(side.restart_s, 1),
        "inner steps undone on survivors": lambda side: (
            f"{sum(side.undone):.0f}, {range_text(side.undone)}"
        ),
        "inner steps of a killed worker in no merge": lambda side: range_text(side.victims),
        "merges; with different outer parameters": lambda side: f"{side.merges}; {side.differing}",
    }
    for row, text in rows.items():
        found.add_row(row, *map(text, sides))
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--python", type=Path, required=True, help="with torchft")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--hosts", nargs="+", default=["a", "b"], help="2 to 4 of a, b, c, d")
    parser.add_argument("--rate", default="100mbit", help="of the link of the first host")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="of the link, each way")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=0.0,
        help="of sleep in an inner step, in place of the model",
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--loss", action="store_true", help="validation loss without faults instead"
    )
    parser.add_argument("--steps", type=int, default=600, help="of a training with --loss")
    options = parser.parse_args()
    check_possible()
    console = results_output.console()
    given = Conditions(
        options.python,
        options.hosts,
        options.rate,
        options.latency_ms / 1e3,
        options.step_ms / 1e3,
        options.kills,
        options.seed,
    )
    if options.loss:
        given = replace(given, rate="", hosts=["a", "b"])
        losses = losses_of(given, options.steps)
        console.print(losses)
        results_output.write_json(options.json, {"losses": losses})
        return
    sides = [measure(name, given) for name in options.sides]
    title = f"{len(options.hosts)} workers, {options.rate}, {options.latency_ms:g} ms each way"
    console.print(table(sides, f"{title}, {options.kills} kills: median, longest (number)"))
    results_output.write_json(options.json, {"sides": sides, "settings": SIDES})


if __name__ == "__main__":
    main()
