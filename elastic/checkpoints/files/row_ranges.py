"""Byte ranges to read for the rows that a rank needs, and a check that a checkpoint contains all rows.

Pure: no I/O, no clock.

Rows are written by the ranks of one world and read by those of another, of any size. Each rank reads only its own rows.
Each checksum covers a piece of a fixed number of rows, so every read starts and ends at a boundary between pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elastic.checkpoints.files.manifest import RESTORE, StoredTensor, UnreadableCommit
from elastic.sharding.row_layout import Rows, overlap

PIECE = 4 << 20  # number of bytes per checksum
READ = 64 << 20  # number of bytes per read, buffered in memory in addition to the destination


class RowRead(NamedTuple):
    """Read operation of ``length`` bytes at ``offset``.

    The bytes contain ``rows``, and only ``wanted`` of these are needed.

    ``sum_before`` and ``sum_after`` are the CRC-32s of the stored range's data up to the start and up to the end of the
    bytes to read.
    """

    file: str
    offset: int
    length: int
    rows: Rows
    wanted: Rows
    sum_before: int
    sum_after: int


def rows_of_piece(row_bytes: int) -> int:
    """Return the number of rows, of ``row_bytes`` bytes each, that one checksum covers."""
    return max(1, PIECE // max(1, row_bytes))


def reads(stored: Sequence[StoredTensor], wanted: Rows, row_bytes: int) -> Iterator[RowRead]:
    """Yield the reads that provide the wanted rows of one tensor, in row order.

    Args:
        stored: the row ranges of this tensor in the checkpoint.
        wanted: range of rows to read. May be empty.
        row_bytes: size of one row in bytes.
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
    """Check that the ranges of each sharded tensor cover all its rows exactly once.

    Raises:
        UnreadableCommit: rows are missing or stored twice, or shapes or dtypes differ.
    """
    by_name: dict[tuple[str, str], list[StoredTensor]] = {}
    for each in tensors:
        if each.rows is not None:
            by_name.setdefault((each.part, each.key), []).append(each)
    for found in by_name.values():
        name, kinds = found[0].name, {(each.dtype, *each.shape) for each in found}
        if len(kinds) > 1:
            raise UnreadableCommit(
                f"the ranks wrote {name} with different shapes or dtypes",
                "Build the same model on every rank, or use another checkpoint",
            )
        at = 0
        for rows in sorted((each.rows for each in found if each.rows), key=lambda r: r.begin):
            pieces = -(-(rows.end - rows.begin) // rows.step) if rows.step > 0 else -1
            if rows.begin != at or rows.end <= rows.begin or len(rows.sums) != pieces:
                raise UnreadableCommit(
                    f"rows {at} to {rows.begin} of {name} are missing or stored twice", RESTORE
                )
            at = rows.end
        if at != found[0].shape[0]:
            raise UnreadableCommit(
                f"the commit contains only {at} of the {found[0].shape[0]} rows of {name}", RESTORE
            )
