"""Cost of an elastic job without faults, compared with the same job without a driver, in alternating blocks.

    python benchmarks/elasticity.py [--models tiny gpt] [--workers 2] [--rounds 20] [--json FILE]

There are two jobs with the same script: one is run by elasticrun, the other has a fixed world and no driver. Both
commit after every step. They alternately train a block of steps while the other job waits. The result is the ratio of
the two blocks of a round, with the slowest worker's times.

The kernel's count of segments with data on each worker's connection to the driver is read before and after each block,
and for an equally long time without training, because an idle connection also has traffic. The difference is the cost
of the steps. At the end, the workers of a job must have identical weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from rich.table import Table

import elastic
import groups
import models
import results_output
import tests_on_path  # noqa: F401
from harness.ports import free_port
from measurements import Mark, Spread, ratio, spread

RATIO, MESSAGES = 1.02, 0.01  # limits; messages are per step
WARMUP = 3  # rounds
START_S, BLOCK_S = 120.0, 300.0  # deadlines
TCP_INFO_BYTES = 256
JOBS = ("elastic", "static")


@dataclass(frozen=True)
class Traffic:
    """Traffic of one or more workers' connections to the driver. Messages are segments with data."""

    messages_out: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    bytes_in: int = 0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(_numbers(self), _numbers(other), strict=True)))

    def minus(self, other: Traffic) -> Traffic:
        return Traffic(*(a - b for a, b in zip(_numbers(self), _numbers(other), strict=True)))

    @property
    def messages(self) -> int:
        return self.messages_out + self.messages_in


def _numbers(traffic: Traffic) -> tuple[int, int, int, int]:
    return traffic.messages_out, traffic.bytes_out, traffic.messages_in, traffic.bytes_in


@dataclass(frozen=True)
class Answer:
    model: str
    workers: int
    carried_by: dict[str, str]  # the group's backend, by job
    ms: dict[str, Spread]  # milliseconds of a step, by job
    ratio: Spread
    steps: int  # number of steps with counted traffic, per worker
    training: Traffic  # traffic of all workers in these steps
    idle: Traffic  # traffic in an equally long time

    @property
    def messages_per_step(self) -> float:
        """Messages of one worker per step, without those of an idle connection."""
        return (self.training.messages - self.idle.messages) / (self.steps * self.workers)


def traffic_of(info: bytes) -> Traffic:
    """Parse the kernel's `struct tcp_info`."""
    bytes_out, bytes_in = struct.unpack_from("=QQ", info, 120)
    messages_in, messages_out = struct.unpack_from("=II", info, 152)
    return Traffic(messages_out, bytes_out, messages_in, bytes_in)


# ---- a worker ------------------------------------------------------------------------------------


def work(path: str, job: str, model: str) -> None:
    torch.set_num_threads(1)
    elastic.init()
    training = models.make(model, elastic.rank())
    names = training.model.named_parameters()
    optimizer = elastic.DistributedOptimizer(training.optimizer(), names)
    steps = models.Steps(training, training.model, optimizer)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            stream = sock.makefile("rw")
            carried_by = groups.named(groups.ours())
            _say(stream, {"job": job, "size": elastic.size(), "carried_by": carried_by})
            while order := _hear(stream):
                before, began = traffic(), time.perf_counter()
                for _ in range(order.get("steps", 0)):
                    steps()
                    state.step += 1
                    state.commit()
                time.sleep(order.get("idle_s", 0.0))
                took, passed = time.perf_counter() - began, traffic().minus(before)
                _say(stream, {"took": took, "passed": asdict(passed)})
            _say(stream, {"digest": digest(training.model)})

    train(elastic.TorchState(model=training.model, optimizer=optimizer, step=0))


def traffic() -> Traffic:
    """Return this process's traffic with the driver so far; zero without a driver. Raises WrongResult if it is not
    counted.
    """
    driver = os.environ.get("ELASTIC_DRIVER")
    if driver is None:
        return Traffic()
    total = Traffic()
    for info in _connections(driver):
        total = total.plus(traffic_of(info))
    if not all(_numbers(total)):  # the handshake has traffic in both directions
        raise groups.WrongResult(
            f"the kernel reports no traffic for the connection to {driver}: {total}"
        )
    return total


def _connections(to: str) -> list[bytes]:
    host, _, port = to.rpartition(":")
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as sock:
                peer = sock.getpeername()
                if peer[:2] == (host.strip("[]"), int(port)):
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                    found.append(info)
        except OSError:  # closed meanwhile, or not connected
            continue
    return found


def digest(model: torch.nn.Module) -> str:
    made = hashlib.sha256()
    for parameter in model.parameters():
        made.update(parameter.detach().numpy().tobytes())
    return made.hexdigest()


def _say(stream: Any, what: Mapping[str, Any]) -> None:
    stream.write(json.dumps(what) + "\n")
    stream.flush()


def _hear(stream: Any) -> dict[str, Any]:
    line = stream.readline()
    order: dict[str, Any] = json.loads(line) if line else {}
    return order


# ---- the jobs ------------------------------------------------------------------------------------


class Jobs:
    """Both jobs, and a connection to each worker. A context manager that leaves no process behind."""

    def __init__(self, model: str, workers: int) -> None:
        self._workers = workers
        self._folder = tempfile.TemporaryDirectory(prefix="elasticity-")
        path = f"{self._folder.name}/orders"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._log = open(f"{self._folder.name}/log", "w+")  # noqa: SIM115 -- lives as long as the jobs
        self._started: list[subprocess.Popen[bytes]] = []
        self.carried_by: dict[str, str] = {}  # the group's backend
        self._lines: dict[str, list[Any]] = {job: [] for job in JOBS}
        script = [sys.executable, __file__, "--work", path]
        led = [sys.executable, "-m", "elastic.driver.commandline.cli"]
        led += ["-np", str(workers), "--min-np", "1"]
        self._start([*led, *script, "elastic", model], {})
        port = free_port()
        for rank in range(workers):
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self._start([*script, "static", model], {**world, **where})

    def _start(self, words: list[str], environ: dict[str, str]) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        # Each worker has its own session, as with elasticrun: the scheduler shares cores among sessions.
        self._started.append(
            subprocess.Popen(
                words, env=env, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
            )
        )

    def __enter__(self) -> Jobs:
        try:
            self._meet()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _meet(self) -> None:
        deadline = time.monotonic() + START_S
        while any(len(lines) < self._workers for lines in self._lines.values()):
            self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                self._give_up(f"not all workers connected within {START_S:g} s")
            sock.settimeout(BLOCK_S)
            stream = sock.makefile("rw")
            hello = self._heard(stream)
            if hello["size"] != self._workers:
                self._give_up(f"a world of {hello['size']} was formed")
            self.carried_by[hello["job"]] = hello["carried_by"]
            self._lines[hello["job"]].append(stream)

    def _heard(self, stream: Any) -> dict[str, Any]:
        try:
            answer = _hear(stream)
        except TimeoutError:
            self._give_up(f"a worker did not answer within {BLOCK_S:g} s")
        if not answer:
            self._give_up("a worker exited")
        return answer

    def _give_up(self, why: str) -> NoReturn:
        self._log.seek(0)
        raise SystemExit(f"{why}; last lines of the jobs' log:\n{self._log.read()[-3000:]}")

    def do(self, job: str, **order: Any) -> tuple[float, Traffic]:
        """Send an order and return the slowest worker's seconds, and the traffic of all of them with the driver."""
        for stream in self._lines[job]:
            _say(stream, order)
        answers = [self._heard(stream) for stream in self._lines[job]]
        total = Traffic()
        for each in answers:
            total = total.plus(Traffic(**each["passed"]))
        return max(each["took"] for each in answers), total

    def finish(self) -> None:
        """End the jobs. Raises WrongResult unless the workers of each job have the same model."""
        for job in JOBS:
            for stream in self._lines[job]:
                _say(stream, {})
            digests = {self._heard(stream)["digest"] for stream in self._lines[job]}
            if len(digests) != 1:
                raise groups.WrongResult(f"the workers of the {job} job have different models")
        for process in self._started:
            process.wait(BLOCK_S)

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.wait(BLOCK_S)
        self._log.close()
        self._listener.close()
        self._folder.cleanup()


def measure(model: str, workers: int, rounds: int, block_s: float) -> Answer:
    times: dict[str, list[float]] = {job: [] for job in JOBS}
    training, idle, counted = Traffic(), Traffic(), 0
    with Jobs(model, workers) as jobs:
        steps = 5
        for turn in range(-WARMUP, rounds):
            for job in JOBS if turn % 2 else reversed(JOBS):
                took, passed = jobs.do(job, steps=steps)
                if turn >= 0:
                    times[job].append(took / steps)
                if turn >= 0 and job == "elastic":
                    training, counted = training.plus(passed), counted + steps
                    idle = idle.plus(jobs.do(job, idle_s=took)[1])
            if turn == -1:
                steps = max(steps, round(block_s / (took / steps)))
        jobs.finish()
    return Answer(
        model=model,
        workers=workers,
        carried_by=jobs.carried_by,
        ms={job: spread(seconds).times(1e3) for job, seconds in times.items()},
        ratio=ratio(times["elastic"], times["static"]),
        steps=counted,
        training=training,
        idle=idle,
    )


def marks_of(answer: Answer) -> list[Mark]:
    case = f"{answer.model}, {answer.workers} workers"
    beyond = f"{case}, messages to and from the driver for each step, beyond an idle worker's"
    return [
        Mark(f"{case}, step of the elastic job / static", RATIO, answer.ratio.median),
        Mark(beyond, MESSAGES, answer.messages_per_step),
    ]


def table(answers: list[Answer], rounds: int) -> Table:
    found = results_output.table(
        f"an elastic job beside a static one, {rounds} rounds: median (quartiles)",
        *("model", "workers", "elastic, ms", "static, ms", "elastic / static", "steps"),
        *("messages out, in", "bytes out, in", "idle: messages", "bytes"),
    )
    for answer in answers:
        cells = [answer.model, str(answer.workers)]
        cells += [f"{answer.ms[job].text()} {answer.carried_by[job]}" for job in JOBS]
        cells += [answer.ratio.text(3), f"{answer.steps:,}"]
        for passed in answer.training, answer.idle:
            cells.append(f"{passed.messages_out}, {passed.messages_in}")
            cells.append(f"{passed.bytes_out:,}, {passed.bytes_in:,}")
        found.add_row(*cells)
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=["tiny", "gpt"])
    parser.add_argument("--workers", type=int, default=2, help="of each of the two jobs")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of blocks")
    parser.add_argument("--block-s", type=float, default=0.5, help="about so long is a block")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(*options.work)
        return
    answers = [
        measure(model, options.workers, options.rounds, options.block_s) for model in options.models
    ]
    console = results_output.console()
    console.print(table(answers, options.rounds))
    marks = [mark for answer in answers for mark in marks_of(answer)]
    results_output.conclude(console, options.json, {"answers": answers}, marks)


if __name__ == "__main__":
    main()
