"""Decides when a journal file continues in a new segment, and which older segments are deleted. Pure: no I/O, no clock.

Each segment after the first begins with a snapshot, so that a driver resumes from the newest segment alone. Older
segments are kept only for readers of the job's history.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# a segment that has grown to this multiple of its limit ends even if workers wait for the driver
OVERDUE = 2


@dataclass(frozen=True, kw_only=True)
class SegmentLimits:
    """Limits of the segments of a journal file.

    Args:
        least: size in bytes below which no new segment begins. Most jobs never reach it and have a single file.
        snapshots: size below which no new segment begins, as a multiple of the last snapshot. It bounds the part of the
            disk and of the driver's time that snapshots take.
        kept: maximum total size in bytes of all older segments, including those of earlier jobs. The newest older
            segment is always kept.
    """

    least: int = 64 << 20
    snapshots: int = 8
    kept: int = 512 << 20

    def reached(self, size: int, snapshot: int, *, overdue: bool = False) -> bool:
        """Return whether a segment is large enough to begin the next one.

        Args:
            size: size of the segment in bytes.
            snapshot: size of the last snapshot in bytes, or 0 if there was none.
            overdue: whether to return True only if the limit is exceeded by the factor OVERDUE.
        """
        limit = max(self.least, self.snapshots * snapshot)
        return size >= limit * (OVERDUE if overdue else 1)


class OlderSegment(NamedTuple):
    """Segment that is no longer written.

    Args:
        job: 0 for the job of the journal, N for the N-th earlier job, whose journal is ``FILE.N``.
        number: number of the segment in its job, from 1.
        size: size in bytes.
    """

    job: int
    number: int
    size: int


def surplus(segments: Iterable[OlderSegment], limits: SegmentLimits) -> list[OlderSegment]:
    """Return the segments to delete, newest first.

    The remaining segments are the newest ones, without gaps within a job.
    """
    newest_first = sorted(segments, key=lambda each: (each.job, -each.number))
    total = 0
    for index, each in enumerate(newest_first):
        total += each.size
        if index and total > limits.kept:
            return newest_first[index:]
    return []
