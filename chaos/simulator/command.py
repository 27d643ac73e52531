"""`python -m elastic.chaos simulate`: simulate whole jobs with several seeds, and print how to reproduce violations.

A run depends only on the seed and the version of the code. After a violation, the command therefore prints both,
writes the driver's journal, and shows the command that reproduces the violation.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from elastic.chaos.simulator.regroup_cost import Scale
from elastic.chaos.simulator.simulated_shards import ShardedJob
from elastic.chaos.simulator.simulator import Outcome, Simulation, Violation
from elastic.driver.reasons import ReasonKind
from elastic.errors import Invalid

DESCRIPTION = """\
Run the real driver and worker state machines of whole jobs on a virtual clock, under faults drawn from a seed:
crashes, freezes and restarts of every process, and a network that delays, drops, duplicates and partitions."""
EXAMPLES = """\
examples:
  python -m elastic.chaos simulate --seed 7                     one job of 8 workers, with its events
  python -m elastic.chaos simulate --seeds 1000                 seeds 0 to 999; prints those that fail
  python -m elastic.chaos simulate --sharded --seeds 1000       the same, with a sharded state
  python -m elastic.chaos simulate --workers 10000 --seed 7     one large job: 300 virtual seconds, failing hosts
  python -m elastic.chaos replay simulated-seed-7.jsonl         repeat the decisions of a recorded run, and compare"""
# number of workers from which one simulated event represents one step of all members, to save time
LARGE = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="number of consecutive seeds, from --seed on (default: 1)",
    )
    parser.add_argument(
        "--workers", type=int, default=8, help="number of workers of the job (default: 8)"
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="number of training steps (default: 150)"
    )
    parser.add_argument(
        "--faults", type=int, default=14, help="number of faults to inject (default: 14)"
    )
    parser.add_argument(
        "--mild", action="store_true", help="inject only faults that the job must survive"
    )
    parser.add_argument(
        "--sharded",
        action="store_true",
        help=f"shard the state, as FSDP2 and ZeRO-1 do; fewer than {LARGE} workers only",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"duration in virtual seconds of a job with {LARGE} or more workers (default: 300)",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        help=f"file for the journal of a single or a failing seed; fewer than {LARGE} workers only",
    )


def main(options: argparse.Namespace) -> int:
    """Simulate jobs. Return 0 if there was no violation, otherwise 1."""
    _refuse_what_cannot_run(options)
    if options.workers >= LARGE:
        return _large(options)
    outcomes: Counter[str] = Counter()
    failed = 0
    began = time.monotonic()
    for seed in range(options.seed, options.seed + options.seeds):
        simulation = Simulation(
            seed,
            workers=options.workers,
            steps=options.steps,
            faults=options.faults,
            mild=options.mild,
            sharded=ShardedJob.drawn(seed) if options.sharded else None,
        )
        try:
            outcome = simulation.run()
            # A failed job is not a violation.
            survives = options.mild and outcome.reason.kind is not ReasonKind.SHARDS_LOST
            wrong = f"the job failed: {outcome.reason}" if survives and outcome.code else ""
            if not wrong:
                outcomes["ended with success" if outcome.code == 0 else "ended with a reason"] += 1
        except Violation as error:
            wrong = str(error)
        if wrong:
            failed += 1
            _failed(simulation, wrong, options)
        elif options.seeds == 1:
            _print_outcome(simulation, outcome, options)
    if options.seeds > 1:
        outcomes["failed"] = failed
        text = ", ".join(f"{count} {what}" for what, count in outcomes.items())
        print(f"{options.seeds} seeds of {options.workers} workers: {text}")
        print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
    return 1 if failed else 0


def _refuse_what_cannot_run(options: argparse.Namespace) -> None:
    """Raise Invalid for options that cannot be combined."""
    for name in ("seeds", "workers", "steps"):
        if getattr(options, name) < 1:
            raise Invalid(f"--{name} is {getattr(options, name)}: pass 1 or more")
    if options.faults < 0:
        raise Invalid(f"--faults is {options.faults}: pass 0 or more")
    large = options.workers >= LARGE
    seconds: float | None = options.seconds
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise Invalid(f"--seconds is {seconds:g}: pass a positive number of virtual seconds")
    if seconds is not None and not large:
        what = (
            f"--seconds applies to jobs of {LARGE} or more workers; this one has {options.workers}"
        )
        raise Invalid(f"{what} and runs until all --steps are trained: omit --seconds")
    if options.sharded and large:
        raise Invalid(
            f"--sharded supports jobs of fewer than {LARGE} workers, but --workers is {options.workers}: lower"
            " --workers, or omit --sharded"
        )
    if options.journal is None:
        return
    if large:
        raise Invalid(f"a simulation of {LARGE} or more workers writes no journal: omit --journal")
    path: Path = options.journal
    writable = path if path.exists() else path.parent
    if path.is_dir() or not writable.exists() or not os.access(writable, os.W_OK):
        raise Invalid(
            f"the journal {str(path)!r} can't be written: pass a file in an existing, writable folder"
        )


def _print_outcome(simulation: Simulation, outcome: Outcome, options: argparse.Namespace) -> None:
    print(simulation.story())
    how = "success" if outcome.code == 0 else f"exit code {outcome.code}"
    print(
        f"seed {simulation.seed}: {how} after {outcome.virtual_s:.1f} virtual seconds, {outcome.generation} worlds,"
        f" {outcome.messages} messages: {outcome.reason}"
    )
    if options.journal is not None:
        simulation.write_journal(options.journal)
        print(f"journal: {options.journal}")


def _failed(simulation: Simulation, wrong: str, options: argparse.Namespace) -> None:
    seed = simulation.seed
    journal = options.journal or Path(f"simulated-seed-{seed}.jsonl")
    simulation.write_journal(journal)
    print(f"seed {seed}: {wrong.removeprefix(f'seed {seed}: ')}")
    again = f"python -m elastic.chaos simulate --seed {seed} --workers {options.workers}"
    again += f" --steps {options.steps} --faults {options.faults}"
    again += f"{' --mild' if options.mild else ''}{' --sharded' if options.sharded else ''}"
    print(f"\nseed     {seed}\ncommit   {_commit()}\nagain    {again}")
    print(f"journal  {journal}: python -m elastic.chaos replay {journal}")


def _commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown: git did not answer"
    return found.stdout.strip() or "unknown: not in a git checkout"


def _large(options: argparse.Namespace) -> int:
    began = time.process_time()
    seconds = 300.0 if options.seconds is None else options.seconds
    scale = Scale(options.seed, workers=options.workers, virtual_s=seconds)
    try:
        outcome = scale.run()
    except Violation as error:
        print(f"{error}\n\nseed     {options.seed}\ncommit   {_commit()}")
        return 1
    spent = time.process_time() - began
    for fault in scale.simulation.faults:
        print(f"fault: {fault}")
    print(
        f"seed {options.seed}: {options.workers} workers, {outcome.virtual_s:.0f} virtual seconds, {outcome.generation}"
        f" worlds, {outcome.messages} messages, {outcome.happened} events, {spent:.1f} s of processor time"
    )
    return 0
