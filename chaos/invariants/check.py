"""`python -m elastic.chaos check JOURNAL`: asks of each journal what must be true of every job. Decides nothing.

What that is, `invariants` says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from elastic.chaos.invariants.invariants import BrokenInvariant, check_journal
from elastic.errors import Invalid

DESCRIPTION = """\
Reads the journal of a job that has ended (elasticrun --journal FILE), of all its drivers, and checks what must be true
of every job, whatever befell it: no commit that a survivor held is lost, replicas are equal, a fenced worker stays
out, every wait ends, and more. Exit code 1 if something does not hold, with the line of the journal where that is
seen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", nargs="+", type=Path, metavar="JOURNAL", help="a job's journal")
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="the dataset has N samples, and the job has trained whole epochs: each must count once"
        " (only where workers report their samples)",
    )


def main(options: argparse.Namespace) -> int:
    """0: all holds; 1: something does not, or could not be checked. Raises Invalid."""
    if options.samples is not None and options.samples < 1:
        raise Invalid(f"--samples is {options.samples}; give 1 or more, or leave it out")
    failed = False
    for path in options.journal:
        try:
            found = check_journal(path, samples=options.samples or 0)
        except BrokenInvariant as error:
            failed = True
            print(f"{path}: {error}", file=sys.stderr)
        else:
            if options.samples and not found.samples_counted:
                failed = True
                print(
                    f"{path}: no worker reported samples, so these can't be checked; leave out --samples",
                    file=sys.stderr,
                )
                continue
            print(
                f"{path}: all invariants hold; {found.worlds} worlds, {found.recoveries} recoveries,"
                f" {found.commits_compared} digests compared, {found.samples_counted} samples counted"
            )
    return int(failed)


def broken_invariants(path: Path) -> list[str]:
    """What does not hold, in a sentence; the first one only. Raises Invalid where the file is not a journal."""
    try:
        check_journal(path)
    except BrokenInvariant as error:
        return [str(error)]
    return []
