"""Reads the journal of any job, however it ended, and whatever has become of the file. Acts.

What is no journal is refused with a sentence. All else is read as far as it goes: a last line that is cut off, lines in
the middle that are none, an older format, a file that is still being written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from elastic.driver.events import Action
from elastic.driver.journal.entries import (
    ABANDONED,
    READABLE,
    Entry,
    Header,
    Resumed,
    Snapshot,
    TroubleLine,
    decoded,
    decoded_header,
)
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import restored
from elastic.driver.monitoring.explain.findings import JournalState
from elastic.driver.monitoring.explain.story import Story
from elastic.driver.monitoring.explain.worker_rows import WorkerRows
from elastic.driver.settings import Settings
from elastic.errors import Invalid

LINE_LIMIT = 256 << 20  # bytes; a snapshot of 100,000 workers has some 50 MB
NO_JOURNAL = 100  # lines that are none, and not one that is: it is something else

Told = Callable[[Entry], None]


@dataclass
class JournalReading:
    """A journal, once it was read. ``offset``: added to its clock, seconds since 1970; None in old ones."""

    header: Header
    settings: Settings | None
    offset: float | None
    story: Story = field(default_factory=Story)
    rows: WorkerRows = field(default_factory=WorkerRows)
    source: JournalState = field(default_factory=JournalState)


def read_journal(path: Path, told: Told = lambda entry: None) -> JournalReading:
    """Reads it to its end; ``told`` hears of each entry in turn, with its actions. Raises Invalid."""
    with _opened(path) as file:
        runs = _is_written(file)
        return _read(path, file, runs, told)


def _opened(path: Path) -> BinaryIO:
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise Invalid(f"{str(path)!r} is a folder; give the file of --journal")
        return open(path, "rb")
    except OSError as error:
        hint = "; give the file of --journal" if error.errno == errno.ENOENT else ""
        raise Invalid(f"cannot read the journal {str(path)!r}: {error.strerror}{hint}") from error


def _is_written(file: BinaryIO) -> bool | None:
    """Whether a driver holds the lock on it. None: locks do not work here."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None


def _read(path: Path, file: BinaryIO, runs: bool | None, told: Told) -> JournalReading:
    header, settings = _header(path, file.readline(LINE_LIMIT))
    found = JournalReading(header, settings, _offset(header))
    replayed: Membership | None = None
    left_out = entries = 0
    torn = middle = False
    last_at = header.writer.at
    for number, text in _lines(file):
        if not text.endswith(b"\n"):
            torn = True
            break
        try:
            line = decoded(text)
        except (msgspec.MsgspecError, UnicodeError, TypeError, LookupError, ValueError):
            left_out += 1
            if left_out >= NO_JOURNAL and not entries:
                raise Invalid(f"{str(path)!r} is no journal: its lines are none") from None
            continue
        match line:
            case Entry():
                entries += 1
                last_at = line.at
                if line.digest is not None and settings is not None:
                    replayed = replayed or Membership(settings)
                    line.actions = _again(replayed, line)
                if line.error:
                    found.story.bug(line.error)
                found.story.note(line.event, line.actions, line.at)
                found.rows.note(line.event, line.actions, line.at)
                told(line)
            case Snapshot(data, at) if not entries and number == 2 and settings is not None:
                middle = True
                replayed = _restored(bytes(data), settings)
                if replayed is not None:
                    places = ((w, replayed.place_of(w)) for w in replayed.members)
                    members = [(w, place.rank) for w, place in places if place is not None]
                    found.story.adopt(members, replayed.generation, at)
                    found.rows.adopt(members, replayed.generation, at)
            case Resumed(writer):
                if writer.unix_s:
                    found.offset = writer.unix_s - writer.at
            case TroubleLine(reason, at):
                found.story.trouble(reason, max(at, last_at))
            case _:
                pass
    if found.story.end is not None:
        runs = False
    found.source = JournalState(
        settings,
        runs,
        abandoned=header.journal == ABANDONED,
        left_out=left_out,
        torn=torn,
        from_the_middle=middle,
    )
    return found


def _header(path: Path, line: bytes) -> tuple[Header, Settings | None]:
    if not line:
        raise Invalid(
            f"the journal {str(path)!r} is empty: its driver ended before it wrote a line"
        )
    try:
        header = decoded_header(line)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Invalid(f"{str(path)!r} is no journal of elasticrun: {error}") from error
    if header.journal not in (*READABLE, ABANDONED):
        raise Invalid(
            f"{str(path)!r} has format {header.journal}, which this version does not know; explain it with the version"
            " that wrote it"
        )
    try:
        return header, Settings(**header.settings)
    except (TypeError, Invalid):
        return header, None  # of another version: what happened can be told all the same


def _offset(header: Header) -> float | None:
    return header.writer.unix_s - header.writer.at if header.writer.unix_s else None


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 1
    while text := file.readline(LINE_LIMIT):
        number += 1
        yield number, text


def _again(membership: Membership, entry: Entry) -> list[Action]:
    """What was decided, where only a digest of it is kept."""
    try:
        return membership.handle(entry.event, entry.at)
    except (
        Exception
    ):  # a bug of that version, which the entry may tell, or lines that were left out before
        return []


def _restored(data: bytes, settings: Settings) -> Membership | None:
    try:
        return restored(data, settings)
    except Invalid:
        return None
