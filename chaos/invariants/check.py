"""`python -m elastic.chaos check JOURNAL`: check the invariants of every job in journals. See `invariants`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from elastic.chaos.invariants.invariants import BrokenInvariant, check_journal
from elastic.errors import Invalid

DESCRIPTION = """\
Check the invariants of a finished job in the journals of all its drivers (elasticrun --journal FILE): no commit that
a survivor held and no sealed commit of a sharded state is lost, replicas are equal, a killed worker does not rejoin,
every wait ends, and more. Exits with 1 if an invariant is violated, and names the line of the journal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "journal",
        nargs="+",
        type=Path,
        metavar="JOURNAL",
        help="journal of a job, written by elasticrun --journal",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="size of the dataset; check that each sample is counted once per epoch",
    )


def main(options: argparse.Namespace) -> int:
    """Check the journals. Return 0 if all invariants hold, 1 if an invariant is violated or could not be checked.

    Raises:
        Invalid: ``--samples`` is less than 1, or a journal cannot be read.
    """
    if options.samples is not None and options.samples < 1:
        raise Invalid(
            f"--samples is {options.samples}: pass a number of at least 1, or omit --samples"
        )
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
                    f"{path}: no worker reported samples, so --samples can't be checked: omit --samples",
                    file=sys.stderr,
                )
                continue
            sharded = f", {found.shards_restored} sharded commits restored" * bool(
                found.shards_restored
            )
            print(
                f"{path}: all invariants hold; {found.worlds} worlds, {found.recoveries} recoveries,"
                f" {found.commits_compared} digests compared, {found.samples_counted} samples counted{sharded}"
            )
    return int(failed)


def broken_invariants(path: Path) -> list[str]:
    """Return a list with a sentence about the first broken invariant, or an empty list.

    Raises Invalid if the file is not a journal.
    """
    try:
        check_journal(path)
    except BrokenInvariant as error:
        return [str(error)]
    return []
