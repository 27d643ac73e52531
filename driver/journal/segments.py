"""Finds what counts in a journal that several drivers have written, each in chapters of its own, piece by piece. Pure.

A chapter begins with a record that begins a journal anew, or with one that says after which record of which chapter it
goes on. So what counts is found from the end. What was written too late by a driver that had been replaced is not on
this way, and neither is what a driver has not written to its end. See `elastic.driver.ray.journal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from elastic.driver.journal.records import PendingRecord


class Place(NamedTuple):
    """The end of a record: its chapter, and the number of the next piece there."""

    chapter: str
    end: int


class Head(msgspec.Struct, omit_defaults=True):
    """The first line of a piece."""

    piece: int
    of: int
    begins: bool = False  # nothing before it counts
    after: Place | None = None  # of the first record of a chapter that does not begin so


_encode = msgspec.json.Encoder().encode
_heads = msgspec.json.Decoder(Head)


@dataclass(eq=False)
class Piecewise(PendingRecord):
    """A record whose pieces have heads. ``after``: of one that goes on, where the journal does."""

    after: Place | None = None

    def piece(self) -> bytes | None:
        """The next one, with its head; None when all are written."""
        if self.written == self.pieces:
            return None
        head = Head(self.written + 1, self.pieces, self.begins, self.after)
        return _encode(head) + b"\n" + self.next_piece()


def chapter_name(turn: int, number: int, writer: str) -> str:
    """Names of chapters, sorted, are in the order of their turns."""
    return f"{turn:06d}-{number:06d}-{writer}"


def writer_of(chapter: str) -> tuple[int, str]:
    """Its turn, and its id."""
    turn, _, writer = chapter.split("-")
    return int(turn), writer


def counting(chapters: Mapping[str, Mapping[int, bytes]]) -> tuple[list[bytes], Place | None]:
    """The records from the last beginning on, and where the last ends. Takes the pieces of chapters by their numbers.

    Raises ValueError where one is missing, or is none.
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
            raise ValueError("its beginning is missing")
    return records[::-1], last


@dataclass(frozen=True)
class _Found:
    """A record that is there to its last piece."""

    head: Head  # of its first piece
    first: int
    data: bytes


def _complete(pieces: Mapping[int, bytes]) -> dict[int, _Found]:
    """The records of a chapter, by where they end."""
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
