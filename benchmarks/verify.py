"""Detection of wrong gradients that are injected into real jobs, and the cost of the checks.

    python benchmarks/verify.py [--injections 1000] [--first 0] [--verify 0.0625] [--jobs 2] [--seed 0] [--json FILE]
    python benchmarks/verify.py --read FILE ...
    python benchmarks/verify.py --cost [--models mlp gpt] [--steps 256] [--ranks 4] [--json FILE]

An injection is one job of 4 workers, under elasticrun, with 8 shards. From a drawn step on, a bit is flipped in
gradients of one worker, or in a product of one of its models, in each pass or in some passes (see `Injection`). Half of
the faults begin in a step in which the worker is checked, and the others in any step.

The benchmark counts the faulty workers that are found, the steps until then, and innocent workers that were named. It
also counts the jobs in which all commits have the bits of an undisturbed process. If a step was repeated, its last
commit counts. A fault that changes no bit of any commit is counted separately.

`--read` shows the results of several earlier calls, each with `--json`, as one table.

`--cost` compares steps of `Shards(verify=...)` with those of `Shards()`, by turns in the same processes. The results
are medians of steps with checks and of other steps. Checks are more frequent than with `verify=1/64`, for which the
mean is computed from both.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import groups
import models
import results_output
import tests_on_path  # noqa: F401
from elastic.exact import shard_assignment, verification_rules
from elastic.exact.shards import Shards
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.runtime import lifecycle
from harness.history import SCRIPTS
from harness.job import Job
from measurements import Mark, spread

SCRIPT = SCRIPTS / "exact.py"
WORKERS, SHARDS, SEED = 4, 8, 5
TRAINING = 2  # the first generation that trains
STEPS = 110  # of the longest job
AFTER = 3  # steps of a job after the last in which its fault may be found
LATEST = 12  # first step of a fault at most
CERTAIN = 0.99
GRADIENTS = 24  # gradients of a pass of the script's models
KINDS = ("gradient", "operator")
RARITIES = (1, 1, 2, 4)  # every n-th pass is wrong, on average
COST = 1.03
SAMPLED = 1 / 8  # share of the shards that is verified while the cost is measured
WARM = 4  # steps that are not counted


@dataclass(frozen=True)
class Injection:
    """One fault.

    Attributes:
        kind: of KINDS.
        rank: the worker.
        first: its first step that may be wrong.
        rarity: 1: each pass is wrong; n: about every n-th.
        seed: of the bit.
    """

    kind: str
    rank: int
    first: int
    rarity: int
    seed: int

    @property
    def rule(self) -> str:
        """The failpoint."""
        steps = ",".join(map(str, range(self.first, STEPS)))
        where = f"rank={self.rank} generation={TRAINING} step={steps}"
        if self.kind == "gradient":  # not a multiple, so that other gradients are wrong each time
            every = 1 if self.rarity == 1 else GRADIENTS * self.rarity + 1
            return f"shard-gradient flip=gradient:{self.seed} {where} every={every}"
        return f"operator flip=product:{self.seed} {where} every={self.rarity}"


@dataclass(frozen=True)
class InjectionResult:
    """Outcome of an injection.

    Attributes:
        named: ranks that were fenced for wrong gradients.
        found: the step. None means that it was not found.
        agreed: last step before that in which the worker's gradients were right, by the evidence.
        equal: the last commit of every step has the bits of the undisturbed process.
        changed: another commit had not, before its step was repeated.
        code: exit code of the job.
    """

    injection: Injection
    named: list[int]
    found: int | None
    agreed: int
    equal: bool
    code: int
    changed: bool = False


def checked(rank: int, share: float, step: int) -> int:
    """Return the number of passes of a rank that are compared in a step."""
    held = shard_assignment.assign(SHARDS, WORKERS)
    found = verification_rules.checks(held, share, SEED, TRAINING, step)
    return sum(rank in (each.owner, each.second) for each in found)


def drawn(number: int, seed: int, share: float) -> Injection:
    dice = random.Random(f"{seed} {number}")
    rank = dice.randrange(WORKERS)
    first = dice.randrange(2, LATEST)
    if number % 2:
        first = next(step for step in range(first, STEPS) if checked(rank, share, step))
    return Injection(
        KINDS[number // 2 % 2], rank, first, dice.choice(RARITIES), dice.randrange(1 << 30)
    )


def limit(injection: Injection, share: float) -> int:
    """Return the number of steps within which a fault is found with the probability CERTAIN.

    One that is always there is found in the next step in which the worker is checked.
    """
    passes = 0
    for step in range(injection.first, 10 * STEPS):
        passes += checked(injection.rank, share, step)
        missed = (1.0 - 1.0 / injection.rarity) ** passes
        if passes and missed <= 1.0 - CERTAIN:
            return step - injection.first + 1
    raise AssertionError(f"{injection} was not detected within {10 * STEPS} steps")


def expected(injection: Injection, share: float) -> float:
    """Return the mean number of steps until a fault is found, if each pass is wrong by chance."""
    total, missed = 0.0, 1.0
    for step in range(injection.first, 100 * STEPS):
        total += missed
        missed *= (1.0 - 1.0 / injection.rarity) ** checked(injection.rank, share, step)
        if missed < 1e-9:
            break
    return total


# ---- jobs ------------------------------------------------------------------------------------------------------------


@functools.cache
def undisturbed() -> dict[int, dict[str, int]]:
    """Return the digests of each commit by step, of one process without elasticrun."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OMP_NUM_THREADS": "1", "STEPS": str(STEPS), "OWN_DIGESTS": "own"}
        subprocess.run([sys.executable, SCRIPT], cwd=folder, env=env, check=True, timeout=600)
        lines = (Path(folder) / "own").read_text().splitlines()
        return dict(json.loads(each) for each in lines)


def run(injection: Injection, share: float) -> InjectionResult:
    wanted = undisturbed()
    steps = min(STEPS, injection.first + limit(injection, share) + AFTER)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            f"-np {WORKERS} --min-np 1 --digests --blacklist-cooldown-range 0.1 1",
            ["python", SCRIPT],
            folder=Path(folder),
            env={
                "STEPS": str(steps),
                "OMP_NUM_THREADS": "1",
                "VERIFY": repr(share),
                "ELASTIC_FAILPOINTS": injection.rule,
                **({"OPERATOR": "1"} if injection.kind == "operator" else {}),
            },
            forked=True,
        )
        try:
            code = job.wait(300)
            kills = [
                each
                for each in job.actions("KillWorker")
                if each["reason"]["kind"] == "miscomputed"
            ]
            facts = kills[0]["reason"]["facts"] if kills else {}
            commits = [each for each in job.events("WorkerDigested") if each.get("tensors")]
            right: dict[int, dict[int, bool]] = {}  # by step and generation
            for each in commits:
                if step := each["step"]:
                    of = right.setdefault(step, {})
                    same = each["tensors"] == wanted[step]
                    of[each["generation"]] = of.get(each["generation"], True) and same
            lasting = [of[max(of)] for of in right.values()]
            return InjectionResult(
                injection,
                [each["worker"][1] for each in kills],
                facts.get("step"),
                facts.get("agreed", -1),
                all(lasting) and sorted(right) == [*range(1, steps + 1)],
                code,
                not all(same for of in right.values() for same in of.values()),
            )
        finally:
            job.end()


def inject(options: Any) -> tuple[dict[str, Any], list[Mark]]:
    share = options.verify
    numbers = range(options.first, options.first + options.injections)
    injections = [drawn(number, options.seed, share) for number in numbers]
    undisturbed()
    began = time.monotonic()
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(functools.partial(run, share=share), injections):
            results.append(result)
            if len(results) % 50 == 0:
                print(f"{len(results)} jobs in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return show(results, share)


def read(files: Sequence[Path]) -> list[InjectionResult]:
    rows = [each for file in files for each in json.loads(file.read_text())["results"]]
    return [
        InjectionResult(**{**each, "injection": Injection(**each["injection"])}) for each in rows
    ]


def show(results: list[InjectionResult], share: float) -> tuple[dict[str, Any], list[Mark]]:
    console = results_output.console()
    found = results_output.table(
        f"{len(results)} injections, verify={share:g}",
        *("fault", "jobs", "no effect", "found", "in time", "innocents", "steps, mean", "expected"),
        *("bits equal",),
    )
    for kind in KINDS:
        for rarity in sorted({*RARITIES}):
            some = [
                each
                for each in results
                if (each.injection.kind, each.injection.rarity) == (kind, rarity)
            ]
            if some:
                how = "each pass" if rarity == 1 else f"1 of {rarity} passes"
                found.add_row(f"{kind}, {how}", *row(some, share))
    found.add_row("all", *row(results, share))
    console.print(found)
    real = [each for each in results if each.named or not each.equal]
    found_all = [each for each in real if each.found is not None]
    innocents = sum(len({*each.named} - {each.injection.rank}) for each in results)
    timely = sum(in_time(each, share) for each in real) / max(1, len(real))
    caught = [each for each in real if each.found == each.injection.first]
    always = [each for each in real if each.injection.rarity == 1 and each.found is not None]
    evidence = sum(each.agreed >= each.injection.first for each in always)
    wrong_bits = sum(not each.equal for each in found_all)
    print(f"failed jobs: {sum(each.code != 0 for each in results)}")
    print(
        f"detected: {len(found_all)}, in the first affected step: {len(caught)}; repeated wrong commits:"
        f" {sum(each.changed for each in found_all)}; jobs whose final state differs: {wrong_bits}"
    )
    marks = [
        Mark("found in time", CERTAIN, timely, at_least=True),
        Mark("innocents named", 0, innocents),
        Mark("jobs with other bits, if found", 0, wrong_bits),
        Mark("reports of a last right step after the fault began", 0, evidence),
        Mark("failed jobs", 0, sum(each.code != 0 for each in results)),
    ]
    return {"results": [asdict(each) for each in results]}, marks


def in_time(result: InjectionResult, share: float) -> bool:
    injection = result.injection
    return result.found is not None and result.found < injection.first + limit(injection, share)


def row(results: Sequence[InjectionResult], share: float) -> list[str]:
    none = [each for each in results if each.equal and not each.named]
    real = [each for each in results if each not in none]
    steps = [each.found - each.injection.first + 1 for each in real if each.found is not None]
    return [
        str(len(results)),
        str(len(none)),
        f"{len(steps)} of {len(real)}",
        str(sum(in_time(each, share) for each in real)),
        str(sum(len({*each.named} - {each.injection.rank}) for each in results)),
        f"{statistics.mean(steps):.1f}" if steps else "",
        f"{statistics.mean(expected(each.injection, share) for each in real):.1f}" if real else "",
        str(Counter(each.equal for each in real)[True]),
    ]


# ---- cost ------------------------------------------------------------------------------------------------------------


class VerifiedSteps:
    """Steps of one model."""

    def __init__(self, name: str, share: float, count: int) -> None:
        torch.manual_seed(1)
        self.training = models.make(name, 0)
        self.model = self.training.model
        self.shards = Shards(count, verify=share, by_speed=False)
        self._optimizer = DistributedOptimizer(
            self.training.optimizer(), self.model.named_parameters(), shards=self.shards
        )

    def __call__(self) -> float:
        distributed.barrier()
        began = time.perf_counter()
        for shard in self.shards:
            inputs, targets = self.training.batches[shard % len(self.training.batches)]
            self.training.loss(self.model, inputs, targets).backward()
        self._optimizer.step()
        return time.perf_counter() - began


@dataclass(frozen=True)
class CostAnswer:
    """Ratios of steps to those of the other training, in steps with checks and without."""

    checked: list[float]
    unchecked: list[float]

    def at(self, between: float) -> float:
        """Return the mean ratio if every ``between``-th step has checks, from the medians of both kinds."""
        checked, unchecked = map(statistics.median, (self.checked, self.unchecked))
        return unchecked + (checked - unchecked) / between


def measure(name: str, count: int, steps: int) -> CostAnswer:
    verified, plain = VerifiedSteps(name, SAMPLED, count), VerifiedSteps(name, 0.0, count)
    ranks = distributed.get_world_size()
    held = shard_assignment.assign(count, ranks)
    found: dict[bool, list[float]] = {True: [], False: []}
    for step in range(WARM + steps):
        took = [0.0, 0.0]
        for way in (0, 1) if step % 2 else (1, 0):
            took[way] = (verified, plain)[way]()
        slowest = torch.tensor(took, dtype=torch.float64)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        checks = verification_rules.checks(held, SAMPLED, 0, lifecycle.current().generation, step)
        if step >= WARM:
            found[bool(checks)].append(float(slowest[0] / slowest[1]))
    weights = zip(verified.model.parameters(), plain.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in weights)
    groups.agree("weights are the same bits with and without verification", same, "differ")
    return CostAnswer(found[True], found[False])


def cost(options: Any) -> tuple[dict[str, Any], list[Mark]]:
    console = results_output.console()
    share, held = options.cost_verify, shard_assignment.assign(options.shards, options.ranks)
    between = verification_rules.steps_between(held, share)
    found = results_output.table(
        f"verify={share:g} on {options.ranks} workers, {options.shards} shards, to steps without",
        *("model", "step with checks", "other steps", f"mean, checks in every {between:g}th step"),
    )
    figures, marks = {}, []
    for name in options.models:
        answer = groups.ask(measure, options.ranks, name, options.shards, options.steps)
        figures[name] = answer
        kinds = [spread(each).text(3) for each in (answer.checked, answer.unchecked)]
        found.add_row(name, *kinds, f"{answer.at(between):.3f}")
        marks.append(Mark(f"step of the {name}", COST, answer.at(between)))
    console.print(found)
    return figures, marks


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--injections", type=int, default=1000)
    parser.add_argument("--verify", type=float, default=1 / 16, help="of the jobs")
    parser.add_argument("--first", type=int, default=0, help="number of the first injection")
    parser.add_argument("--read", type=Path, nargs="+", help="files with results")
    parser.add_argument("--jobs", type=int, default=2, help="at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--cost-verify", type=float, default=1 / 64)
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--steps", type=int, default=256)
    options = parser.parse_args()
    if options.read:
        figures, marks = show(read(options.read), options.verify)
    else:
        figures, marks = cost(options) if options.cost else inject(options)
    results_output.conclude(results_output.console(), options.json, figures, marks)


if __name__ == "__main__":
    main()
