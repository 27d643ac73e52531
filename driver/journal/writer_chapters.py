"""Search for the valid part of a journal in which each driver has written pieces of records in its own chapters.

Pure: no I/O, no clock.

The first record of a chapter either invalidates all earlier records, or names the record that it continues. The valid
records are found by following these references backwards from the end. This path contains neither incomplete records
nor records that a replaced driver wrote too late. See `elastic.driver.ray.journal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from elastic.driver.journal.record_pieces import PendingRecord


class Place(NamedTuple):
    """Position after a record: its chapter, and the number of the next piece."""

    chapter: str
    end: int


class Head(msgspec.Struct, omit_defaults=True):
    """First line of a piece: its number and the number of pieces in the record, and the record's predecessor."""

    piece: int
    of: int
    begins: bool = False  # whether all earlier records are invalid
    # end of the record that this record continues; set only in the first record of a chapter
    after: Place | None = None


_encode = msgspec.json.Encoder().encode
_heads = msgspec.json.Decoder(Head)


@dataclass(eq=False)
class SegmentedRecord(PendingRecord):
    """Record in which each piece begins with a `Head`.

    Args:
        after: end of the record that this record continues.
    """

    after: Place | None = None

    def piece(self) -> bytes | None:
        """Return the next piece with its head, or None if all pieces are written."""
        if self.written == self.pieces:
            return None
        head = Head(self.written + 1, self.pieces, self.begins, self.after)
        return _encode(head) + b"\n" + self.next_piece()


def chapter_name(turn: int, number: int, writer: str) -> str:
    """Return the name of a chapter. Names sort by the turn of the driver, then by the chapter's number."""
    return f"{turn:06d}-{number:06d}-{writer}"


def writer_of(chapter: str) -> tuple[int, str]:
    """Return a chapter's turn, and the ID of the driver that wrote it."""
    turn, _, writer = chapter.split("-")
    return int(turn), writer


def counting(chapters: Mapping[str, Mapping[int, bytes]]) -> tuple[list[bytes], Place | None]:
    """Return the valid records, and the end of the last record.

    The first of these records is the newest record that invalidates all earlier records.

    Args:
        chapters: the pieces of each chapter by number.

    Raises:
        ValueError: a piece is missing or invalid.
    """
    found = {
        Place(chapter, end): record
        for chapter, pieces in chapters.items()
        for end, record in _complete(pieces).items()
    }
    last = place = max(found, default=None)
    records: list[bytes] = []
    while place is not None:
        record = found.get(place)
        if record is None:
            raise ValueError(f"record {place.end - 1} of {place.chapter} is missing")
        records.append(record.data)
        if record.head.begins:
            break
        place = Place(place.chapter, record.first) if record.first else record.head.after
        if place is None:
            raise ValueError("the first record of the journal is missing")
    return records[::-1], last


@dataclass(frozen=True)
class _Found:
    head: Head  # head of the record's first piece
    first: int
    data: bytes


def _complete(pieces: Mapping[int, bytes]) -> dict[int, _Found]:
    found: dict[int, _Found] = {}
    parts = {number: data.partition(b"\n") for number, data in pieces.items()}
    heads = {number: _heads.decode(head) for number, (head, _, _) in parts.items()}
    for number, head in heads.items():
        first = number - head.piece + 1
        numbers = range(first, number + 1)
        if head.piece == head.of and all(each in parts for each in numbers):
            body = b"".join(parts[each][2] for each in numbers)
            found[number + 1] = _Found(heads[first], first, body)
    return found
