"""`python -m tests.stress soak`: trains a small model under faults for long, and measures resource growth.

It samples the driver with its agent, and one worker that is spared from faults; `growth` decides whether a curve is
flat, `faulty_job` does the rest. After the last fault the job continues until all its workers are back, and is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from elastic.chaos.harness.journal_tail import JobProgress
from elastic.chaos.inject import command, network_isolation, terminal_report
from elastic.chaos.inject.faulty_job import Job, print_line, under_fire
from elastic.chaos.inject.plan import KINDS, Chance, Plan
from elastic.driver.network.host_lists import SLOTS_LIMIT
from elastic.errors import Invalid
from harness.processes import path_of_tests
from stress.soak import page, resources
from stress.soak.growth import QUANTITIES, GrowthCurve
from stress.soak.page import BACK_S, DRIVER, SoakResults

DESCRIPTION = """\
Train a small model on four workers of this machine under a random fault every two seconds; lost workers return. One
worker is spared, so that it lives as long as the job. Passes if no committed step was lost, all invariants hold,
memory, file descriptors, threads, sockets and shared memory do not grow in that worker and in the driver, and no
process, file or shared memory is left behind."""

EXAMPLES = """\
examples:
  python -m tests.stress soak --minutes 3
  python -m tests.stress soak --minutes 20 --json soak.json --write-doc docs/soak.md"""

FAULTS = "kill,leave,freeze,cut"
# Slots per fault: a worker that leaves on request leaves its slot empty.
SLOTS_PER_FAULT = 0.5
SPARED = "localhost:0"
WIDTH = 128  # width of the model
STEP_S = 0.02  # pause besides the work of a step, so that there is time for imports
FREEZE_S = (0.2, 4.0)  # shorter and longer than the lease
SETTLED_S = 0.5  # seconds after a change of the world until the old one's sockets are closed
TOLD_S = 30.0  # interval of progress lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, metavar="N", help="minutes to run (default: 20)")
    add(
        "--fault-every",
        type=float,
        default=2.0,
        metavar="S",
        help="mean seconds between faults (default: 2)",
    )
    add("--workers", type=int, default=4, metavar="N", help="number of workers (default: 4)")
    add(
        "--faults",
        metavar="LIST",
        help=f"kinds of fault to inject (default: {FAULTS}; cut requires root)",
    )
    add("--seed", type=int, metavar="N", help="seed of the random faults")
    add("--sample-every", type=float, default=5.0, metavar="S", help="default: 5")
    add("--json", type=Path, metavar="FILE", help="write the report and the curves to FILE")
    add("--write-doc", type=Path, metavar="FILE", help="write a page about this run to FILE")


def main(options: argparse.Namespace) -> int:
    plan = _plan(options)
    for path in (options.json, options.write_doc):
        if path is not None and not path.resolve().parent.is_dir():
            raise Invalid(f"{path}: the folder {path.resolve().parent} does not exist")
    folder = Path(tempfile.mkdtemp(prefix="elastic-soak-"))
    job = _job(options, plan, folder)
    command.check_plan(plan, job.settings, digests=True)
    print_line(
        f"the job writes to {folder}/output.txt; seed {plan.chance.seed if plan.chance else 0}"
    )
    before = resources.segments()
    watch = ResourceMonitor(options, folder)
    with (folder / "output.txt").open("wb") as output:
        faulty_job = under_fire(job, plan, env=path_of_tests(), each_turn=watch.look, output=output)
    report = command.report_of(faulty_job)
    found = watch.found()
    found.left = sorted(resources.unused_segments() - before)
    found.left += [f"process {pid}" for pid in resources.processes_of(folder)]
    terminal_report.show(report)
    page.show(found, Console())
    passed = not report.exit_code and not found.troubles
    print(f"{'PASSED' if passed else 'FAILED'}; everything is in {folder}")
    if options.json is not None:
        content = {
            "passed": passed,
            "troubles": found.troubles,
            "growth": {f"{c.who} {c.quantity.key}": c.growth for c in found.curves},
            "report": asdict(report),
            "soak": asdict(found),
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.write_doc is not None:
        options.write_doc.write_text(page.page(_again(options, plan), report, found, passed=passed))
    return 0 if passed else report.exit_code or 1


def _plan(options: argparse.Namespace) -> Plan:
    for flag, value in (
        ("--minutes", options.minutes),
        ("--fault-every", options.fault_every),
        ("--sample-every", options.sample_every),
    ):
        if not 0 < value < float("inf"):
            raise Invalid(f"{flag} is {value:g}: pass more than 0")
    if options.workers < 2:
        raise Invalid(
            f"--workers is {options.workers}: pass 2 or more, because one worker is spared"
        )
    kinds = (options.faults or FAULTS).split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise Invalid(f"--faults: unknown fault {kind!r}; choose from {','.join(KINDS)}")
    if options.faults is None:
        try:
            network_isolation.check_cut()
        except Invalid as error:
            kinds.remove("cut")
            print_line(f"cut is omitted: {error}")
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    chance = Chance(
        options.fault_every,
        tuple(kinds),
        seed=seed,
        duration_s=60 * options.minutes,
        for_s=FREEZE_S,
        spare=(SPARED,),
    )
    return Plan(chance=chance)


def _job(options: argparse.Namespace, plan: Plan, folder: Path) -> Job:
    program = Path(sys.executable).with_name("elasticrun")
    if not program.exists():
        raise Invalid(f"{program} is missing: install hvd-elastic into this environment")
    faults = 60 * options.minutes / options.fault_every
    slots = min(SLOTS_LIMIT, options.workers + int(SLOTS_PER_FAULT * faults))
    flags = f"-np {options.workers} --min-np 1 --max-np {options.workers} -H localhost:{slots}"
    words = [str(program), *flags.split(), "--blacklist-cooldown-range", "0.1", "1"]
    (folder / "steps").mkdir()
    words += [sys.executable, "-m", "stress.hosts.training"]
    words += [str(folder), str(WIDTH), str(STEP_S)]
    return command.check_job(words, plan, folder=folder)


def _again(options: argparse.Namespace, plan: Plan) -> str:
    """Return the command that repeats this soak."""
    assert plan.chance is not None
    flags = [
        f"--minutes={options.minutes:g}",
        f"--fault-every={options.fault_every:g}",
        f"--workers={options.workers}",
        f"--faults={','.join(plan.chance.kinds)}",
        f"--seed={plan.chance.seed}",
    ]
    return f"python -m tests.stress soak {shlex.join(flags)}"


# ---- watching --------------------------------------------------------------------------------------------------------


class ResourceMonitor:
    """Samples the processes while the job runs, and ends it when its time is over."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._every_s = options.sample_every
        self._length_s = 60 * options.minutes
        self._workers = options.workers
        self._folder = folder
        self._samples: dict[str, list[tuple[float, int, dict[str, float]]]] = {}
        self._world = (0, 0)  # generation and live members
        self._settled_at = 0.0
        self._sample_at = self._tell_at = 0.0
        self._back_s: float | None = None
        self._over = False

    def look(self, story: JobProgress, driver: int, now: float) -> None:
        """Sample if it is time; called in every turn of `faulty_job.under_fire`."""
        if story.began_at is None or story.ending:
            return
        since = now - story.began_at
        size = len(story.present())
        if (story.generation, size) != self._world:
            self._world, self._settled_at = (story.generation, size), now + SETTLED_S
        if now >= max(self._sample_at, self._settled_at) and since <= self._length_s:
            self._sample_at = now + self._every_s
            self._sample(DRIVER, driver, since, size)
            for worker, pid in story.pids.items():
                if f"{worker.host}:{worker.slot}" == SPARED:
                    self._sample(str(worker), pid, since, size)
        if now >= self._tell_at:
            self._tell_at = now + TOLD_S
            print_line(
                f"{since / 60:.1f} min: generation {story.generation}, {len(story.members)} workers,"
                f" {story.commits} commits"
            )
        calm = since - self._length_s
        if calm > 0 and self._back_s is None and size == self._workers:
            self._back_s = calm
        if not self._over and (calm > BACK_S or (calm > 0 and self._back_s is not None)):
            self._over = True
            (self._folder / "over").touch()

    def found(self) -> SoakResults:
        curves = []
        for who, samples in self._samples.items():
            at, sizes = [when for when, _, _ in samples], [size for _, size, _ in samples]
            for quantity in QUANTITIES:
                values = [measured[quantity.key] for _, _, measured in samples]
                curves.append(GrowthCurve(who, quantity, at, values, sizes))
        return SoakResults(curves, self._back_s)

    def _sample(self, who: str, pid: int, since: float, size: int) -> None:
        with contextlib.suppress(OSError):  # the process ends
            self._samples.setdefault(who, []).append((since, size, resources.measure(pid)))
