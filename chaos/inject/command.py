"""`python -m elastic.chaos run`: run a user's job, inject the faults of a plan, and print a report.

All input is checked before the job is started. `faulty_job` runs the job.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from elastic.chaos.inject import network_isolation, terminal_report
from elastic.chaos.inject.bit_flips import RULES
from elastic.chaos.inject.faulty_job import FaultyJob, Job, print_line, under_fire
from elastic.chaos.inject.injector import RUN_S
from elastic.chaos.inject.plan import (
    FLIPPED,
    KINDS,
    MEAN_LEAST_S,
    SECONDS_MAX,
    SPOILS_FILE,
    Chance,
    Plan,
    draw,
)
from elastic.chaos.inject.plan_file import read_plan
from elastic.chaos.inject.report import Report, report
from elastic.chaos.invariants.check import broken_invariants
from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import DIR
from elastic.checkpoints.options import RUN as CHECKPOINT_RUN
from elastic.driver.commandline import cli
from elastic.driver.journal import journal
from elastic.driver.settings import Settings
from elastic.errors import Invalid

DESCRIPTION = """\
Start a job with elasticrun and inject faults into its workers, by a plan or at random. The script needs no change.
The report at the end lists the faults and their outcomes, recovery times, lost committed steps, whether replicas
agree, and the share of time spent in training."""

EXAMPLES = f"""\
faults:
{chr(10).join((f"  {kind:14} {text}" for kind, text in KINDS.items()))}

examples:
  python -m elastic.chaos run --mean-time-between-faults 20 -- elasticrun -np 4 --min-np 1 python train.py
      kills and freezes workers at random, about every 20 s
  python -m elastic.chaos run --plan plan.toml --dry-run -- elasticrun -np 4 --min-np 1 python train.py
      shows what the plan would do, and starts nothing

The exit code is that of the job, or 1 if the job succeeded but a committed step was lost, replicas differ, an
invariant was violated, or no step was trained. Example of a plan: elasticrun docs chaos"""

DRAWN_SHOWN = 10  # number of drawn faults shown by --dry-run
PAUSE_SHARE = 0.7  # maximum pause of a slowed worker, as a fraction of the liveness timeout
PROGRAMS = ("elasticrun", "horovodrun")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=[])
    parser.usage = f"{parser.prog} [options] -- elasticrun [flags] program [arguments]"
    add = parser.add_argument
    add("--plan", type=Path, metavar="FILE", help="plan of faults, in TOML: elasticrun docs chaos")
    add(
        "--mean-time-between-faults",
        type=float,
        metavar="S",
        help="mean number of seconds between random faults; conflicts with --plan",
    )
    add_flags_of_random_faults(parser)
    add(
        "--dry-run",
        action="store_true",
        help="check the plan and the job, print the faults, and exit",
    )
    add("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    add("--no-digests", action="store_true", help="do not compare replicas at every commit")


def add_flags_of_random_faults(parser: argparse.ArgumentParser) -> None:
    """Add the flags that limit random faults. `plan_of` reads them."""
    add = parser.add_argument
    add("--faults", metavar="LIST", help="kinds of fault to draw (default: kill,freeze)")
    add("--seed", type=int, metavar="N", help="seed of the random faults (default: random)")
    add(
        "--duration",
        type=float,
        metavar="S",
        help="stop injecting faults after S seconds (default: at the end of the job)",
    )


def main(options: argparse.Namespace) -> int:
    plan = plan_of(options)
    job = check_job(options.command, plan, folder=None)
    # Injected bit flips make replicas differ. The job itself must detect the flips at its checkpoints, so this command
    # does not compare replicas at every commit.
    digests = not options.no_digests and not plan.flips()
    check_plan(plan, job.settings, digests=digests)
    if options.json is not None:
        check_json(options.json)
    if options.dry_run:
        print("\n".join(dry_run(plan, job)))
        return 0
    if plan.chance is not None:
        print_line(f"random faults are drawn with --seed {plan.chance.seed}")
    faulty_job = under_fire(job, plan, digests=digests)
    # the job failed at its start, and elasticrun has printed the reason
    if not job.journal.stat().st_size:
        print(f"the job ended with exit code {faulty_job.code} before a fault could be injected")
        return faulty_job.code or 1
    found = report_of(faulty_job)
    terminal_report.show(found)
    print(f"journal: {job.journal}")
    if options.json is not None:
        try:
            write_json(found, job, plan, options.json)
        except OSError as error:
            print_line(f"cannot write --json {options.json}: {error.strerror}")
            return found.exit_code or 1
    return found.exit_code


# ---- checks before the start -----------------------------------------------------------------------------------------


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan from the file or the flags, always with a seed.

    Raises:
        Invalid: the flags contradict each other, a value is out of range, or the plan file is unreadable or invalid.
    """
    flags = {
        "--mean-time-between-faults": options.mean_time_between_faults,
        "--faults": options.faults,
        "--duration": options.duration,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if options.seed is not None and options.seed < 0:
        raise Invalid(f"--seed is {options.seed}: pass 0 or more")
    if options.plan is not None:
        if given:
            raise Invalid(
                f"{given[0]} can't be combined with --plan: move {given[0]} into the plan"
            )
        try:
            text = options.plan.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise Invalid(
                f"the plan {options.plan} can't be read: {why}. Pass a readable TOML file"
            ) from None
        plan = read_plan(text, str(options.plan))
        if options.seed is not None and plan.chance is None:
            raise Invalid(
                f"--seed has no effect, because {options.plan} contains no random faults: omit --seed, or add"
                " [random] to the plan"
            )
        if options.seed is not None and plan.chance is not None and plan.chance.seed is not None:
            raise Invalid(
                f"--seed and the plan {options.plan} both specify a seed: keep only one of them"
            )
    else:
        plan = Plan(chance=_chance_of(options))
    return plan.seeded(secrets.randbelow(2**31) if options.seed is None else options.seed)


def _chance_of(options: argparse.Namespace) -> Chance:
    mean, duration = options.mean_time_between_faults, options.duration
    if mean is None:
        raise Invalid("no faults were given: pass --plan FILE or --mean-time-between-faults S")
    for flag, value in (("--mean-time-between-faults", mean), ("--duration", duration)):
        if value is not None and not 0 < value < float("inf"):
            raise Invalid(f"{flag} is {value:g}: pass a number of seconds above 0")
        if value is not None and value > SECONDS_MAX:
            raise Invalid(f"{flag} is {value:g}: pass at most {SECONDS_MAX:.0f} seconds")
    if mean < MEAN_LEAST_S:
        raise Invalid(
            f"--mean-time-between-faults is {mean:g}: pass at least {MEAN_LEAST_S:g} seconds"
        )
    words = "kill,freeze" if options.faults is None else options.faults
    kinds = [kind.strip() for kind in words.split(",")]
    for kind in kinds:
        if kind not in KINDS:
            raise Invalid(
                f"--faults contains the unknown fault {kind!r}: pass one or more of {','.join(KINDS)}"
            )
    return Chance(mean, tuple(kinds), duration_s=duration)


def check_job(command: Sequence[str], plan: Plan, *, folder: Path | None) -> Job:
    """Validate the command as elasticrun does. Return it, with ``--journal`` added if it is missing.

    Args:
        folder: folder for the journal if the command does not specify one. None means a new folder, created when the
            job runs.

    Raises:
        Invalid: the command contains no elasticrun, one of its options is invalid, or the job is not elastic.
    """
    at = next((i for i, word in enumerate(command) if Path(word).name in PROGRAMS), None)
    if at is None:
        raise Invalid(
            "no job was given: pass an elasticrun command after --, as in -- elasticrun -np 4 --min-np 1 python"
            " train.py"
        )
    options = cli.read_options(command[at + 1 :], os.environ)
    checked = cli.make_job(options, os.environ)
    env = checked.settings.env
    # elasticrun determines the run number, so the variable of an outer job is not passed on.
    if CHECKPOINT_RUN in env:
        catalog.give_back_run(Storage(env[DIR]), int(env[CHECKPOINT_RUN]))
    if not checked.settings.elastic:
        raise Invalid(
            "the job is not elastic, so the first lost worker ends it: add --min-np, as in elasticrun -np 4"
            " --min-np 1 python train.py"
        )
    if checked.journal is not None:
        return Job(list(command), Path(checked.journal), checked.settings)
    name = f"elastic-chaos-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    path = (folder or Path(tempfile.gettempdir(), name)) / "journal.jsonl"
    words = [*command[: at + 1], "--journal", str(path), *command[at + 1 :]]
    return Job(words, path, checked.settings)


def check_plan(plan: Plan, settings: Settings, *, digests: bool) -> None:
    """Raise Invalid if this machine or this job does not support a fault in the plan."""
    kinds = plan.kinds()
    if "partition" in kinds:
        network_isolation.check_partition()
    if "cut" in kinds:
        network_isolation.check_cut()
    if plan.counts_commits() and not digests:
        raise Invalid("after_commits and faults that flip bits need digests: omit --no-digests")
    if plan.flips():
        check_flips(plan, settings)
    for fault in plan.faults:
        word, _, rest = fault.victim.partition(" ")
        if word == "rank" and int(rest) >= settings.workers_max:
            raise Invalid(
                f"the plan has a fault for rank {rest}, but the job has at most {settings.workers_max} workers:"
                f" use a rank of at most {settings.workers_max - 1}"
            )
    longest = PAUSE_SHARE * settings.lease_s
    factors = [fault.factor for fault in plan.faults if fault.kind == "slow"]
    if plan.chance is not None and "slow" in plan.chance.kinds:
        factors.append(plan.chance.factor)
    if factors and RUN_S * (max(factors) - 1) > longest:
        raise Invalid(
            f"a slowdown factor of {max(factors):g} pauses a worker for {RUN_S * (max(factors) - 1):.1f} s at a"
            f" time, which exceeds the lease of {settings.lease_s:g} s, so the worker would be treated as"
            f" frozen: pass a factor of at most {1 + int(10 * longest / RUN_S) / 10:g}"
        )


def check_flips(plan: Plan, settings: Settings) -> None:
    """Raise Invalid if this job cannot detect flipped bits."""
    if DIR not in settings.env:
        raise Invalid(
            "flipped bits are detected when a checkpoint is written: start the job with --checkpoint-dir; in a"
            " short test, add --checkpoint-every 10commits"
        )
    if plan.kinds() & {*FLIPPED} and settings.workers_max < 3:
        raise Invalid(
            "a job with two replicas can't tell which replica is wrong: start the job with at least three"
            " workers"
        )
    if SPOILS_FILE in plan.kinds() and not Storage(settings.env[DIR]).local:
        raise Invalid(
            f"{SPOILS_FILE} needs a local folder: pass a local folder as --checkpoint-dir"
        )
    if RULES in os.environ:
        raise Invalid(
            f"{RULES} is set, but this command must set it itself to flip bits: unset {RULES}"
        )


def check_json(path: Path) -> None:
    """Raise Invalid if the JSON report cannot be written to this path."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise Invalid(
            f"the folder {folder} of --json {path} does not exist: create the folder, or pass another file"
        )
    if path.is_dir():
        raise Invalid(f"--json is {path}, which is a folder: pass a file name")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise Invalid(f"--json is {path}, which is not writable: pass a writable file")


def dry_run(plan: Plan, job: Job) -> list[str]:
    """Return lines that describe what a run would do."""
    lines = [f"would run: {' '.join(job.words)}", *(f"  {fault}" for fault in plan.faults)]
    if plan.chance is not None:
        faults = draw(plan.chance)
        drawn = [fault for fault, _ in zip(faults, range(DRAWN_SHOWN), strict=False)]
        lines += [f"drawn with seed {plan.chance.seed}:", *(f"  {fault}" for fault in drawn)]
        if len(drawn) == DRAWN_SHOWN:
            lines.append("  ... and so on")
    return lines


# ---- report ----------------------------------------------------------------------------------------------------------


def report_of(faulty_job: FaultyJob) -> Report:
    """Return the report on the job's journal. Raises Invalid if the file is not a journal."""
    settings, entries = journal.read(faulty_job.job.journal)
    return report(
        settings,
        entries,
        faulty_job.injected,
        code=faulty_job.code,
        spared=faulty_job.spared,
        broken=broken_invariants(faulty_job.job.journal),
        planned=faulty_job.planned,
        missed=faulty_job.missed,
    )


def write_json(found: Report, job: Job, plan: Plan, path: Path) -> None:
    content = {
        **asdict(found),
        "goodput": {
            **asdict(found.goodput),
            "share": found.goodput.share,
            "full_share": found.goodput.full_share,
            "worker_share": found.goodput.worker_share,
        },
        "exit_code": found.exit_code,
        "seed": plan.chance.seed if plan.chance else None,
        "command": job.words,
        "journal": str(job.journal),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
