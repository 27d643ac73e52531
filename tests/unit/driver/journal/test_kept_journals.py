"""Journals that earlier versions wrote lead to the same decisions still: a job goes on with the driver that follows.

`data/format-1` has them as they were written, never anew: whole jobs, and in one file each many short ones, of the
tests of membership and of simulations, with every sentence that the driver of then could say. `snapshots` begin in the
middle of a job, and `digests` leave the actions out, as etcd and Ray have them.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from elastic.chaos.invariants.invariants import check_journal
from elastic.driver.journal.entries import (
    BEGINNING,
    SNAPSHOT,
    Entry,
    decoded,
    decoded_header,
    digest_of,
    encoded,
)
from elastic.driver.journal.journal import read, replay
from elastic.driver.journal.resume import past_of

FOLDER = Path(__file__).with_name("data") / "format-1"
FILES = sorted(FOLDER.iterdir())
JOBS = sorted(FOLDER.glob("*.jsonl"))


def journals_in(path: Path) -> list[bytes]:
    """One after the other, each begins with its header."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return [BEGINNING + rest for rest in data.split(BEGINNING)[1:]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_it_replays_to_the_same_actions(path, tmp_path):
    found = journals_in(path)
    for text in found:
        journal = tmp_path / "journal.jsonl"
        journal.write_bytes(text)
        assert len(replay(journal)) == len(read(journal)[1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_another_driver_goes_on_from_it(path):
    for text in journals_in(path):
        header, *lines = text.split(b"\n")[:-1]
        if b'"error":' not in lines[-1]:
            past = past_of(decoded_header(header), lines)
            assert past.replayed == sum(not line.startswith(SNAPSHOT) for line in lines)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_the_invariants_hold_in_it(path):
    assert check_journal(path, ended=False).worlds > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conversations", "digests", "snapshots"])
def test_one_journal_may_have_lines_of_both(name, tmp_path):
    """A newer driver has gone on with the job in the middle, and yet another goes on after it."""
    [path] = FOLDER.glob(f"{name}.*")
    for text in journals_in(path)[::3]:
        header, *lines = text.split(b"\n")[:-1]
        half = (len(lines) + 1) // 2
        past = past_of(decoded_header(header), lines[:half])
        later = [line for line in map(decoded, lines[half:]) if isinstance(line, Entry)]
        for entry in later:
            entry.actions = past.membership.handle(entry.event, entry.at)
            entry.digest = digest_of(entry.actions) if name == "digests" else None
            if name == "digests":
                entry.actions = []
        whole = [*lines[:half], *(encoded(entry).rstrip(b"\n") for entry in later)]
        assert past_of(decoded_header(header), whole).replayed == past.replayed + len(later)
        journal = tmp_path / "journal.jsonl"
        journal.write_bytes(b"\n".join([header, *whole, b""]))
        assert len(replay(journal)) == past.replayed + len(later)
