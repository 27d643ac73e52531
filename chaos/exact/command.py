"""`python -m elastic.chaos exact`: a job undisturbed and the same job under faults; every commit has to be equal.

Runs both through `elastic.chaos.inject`, reads their journals, and says where they differ first: `digests`.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from pathlib import Path

from elastic.chaos.exact import digests
from elastic.chaos.harness.journal_tail import Story
from elastic.chaos.inject import command as faults
from elastic.chaos.inject.faulty_job import Job, say, under_fire
from elastic.chaos.inject.plan import Chance, Plan
from elastic.checkpoints.options import DIR
from elastic.driver.events import EndJob
from elastic.driver.journal import journal
from elastic.errors import Invalid

DESCRIPTION = """\
Runs a job that trains in shards (elastic.Shards) twice: undisturbed, then with workers killed and frozen at random.
Compares the digests of every tensor at every commit, and names the step and the tensors that differ first."""

EXAMPLES = """\
examples:
  python -m elastic.chaos exact -- elasticrun -np 3 --min-np 1 python train.py
  python -m elastic.chaos exact --mean-time-between-faults 2 -- elasticrun -np 3 --min-np 1 python train.py
      where training takes seconds
  python -m elastic.chaos exact --undisturbed first/journal.jsonl -- elasticrun -np 2 --min-np 1 python train.py
      compares with a run of before, of elasticrun --digests --journal: of another size, on another machine

The exit code is 0 where all commits that both have are equal, 1 where some differ or one run ended after another
step, 2 where they have none of the same step or no fault came. Set OMP_NUM_THREADS where the two have other numbers
of workers. `elasticrun docs exact` says what is needed."""

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
        help="of a run with --digests: compare with that one, and run the job only once",
    )
    add(
        "--mean-time-between-faults",
        type=float,
        default=MEAN_S,
        metavar="S",
        help=f"this many seconds apart on average (default: {MEAN_S:g})",
    )
    add("--faults", metavar="LIST", help="which ones to draw (default: kill,freeze)")
    add("--seed", type=int, metavar="N", help="draw the same faults at the same times again")
    add("--duration", type=float, metavar="S", help="draw faults for so long, then leave it alone")
    parser.set_defaults(plan=None)


def main(options: argparse.Namespace) -> int:
    plan = faults.plan_of(options)
    name = f"elastic-exact-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = Path(tempfile.gettempdir(), name)
    disturbed = faults.check_job(options.command, plan, folder=folder / "disturbed")
    if disturbed.journal.parent != folder / "disturbed":
        raise Invalid("there are two runs, each with a journal of its own: leave --journal out")
    faults.check_plan(plan, disturbed.settings, digests=True)
    if options.undisturbed is None:
        if DIR in disturbed.settings.env:
            raise Invalid(
                "the job has a --checkpoint-dir, so the second run would go on where the first one ended: leave it out,"
                " or run the job with --digests --journal FILE first, and give --undisturbed FILE and another folder"
            )
        first = faults.check_job(options.command, Plan(), folder=folder / "undisturbed")
        code, _ = _run(first, Plan(), "undisturbed")
        if code:
            print(
                f"the undisturbed run ended with exit code {code}: there is nothing to compare with"
            )
            return NOTHING
        before = first.journal
    else:
        before = options.undisturbed
        if not before.exists():
            raise Invalid(
                f"there is no file {before}: give --undisturbed the journal of a run of before, which"
                " elasticrun --digests --journal FILE has written"
            )
    wanted, _ = _read(before)
    if not wanted:
        raise Invalid(
            f"{before} has no digests of tensors: the job's state needs an elastic.Shards, and has to commit;"
            " a run of before needs elasticrun --digests"
        )
    inside = digests.difference(wanted, wanted)
    if inside is not None:
        print(f"journal: {before}")
        print(f"already undisturbed, workers do not agree: {inside.sentence()}")
        return DIFFER
    _say_faults(plan)
    code, count = _run(disturbed, plan, "under faults")
    verdict = _verdict(before, disturbed.journal, code)
    if verdict == EQUAL and not count and options.undisturbed is None:
        print(
            "but no fault came, so nothing was shown: train for longer, or give a shorter --mean-time-between-faults,"
            f" which is {options.mean_time_between_faults:g} s"
        )
        return NOTHING
    return verdict


def _say_faults(plan: Plan) -> None:
    chance = plan.chance
    assert isinstance(chance, Chance)
    say(f"faults are drawn with --seed {chance.seed}")


def _run(job: Job, plan: Plan, how: str) -> tuple[int, int]:
    """The exit code, and the number of faults."""
    say(f"the job runs {how}: {' '.join(job.words)}")
    job.journal.parent.mkdir(parents=True, exist_ok=True)
    done = under_fire(job, plan, digests=False, env=ASKED, each_turn=_check_steps)
    say(f"it ended with exit code {done.code}, after {len(done.injected)} faults")
    return done.code, len(done.injected)


def _check_steps(story: Story, driver: int, now: float) -> None:
    """Ends the job at its first commit, where nothing of it could be compared. Raises Invalid."""
    if story.no_steps:
        raise Invalid(
            "the job's state has no elastic.Shards, so its steps are not counted and two runs of it can't be compared:"
            " train in shards, and give them to the state, as in elastic.TorchState(model=model, optimizer=optimizer,"
            " shards=shards, loader=loader); `elasticrun docs exact` shows what changes in a script"
        )


def _read(path: Path) -> tuple[list[digests.HeldCommit], bool]:
    """The commits, and whether the job has ended by itself, with success. Raises Invalid where it is not a journal."""
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
            f"nothing was compared: none of the disturbed run's {len(found)} commits is of a step after which the"
            f" undisturbed run committed, which it did after {len(steps)} steps; let shards.step say when to commit"
        )
        return NOTHING
    last = max(each.step for each in found)
    if whole and ended and last != max(steps):
        print(
            f"both runs ended by themselves, but the undisturbed one committed last after {max(steps)} steps, and the"
            f" disturbed one after {last}: steps are missing, or too many; or commit once more at the end, so that ends"
            " can be compared"
        )
        return DIFFER
    both = {each.step for each in compared}
    print(
        f"equal: {len(compared)} of {len(found)} commits of {len({each.worker for each in found})} workers, after"
        f" {len(both)} of {len(steps)} committed steps, up to step {max(both)}; each bit is that of the undisturbed run"
    )
    if code:
        print(
            f"but the disturbed run ended with exit code {code}, and what it would have done is not compared"
        )
    return code
