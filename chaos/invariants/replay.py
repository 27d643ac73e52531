"""`python -m elastic.chaos replay JOURNAL`: repeat the decisions of a journal, and check it.

It prints the events of the job, and checks that they lead to the same actions again and that all invariants hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from elastic.chaos.invariants.invariants import BrokenInvariant, check_journal
from elastic.driver.events import EndJob
from elastic.driver.journal.journal import ReplayDiffers, recording, replay, story_of

DESCRIPTION = """\
Replay the events of a journal with a new driver, compare its decisions with the recorded ones, and check every
invariant. Exits with 1 if they differ or an invariant is violated."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "journal", type=Path, help="journal of a job (elasticrun --journal) or of a simulation"
    )
    parser.add_argument("--story", action="store_true", help="print all events and their actions")


def main(options: argparse.Namespace) -> int:
    """Replay a journal. Return 0 if the decisions agree and every invariant holds, otherwise 1.

    Raises Invalid if the file is not a journal.
    """
    found = recording(options.journal)
    entries = [entry for _, entry in found.entries]
    if options.story:
        for line in story_of(found):
            print(line)
    ended = any(isinstance(action, EndJob) for entry in entries for action in entry.actions)
    wrong = False
    try:
        print(
            f"the replay matches the journal: {len(replay(options.journal))} events led to the recorded actions"
        )
    except ReplayDiffers as error:
        wrong = True
        print(f"the replay differs: {error}", file=sys.stderr)
    if found.start is not None:
        print("the journal starts in the middle of a job, so invariants can't be checked")
        return int(wrong)
    try:
        summary = check_journal(options.journal, ended=ended)
        print(f"all invariants hold: {summary}")
    except BrokenInvariant as error:
        wrong = True
        print(f"invariant violated: {error}", file=sys.stderr)
    if found.takeovers:
        print(f"{len(found.takeovers) + 1} consecutive drivers wrote this journal")
    if not ended:
        print("the journal ends before the end of the job")
    return 1 if wrong else 0
