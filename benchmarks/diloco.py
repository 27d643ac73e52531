"""DiLoCo over a slow link, compared with training without exchange, and with synchronous training.

    python benchmarks/diloco.py [--only speed traffic loss stall goodput] [--islands] [--json FILE]

Two hosts, which are network namespaces on one switch, have one worker each, with the GPT of examples/gpt.py. With
--islands, `speed`, `stall` and `goodput` have two workers on each host, which are an island. The link of one host has a
limited rate, and delays each packet in each direction. Requires root; `stall` and `goodput` also etcd.

speed    A turn is a round of inner steps without exchange, or with DiLoCo, or as many seconds of DDP over Gloo as a
         few steps take. Turns alternate in the same processes, and the slowest worker's time counts.
traffic  Bytes that leave a host, from the counters of its interface, which include headers. Inner steps sleep.
loss     Validation loss after equal numbers of tokens, without namespaces, because the network does not affect it. With
         several --learning-rates, each training runs once with each rate, and the lowest loss of each counts.
stall    Workers of a job are killed in turns: see diloco_faults.py. With islands also rank 0 and all workers of a host,
         and the link is cut once.
goodput  A worker of the job is killed at regular intervals.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import diloco_faults
import elastic
import groups
import hierarchy
import models
import results_output
import tests_on_path  # noqa: F401
from diloco_faults import HOSTS
from link_counter import peak, samples_of
from measurements import Mark, Spread, ratio, spread
from stress.hosts.cluster import HostCluster
from stress.hosts.namespaces import Network, check_possible

PARTS = ("speed", "traffic", "loss", "stall", "goodput")
EVERY, FRAGMENTS, DELAY = 50, 4, 10
OFFSET = DELAY + 1  # inner steps before the first turn, so that no fragment is in flight
DDP_STEPS = 5  # in a turn
ISLAND = 2  # workers of a host with --islands
WINDOW_S = 0.1
TRAFFIC_STEP_S = 0.04  # sleep of an inner step, so that a fragment can be sent before the next
FORMATS: dict[str, Any] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
    "int4": "int4",
}
STREAMED: dict[str, Any] = {"fragments": FRAGMENTS, "delay": DELAY}
NO_MOMENTUM: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
TRAININGS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "whole rounds, float32": {},
    **{f"streamed, {name}": STREAMED | {"dtype": FORMATS[name]} for name in FORMATS},
    "streamed, bfloat16, mix 0": STREAMED | {"dtype": torch.bfloat16, "mix": 0.0},
    "streamed, bfloat16, outer lr 0.4": STREAMED | {"dtype": torch.bfloat16, "outer_lr": 0.4},
    "streamed, bfloat16, no momentum": STREAMED | {"dtype": torch.bfloat16} | NO_MOMENTUM,
    "whole rounds, float32, no momentum": {**NO_MOMENTUM},
}
COUNTER = Path(__file__).with_name("link_counter.py")


@dataclass(frozen=True)
class SpeedAnswer:
    """Milliseconds of an inner step, and the share of the throughput without exchange."""

    alone_ms: Spread
    diloco_ms: Spread
    ddp_ms: Spread
    diloco: Spread
    ddp: Spread


@dataclass(frozen=True)
class Traffic:
    """Bytes of one host in a round.

    Args:
        peak: in the `WINDOW_S` with most.
    """

    format: str
    fragments: int
    payload: int
    sent: int
    peak: int


@dataclass(frozen=True)
class Loss:
    """Validation loss after a training, in nats per byte.

    Args:
        learning_rate: highest inner learning rate.
    """

    training: str
    learning_rate: float
    loss: float


# ---- in each rank --------------------------------------------------------------------------------


class Inner:
    """Inner steps of a copy of the model, which averages gradients in ``group`` if it is given."""

    def __init__(
        self, training: models.Training, group: distributed.ProcessGroup | None = None
    ) -> None:
        self.training = copy.deepcopy(training.model)
        self.predict: torch.nn.Module = self.training
        if group is not None:
            self.predict = DistributedDataParallel(self.training, process_group=group)
        self.optimizer = torch.optim.AdamW(
            self.training.parameters(), lr=models.GPT_LR, betas=(0.9, 0.95)
        )
        self._given = training
        self._steps = 0

    def step(self) -> None:
        inputs, targets = self._given.batches[self._steps % models.BATCHES]
        self._steps += 1
        self.optimizer.zero_grad()
        self._given.loss(self.predict, inputs, targets).backward()
        self.optimizer.step()


def speed(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of an inner step in each turn, by variant."""
    torch.manual_seed(0)
    training = models.gpt(distributed.get_rank())
    group = elastic.island_group() if distributed.get_world_size() > len(HOSTS) else None
    alone, own = Inner(training, group), Inner(training, group)
    ddp = Inner(training, distributed.group.WORLD)
    diloco = elastic.DiLoCo(
        own.predict,
        own.optimizer,
        every=EVERY,
        fragments=FRAGMENTS,
        delay=DELAY,
        dtype=torch.bfloat16,
    )

    def merged_step() -> None:
        own.step()
        diloco.step()

    def repeated(step: Callable[[], None], times: int) -> Callable[[], None]:
        def turn() -> None:
            for _ in range(times):
                step()

        return turn

    repeated(merged_step, OFFSET)()
    counts = {"alone": EVERY, "diloco": EVERY, "ddp": DDP_STEPS}
    calls = {"alone": alone.step, "diloco": merged_step, "ddp": ddp.step}
    ways = {name: repeated(calls[name], counts[name]) for name in calls}
    times = groups.take_turns(ways, rounds, warmup=1)
    groups.same_everywhere("outer parameters", diloco.outer)
    return {name: [each / counts[name] for each in times[name]] for name in times}


def traffic() -> list[dict[str, Any]]:
    """Return the times and payloads of a round of each format and number of fragments."""
    torch.manual_seed(0)
    model = models.gpt(0).model
    found = []
    for name, dtype in FORMATS.items():
        for fragments in (1, FRAGMENTS):
            diloco = elastic.DiLoCo(
                model, None, every=EVERY, fragments=fragments, delay=DELAY, dtype=dtype
            )

            def inner(times: int, diloco: elastic.DiLoCo = diloco) -> None:
                for _ in range(times):
                    time.sleep(TRAFFIC_STEP_S)
                    with torch.no_grad():
                        for each in model.parameters():
                            each.add_(1e-3 * torch.randn_like(each))
                    diloco.step()

            inner(OFFSET + EVERY)  # connections have grown their windows
            before = diloco.bytes_sent
            distributed.barrier()
            began = time.monotonic()
            inner(EVERY)
            ended = time.monotonic()
            distributed.barrier()
            payload = diloco.bytes_sent - before
            words = {"format": name, "fragments": fragments, "payload": payload}
            found.append({**words, "began": began, "ended": ended})
    return found


def work(given: dict[str, Any]) -> None:
    """Run one process on one of the hosts."""
    hierarchy.CONGESTION.write_text("reno")
    meeting = groups.Meeting(given["first"], hierarchy.OURS_PORT, hierarchy.TORCHS_PORT)
    groups.enter(given["rank"], given["size"], meeting, {"ELASTIC_BIND": given["address"]})
    answer: Any = speed(given["rounds"]) if given["part"] == "speed" else traffic()
    if given["rank"] == 0:
        Path(given["out"]).write_text(json.dumps(answer))
    groups.leave()


def losses(
    names: list[str],
    rates: list[float],
    train_steps: int,
    seed: int,
    every: int = EVERY,
    workers: int = 1,
) -> list[Loss]:
    """Return validation losses in nats per byte after the same tokens, by learning rate and training. Collective.

    Each rank is an island of ``workers`` workers: the mean gradient of its windows is that of their DDP.
    """
    rank, found = distributed.get_rank(), list[Loss]()
    for highest, name in itertools.product(rates, names):
        options = dict(TRAININGS[name])
        windows = workers * models.GPT_WINDOWS
        course = models.GptCourse(rank, train_steps, seed, highest, windows)
        model, predict, diloco = course.model, None, None
        if name == "synchronous":
            predict = DistributedDataParallel(model)
        else:
            outer_rate, momentum = options.pop("outer_lr", 0.7), options.pop("outer_momentum", 0.9)
            outer_optimizer = torch.optim.SGD(
                model.parameters(), lr=outer_rate, momentum=momentum, nesterov=momentum > 0
            )
            diloco = elastic.DiLoCo(
                model, course.optimizer, outer_optimizer, every=every, **options
            )
        for step in range(train_steps):
            course.backward(step, predict)
            course.optimizer.step()
            if diloco is not None:
                diloco.step()
        if diloco is not None:
            with torch.no_grad():
                for mine, outer in zip(diloco.inner, diloco.outer, strict=True):
                    mine.copy_(outer)
        groups.same_everywhere("parameters", list(model.parameters()))
        loss = models.validation_loss(model)
        found.append(Loss(name, highest, loss))
        if rank == 0:
            print(f"{name}, learning rate {highest:g}: {loss:.4f}", file=sys.stderr, flush=True)
    return found


# ---- the hosts -----------------------------------------------------------------------------------


def on_hosts(part: str, rounds: int, rate: str, latency_s: float, workers: int) -> tuple[Any, str]:
    """Return rank 0's answer, and the record of the bytes that its host has sent.

    Args:
        workers: of each host.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-") as text:
        folder = Path(text)
        with Network(HOSTS, folder) as network:
            narrow(network, rate, latency_s)
            record, out = folder / "counter", folder / "answer.json"
            first = network.hosts[HOSTS[0]]
            first.popen([sys.executable, str(COUNTER), str(record)])
            ranks = [network.hosts[name] for name in HOSTS for _ in range(workers)]
            given = {"first": first.address, "rounds": rounds, "part": part, "out": str(out)}
            given["size"] = len(ranks)
            processes = []
            for rank, host in enumerate(ranks):
                arguments = json.dumps({**given, "rank": rank, "address": host.address})
                words = [sys.executable, __file__, "--work", arguments]
                processes.append(host.popen(words, env=hierarchy.QUIET))
            hierarchy.wait(processes)
            return json.loads(out.read_text()), record.read_text()


def narrow(network: Network, rate: str, latency_s: float) -> None:
    """Limit the link between the two hosts."""
    network.slow(HOSTS[0], rate)
    network.delay(HOSTS[0], latency_s)


def ask_speed(rounds: int, rate: str, latency_s: float, workers: int) -> SpeedAnswer:
    times, _ = on_hosts("speed", rounds, rate, latency_s, workers)
    alone, diloco, ddp = (times[name] for name in ("alone", "diloco", "ddp"))
    return SpeedAnswer(
        alone_ms=spread(alone).times(1e3),
        diloco_ms=spread(diloco).times(1e3),
        ddp_ms=spread(ddp).times(1e3),
        diloco=ratio(alone, diloco),
        ddp=ratio(alone, ddp),
    )


def ask_traffic(rate: str, latency_s: float) -> list[Traffic]:
    answers, record = on_hosts("traffic", 0, rate, latency_s, 1)
    return [traffic_of(each, samples_of(record)) for each in answers]


def traffic_of(answer: Mapping[str, Any], record: Sequence[tuple[float, int]]) -> Traffic:
    """Evaluate a round.

    Args:
        record: times and bytes sent so far.
    """
    inside = [each for each in record if answer["began"] <= each[0] <= answer["ended"]]
    sent, most = inside[-1][1] - inside[0][1], peak(inside, WINDOW_S)
    return Traffic(answer["format"], answer["fragments"], answer["payload"], sent, most)


# ---- output --------------------------------------------------------------------------------------


def speed_table(answer: SpeedAnswer, title: str) -> Table:
    found = results_output.table(title, "", "inner step, ms", "throughput / without exchange")
    found.add_row("without exchange", answer.alone_ms.text(1), "1")
    streamed = f"DiLoCo, {FRAGMENTS} fragments, delay {DELAY}, bfloat16"
    found.add_row(streamed, answer.diloco_ms.text(1), answer.diloco.text())
    found.add_row("DDP", answer.ddp_ms.text(1), answer.ddp.text())
    return found


def traffic_table(answers: Sequence[Traffic], title: str) -> Table:
    headings = ("payload, KB", "on the link, KB", f"KB in the peak {WINDOW_S * 1e3:g} ms")
    found = results_output.table(title, "", "fragments", *headings)
    for each in answers:
        numbers = [each.payload, each.sent, each.peak]
        cells = [f"{number / 1e3:.0f}" for number in numbers]
        found.add_row(each.format, str(each.fragments), *cells)
    return found


def traffic_marks(answers: Sequence[Traffic]) -> list[Mark]:
    peaks = {(each.format, each.fragments): each.peak for each in answers}
    what = f"peak with {FRAGMENTS} fragments / 1 fragment"
    marks = [
        Mark(f"{what}, {name}", 0.3, peaks[name, FRAGMENTS] / peaks[name, 1]) for name in FORMATS
    ]
    sent = {(each.format, each.fragments): each.sent for each in answers}
    bytes_ = sent["int4", FRAGMENTS] / sent["bfloat16", FRAGMENTS]
    payload = {each.format: each.payload for each in answers}
    ratio_ = payload["int4"] / payload["bfloat16"]
    marks.append(Mark("payload of int4 / bfloat16", 0.27, ratio_))
    marks.append(Mark("bytes on the link of int4 / bfloat16", 0.27, bytes_))
    return marks


def loss_table(found: Sequence[Loss], title: str) -> Table:
    rates = list(dict.fromkeys(each.learning_rate for each in found))
    by_training: dict[str, list[str]] = {}
    for each in found:  # in the order of the rates
        by_training.setdefault(each.training, []).append(f"{each.loss:.4f}")
    shown = results_output.table(title, "", *(f"learning rate {rate:g}" for rate in rates))
    for name, cells in by_training.items():
        shown.add_row(name, *cells)
    return shown


def loss_marks(found: Sequence[Loss]) -> list[Mark]:
    """Compare the lowest loss of each training with the lowest loss of synchronous training."""
    lowest: dict[str, float] = {}
    for each in found:
        lowest[each.training] = min(each.loss, lowest.get(each.training, math.inf))
    reference = lowest.pop("synchronous")
    return [
        Mark(f"validation loss / synchronous, {name}", 1.01, loss / reference)
        for name, loss in lowest.items()
    ]


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="parts to run")
    parser.add_argument("--rate", default="100mbit", help="of the link")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="of the link, each way")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=600, help="of each training in `loss`")
    parser.add_argument(
        "--trainings",
        nargs="+",
        choices=TRAININGS,
        default=[*TRAININGS],
        help="trainings in `loss`",
    )
    parser.add_argument(
        "--learning-rates",
        nargs="+",
        type=float,
        default=[models.GPT_LR],
        help="highest inner learning rates of the trainings in `loss`",
    )
    parser.add_argument(
        "--islands", action="store_true", help="two workers on each host, which are an island"
    )
    parser.add_argument(
        "--arguments", type=json.loads, default={}, help="of elastic.DiLoCo in a job, as JSON"
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=0.0,
        help="of sleep in an inner step of a job, in place of the model",
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return
    if set(options.only) - {"loss"}:
        check_possible()
    console, marks = results_output.console(), list[Mark]()
    figures: dict[str, Any] = {}
    link = f"{options.rate}, {options.latency_ms:g} ms each way"
    latency_s = options.latency_ms / 1e3
    workers = ISLAND if options.islands else 1
    if "speed" in options.only:
        speed_ = figures["speed"] = ask_speed(options.rounds, options.rate, latency_s, workers)
        title = f"{len(HOSTS)} hosts of {workers}, {link}, {options.rounds} rounds"
        console.print(speed_table(speed_, title))
        marks.append(Mark("DiLoCo / without exchange", 0.95, speed_.diloco.median, at_least=True))
    if "traffic" in options.only:
        answers = figures["traffic"] = ask_traffic(options.rate, latency_s)
        console.print(traffic_table(answers, f"one worker of 2, a round of {EVERY} steps, {link}"))
        marks += traffic_marks(answers)
    if "loss" in options.only:
        found = figures["loss"] = groups.ask(
            losses,
            len(HOSTS),
            list(dict.fromkeys(["synchronous", *options.trainings])),
            list(dict.fromkeys(options.learning_rates)),
            options.steps,
            options.seed,
            EVERY,
            workers,
        )
        title = f"validation loss after {options.steps} steps, {len(HOSTS)} islands of {workers}"
        console.print(loss_table(found, title))
        marks += loss_marks(found)
    arguments = {"every": EVERY, "fragments": FRAGMENTS, "delay": DELAY} | options.arguments
    arguments["step_s"] = options.step_ms / 1e3

    def limit(bench: HostCluster) -> None:
        narrow(bench.network, options.rate, latency_s)

    if "stall" in options.only:
        faulted = figures["stalls"] = diloco_faults.kill_in_turns(
            limit, workers, arguments, options.kills, options.seed
        )
        console.print(diloco_faults.stall_table(faulted.stalls, f"{options.kills} kills, {link}"))
        marks += diloco_faults.fault_marks(faulted)
    if "goodput" in options.only:
        faulted = figures["goodput"] = diloco_faults.kill_at_intervals(
            limit, workers, arguments, options.kills, options.seed
        )
        title = f"{options.kills} kills, one each {diloco_faults.PACE_S:g} s, {link}"
        console.print(diloco_faults.stall_table(faulted.stalls, title))
        marks.append(Mark("goodput", 0.95, faulted.goodput, at_least=True))
    results_output.conclude(console, options.json, figures, marks)


if __name__ == "__main__":
    main()
