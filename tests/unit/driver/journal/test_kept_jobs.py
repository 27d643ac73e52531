"""Journals that earlier versions have written, of jobs on one machine, on hosts, over etcd, under chaos: each is still
read, and its events still lead to the same actions. Folders in them were renamed.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from elastic.driver.events import Action, Event
from elastic.driver.journal import journal

KEPT = sorted((Path(__file__).parent / "kept").glob("*.jsonl.xz"))


def unpacked(kept: Path, folder: Path) -> Path:
    file = folder / kept.stem
    file.write_bytes(lzma.decompress(kept.read_bytes()))
    return file


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name.partition(".")[0])
def test_a_kept_journal_leads_to_the_same_actions(kept, tmp_path):
    assert journal.replay(unpacked(kept, tmp_path))


def test_together_they_hold_every_kind_of_event_and_action_but_one(tmp_path):
    told = set()
    for kept in KEPT:
        _, entries = journal.read(unpacked(kept, tmp_path))
        told |= {type(entry.event).__name__ for entry in entries}
        told |= {type(action).__name__ for entry in entries for action in entry.actions}
    known = {each.__name__ for each in (*Event.__subclasses__(), *Action.__subclasses__())}
    # The journals were kept before there were checkpoints, digests of them, notices, operators, lines of the script,
    # and hosts that are asked whether they are there.
    later = {
        "CheckpointMade",
        "WorkerDiffers",
        "ReplicasSpoilt",
        "WorkerLocated",
        "HostLeaving",
        "HostStaying",
        "HastenCheckpoint",
        "TellAwaited",
        "TellStandby",
        "WorkerSpent",
        "ScaleRequested",
        "DrainRequested",
        "RemoveRequested",
        "AnswerRequest",
        "GiveUpHost",
    }
    assert known - told <= {"TellWorld", *later}
