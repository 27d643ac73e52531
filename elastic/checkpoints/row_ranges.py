"""Which bytes of which files hold the rows that a rank needs, and whether a checkpoint holds all rows. Pure.

Rows are written by the ranks of one world and read by those of another: of any number, each reads only its own rows.
They are checked in pieces, so what is read for a range of rows begins and ends at pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elastic.checkpoints.manifest import NotReadable, StoredTensor
from elastic.sharding.rows import Rows, overlap

PIECE = 4 << 20  # bytes that have a checksum
READ = 64 << 20  # bytes of one read; it is held in memory besides the rows that it is for


class RowRead(NamedTuple):
    """``length`` bytes of a file from ``offset`` on, which hold ``rows``; of these, ``wanted`` are needed.

    ``sum_before`` and ``sum_after``: the CRC-32 of all bytes of the stored range before these, and with them.
    """

    file: str
    offset: int
    length: int
    rows: Rows
    wanted: Rows
    sum_before: int
    sum_after: int


def rows_of_piece(row_bytes: int) -> int:
    """The number of rows that have a checksum together."""
    return max(1, PIECE // max(1, row_bytes))


def reads(stored: Sequence[StoredTensor], wanted: Rows, row_bytes: int) -> Iterator[RowRead]:
    """What to read for some rows of one tensor, in the order of rows.

    Args:
        stored: all ranges of this tensor.
        wanted: may be empty.
        row_bytes: of one row.
    """
    ranges = [(each, each.rows) for each in stored if each.rows is not None]
    for each, rows in sorted(ranges, key=lambda found: found[1].begin):
        needed = overlap(wanted, Rows(rows.begin, rows.end))
        if not len(needed):
            continue
        first = (needed.begin - rows.begin) // rows.step
        last = -(-(needed.end - rows.begin) // rows.step)
        together = max(1, READ // max(1, rows.step * row_bytes))
        for piece in range(first, last, together):
            after = min(piece + together, last)
            begin = rows.begin + piece * rows.step
            part = Rows(begin, min(rows.begin + after * rows.step, rows.end))
            yield RowRead(
                each.file,
                rows.data + (begin - rows.begin) * row_bytes,
                len(part) * row_bytes,
                part,
                overlap(part, needed),
                rows.sums[piece - 1] if piece else 0,
                rows.sums[after - 1],
            )


def check_ranges(tensors: Sequence[StoredTensor]) -> None:
    """Whether the ranges of each sharded tensor are all of its rows, each once. Raises NotReadable."""
    by_name: dict[tuple[str, str], list[StoredTensor]] = {}
    for each in tensors:
        if each.rows is not None:
            by_name.setdefault((each.part, each.key), []).append(each)
    for found in by_name.values():
        name, kinds = found[0].name, {(each.dtype, *each.shape) for each in found}
        if len(kinds) > 1:
            raise NotReadable(f"its ranks have written {name} with other shapes or dtypes")
        at = 0
        for rows in sorted((each.rows for each in found if each.rows), key=lambda r: r.begin):
            pieces = -(-(rows.end - rows.begin) // rows.step) if rows.step > 0 else -1
            if rows.begin != at or rows.end <= rows.begin or len(rows.sums) != pieces:
                raise NotReadable(f"it does not have rows {at} to {rows.begin} of {name} once")
            at = rows.end
        if at != found[0].shape[0]:
            raise NotReadable(f"it has {at} of the {found[0].shape[0]} rows of {name}")
