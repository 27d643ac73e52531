"""`python -m elastic.chaos exact`: compare every commit of a fault-free run with a run under faults.

It runs both jobs with `elastic.chaos.inject`, reads their journals, and reports the first difference.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from pathlib import Path

from elastic.chaos.exact import digests
from elastic.chaos.harness.journal_tail import JobProgress
from elastic.chaos.inject import command as faults
from elastic.chaos.inject.faulty_job import Job, print_line, under_fire
from elastic.chaos.inject.plan import Chance, Plan
from elastic.checkpoints.options import DIR
from elastic.driver.events import EndJob
from elastic.driver.journal import journal
from elastic.driver.reasons import counted
from elastic.errors import Invalid

DESCRIPTION = """\
Run a job that trains with elastic.Shards twice: undisturbed, then with workers killed and frozen at random. Compare
the digests of all tensors at every commit, and report the first step and the tensors that differ."""

EXAMPLES = """\
examples:
  python -m elastic.chaos exact -- elasticrun -np 3 --min-np 1 python train.py
  python -m elastic.chaos exact --mean-time-between-faults 2 -- elasticrun -np 3 --min-np 1 python train.py
      for a training run of a few seconds
  python -m elastic.chaos exact --undisturbed first/journal.jsonl -- elasticrun -np 2 --min-np 1 python train.py
      compares with an earlier run of elasticrun --digests --journal, also of another size or on another machine

The exit code is 0 if all commits of the same step are equal, 1 if some differ or the runs ended after different
steps, 2 if the comparison was inconclusive: no common step, or no fault. Set OMP_NUM_THREADS if the runs have
different numbers of workers. `elasticrun docs exact` lists the requirements."""

MEAN_S = 5.0
EQUAL, DIFFER, NOTHING = 0, 1, 2
ASKED = {"ELASTIC_DIGESTS": "tensors"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=[])
    parser.usage = f"{parser.prog} [options] -- elasticrun [flags] program [arguments]"
    add = parser.add_argument
    add(
        "--undisturbed",
        type=Path,
        metavar="JOURNAL",
        help="journal of an earlier run with --digests, to compare with (default: run the job twice)",
    )
    add(
        "--mean-time-between-faults",
        type=float,
        default=MEAN_S,
        metavar="S",
        help=f"mean seconds between faults (default: {MEAN_S:g})",
    )
    faults.add_flags_of_random_faults(parser)
    parser.set_defaults(plan=None)


def main(options: argparse.Namespace) -> int:
    plan = faults.plan_of(options)
    name = f"elastic-exact-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = Path(tempfile.gettempdir(), name)
    disturbed = faults.check_job(options.command, plan, folder=folder / "disturbed")
    if disturbed.journal.parent != folder / "disturbed":
        raise Invalid(
            "--journal conflicts with this command, because each of the two runs writes its own journal: omit"
            " --journal"
        )
    faults.check_plan(plan, disturbed.settings, digests=True)
    if options.undisturbed is None:
        if DIR in disturbed.settings.env:
            raise Invalid(
                "the second run would resume from the --checkpoint-dir of the first run: omit --checkpoint-dir."
                " Alternatively, run the job once with --digests --journal FILE, then pass --undisturbed FILE"
                " and another --checkpoint-dir"
            )
        first = faults.check_job(options.command, Plan(), folder=folder / "undisturbed")
        code, _ = _run(first, Plan(), "undisturbed")
        if code:
            print(
                f"the undisturbed run ended with exit code {code}, so there is no run to compare with"
            )
            return NOTHING
        before = first.journal
    else:
        before = options.undisturbed
        if not before.exists():
            raise Invalid(
                f"the journal {before} does not exist: pass --undisturbed a journal of a run with elasticrun"
                " --digests --journal FILE"
            )
    wanted, _ = _read(before)
    if not wanted:
        raise Invalid(
            f"{before} contains no tensor digests: add an elastic.Shards to the state of the job, call commit(),"
            " and run the job with elasticrun --digests"
        )
    inside = digests.difference(wanted, wanted)
    if inside is not None:
        print(f"journal: {before}")
        print(f"workers differed in the undisturbed run: {inside.sentence()}")
        return DIFFER
    _print_faults(plan)
    code, count = _run(disturbed, plan, "under faults")
    verdict = _verdict(before, disturbed.journal, code)
    if verdict == EQUAL and not count and options.undisturbed is None:
        print(
            "no fault was injected, so the comparison is inconclusive: train longer, or pass a"
            f" --mean-time-between-faults below {options.mean_time_between_faults:g} s"
        )
        return NOTHING
    return verdict


def _print_faults(plan: Plan) -> None:
    chance = plan.chance
    assert isinstance(chance, Chance)
    print_line(f"random faults are drawn with --seed {chance.seed}")


def _run(job: Job, plan: Plan, how: str) -> tuple[int, int]:
    """Run the job under the plan. Return its exit code and the number of injected faults."""
    print_line(f"the job started {how}: {' '.join(job.words)}")
    job.journal.parent.mkdir(parents=True, exist_ok=True)
    done = under_fire(job, plan, digests=False, env=ASKED, each_turn=_check_steps)
    print_line(f"the job ended with exit code {done.code} after {len(done.injected)} faults")
    return done.code, len(done.injected)


def _check_steps(story: JobProgress, driver: int, now: float) -> None:
    """End the job at its first commit if its steps cannot be compared with those of another run.

    Raises:
        Invalid: the job's state contains no `elastic.Shards`.
    """
    if story.no_steps:
        raise Invalid(
            "the state of the job has no elastic.Shards, so the two runs can't be compared: add it to the"
            " state, as in elastic.TorchState(model=model, optimizer=optimizer, shards=shards, loader=loader)."
            " `elasticrun docs exact` shows the changes to a script"
        )


def _read(path: Path) -> tuple[list[digests.HeldCommit], bool]:
    """Read a journal.

    Returns:
        The commits, and whether the job succeeded without having been stopped.

    Raises:
        Invalid: the file is not a journal.
    """
    _, entries = journal.read(path)
    ended = any(
        isinstance(action, EndJob) and action.code == 0
        for entry in entries
        for action in entry.actions
    )
    return digests.held(entry.event for entry in entries if entry.event is not None), ended


def _verdict(before: Path, disturbed: Path, code: int) -> int:
    wanted, whole = _read(before)
    found, ended = _read(disturbed)
    print(f"journal: {disturbed}")
    differs = digests.difference(wanted, found)
    if differs is not None:
        print(differs.sentence())
        return DIFFER
    steps = {each.step for each in wanted}
    compared = digests.in_both(wanted, found)
    if not compared:
        print(
            f"no commits to compare: the {len(found)} commits of the disturbed run and the commits of the"
            f" undisturbed run, made at {len(steps)} steps, have no step in common; commit at fixed values of"
            " shards.step"
        )
        return NOTHING
    last = max(each.step for each in found)
    if whole and ended and last != max(steps):
        print(
            f"both runs finished, but the undisturbed run last committed after {max(steps)} steps and the disturbed"
            f" run after {last}: steps are missing or repeated, or the script does not commit after its last step"
        )
        return DIFFER
    both = {each.step for each in compared}
    print(
        f"equal: compared {len(compared)} of {counted(len(found), 'commit')} of"
        f" {counted(len({each.worker for each in found}), 'worker')}, after {len(both)} of"
        f" {counted(len(steps), 'step')}, up to step {max(both)}; all are bitwise identical to the undisturbed run"
    )
    if code:
        print(
            f"the disturbed run then ended with exit code {code}, so its remaining steps were not compared"
        )
    return code
