"""Files of the older segments of a journal. Performs I/O.

    job.journal                   current segment: the only file that a driver writes, and from which it resumes
    job.journal.segment-000001    older segments of the same job, for readers
    job.journal.segment-000002
    job.journal.segment-next      a new segment before it replaces the current one
    job.journal.1.segment-000001  older segments of an earlier job

Each segment begins with the header of the job, which contains the segment's number. A new segment is complete before it
is renamed to the journal's name, so that a driver or a machine may crash at any time. See `rotation` for the limits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from elastic.driver.journal.entries import BEGINNING, Header, decoded_header
from elastic.driver.journal.rotation import OlderSegment, SegmentLimits, surplus
from elastic.errors import Invalid

# errors of file systems without hard links
NO_LINKS = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_SUFFIX = re.compile(r"\.segment-(\d{6,}|next)")


def segment_path(path: Path, number: int) -> Path:
    """Return the path of an older segment of the journal ``path``."""
    return Path(f"{os.path.realpath(path)}.segment-{number:06d}")


def next_path(path: Path) -> Path:
    """Return the path of the journal's next segment before it replaces the current one."""
    return Path(f"{os.path.realpath(path)}.segment-next")


def journal_of_segment(path: Path) -> Path | None:
    """Return the journal whose older segment has this path, or None if the path is not that of a segment."""
    return path.with_suffix("") if _SUFFIX.fullmatch(path.suffix) else None


def older_segments(path: Path) -> dict[int, Path]:
    """Return the older segments next to a journal by number, in ascending order. Files of other kinds are ignored."""
    real = Path(os.path.realpath(path))
    found: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        for each in real.parent.iterdir():
            suffix = _SUFFIX.fullmatch(each.name[len(real.name) :])
            if not each.name.startswith(real.name) or suffix is None or suffix[1] == "next":
                continue
            if _is_journal(each):
                found[int(suffix[1])] = each
    return dict(sorted(found.items()))


def opened_older(path: Path, header: Header) -> list[BinaryIO]:
    """Open the older segments of a journal, oldest first. The files are positioned after their headers.

    Segments of another job and segments before a missing one are omitted. An open file remains readable when a driver
    deletes it.

    Args:
        path: the journal.
        header: its header, read from the file that the caller has opened. The driver may have begun a new segment
            since.
    """
    found: list[BinaryIO] = []
    for number in range(header.segment - 1, 0, -1):
        try:
            file = segment_path(path, number).open("rb")
        except OSError:
            break
        if not _continues(file, header, number):
            file.close()
            break
        found.append(file)
    return found[::-1]


def keep_segment(path: Path, number: int) -> None:
    """Give the current segment of a journal the name of an older segment as well.

    On file systems without hard links, the segment gets no second name, and is lost when the journal is replaced.

    Raises:
        OSError: the name cannot be created.
        Invalid: the name belongs to a file that is not a journal.
    """
    real, kept = os.path.realpath(path), segment_path(path, number)
    try:
        if os.path.lexists(kept) and not os.path.samefile(real, kept):
            _remove_own(kept)  # remains from an earlier job
        os.link(real, kept)
    except FileExistsError:
        return  # a driver was killed before it renamed the new segment
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise


def remove_unfinished(path: Path) -> None:
    """Remove a new segment that a killed driver has not completed.

    Raises:
        OSError: the file cannot be removed.
        Invalid: the file is not a journal.
    """
    if os.path.lexists(next_path(path)):
        _remove_own(next_path(path))


def move_older(path: Path, to: Path) -> None:
    """Move the older segments of a journal when the journal is renamed to ``to``, which must have none."""
    for number, each in older_segments(path).items():
        if each.samefile(path):
            each.unlink()  # a driver was killed before it renamed a new segment
        else:
            shutil.move(each, segment_path(to, number))


def remove_older(path: Path) -> None:
    """Delete the older segments of a journal."""
    for each in older_segments(path).values():
        each.unlink(missing_ok=True)


def prune(journals: Sequence[Path], limits: SegmentLimits) -> None:
    """Delete the older segments beyond the limits.

    Args:
        journals: the journal of the job, followed by those of earlier jobs, newest first.
    """
    found: dict[OlderSegment, Path] = {}
    for job, path in enumerate(journals):
        for number, each in older_segments(path).items():
            with contextlib.suppress(OSError):
                found[OlderSegment(job, number, each.stat().st_size)] = each
    for segment in surplus(found, limits):
        with contextlib.suppress(OSError):  # a file that remains is deleted after the next segment
            found[segment].unlink()


def has_journal(path: Path) -> bool:
    """Return whether the file contains a journal. Return False if it is empty.

    Raises:
        Invalid: the file contains other data.
        OSError: the file cannot be read.
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False
    if not regular:
        raise _no_journal(path)
    with open(path, "rb") as file:
        first = file.read(len(BEGINNING))
    check_beginning(path, first)
    return bool(first)


def check_beginning(path: Path, first: bytes) -> None:
    """Check that a file is a journal.

    Args:
        first: beginning of the file.

    Raises:
        Invalid: the file is not a journal.
    """
    if not first.startswith(BEGINNING[: len(first)]):
        raise _no_journal(path)


def _no_journal(path: Path) -> Invalid:
    return Invalid(
        f"{str(path)!r} is not a journal and would be overwritten: move the file, or pass another file"
    )


def _remove_own(path: Path) -> None:
    has_journal(path)
    path.unlink()


def _is_journal(path: Path) -> bool:
    try:
        return has_journal(path)
    except (OSError, Invalid):
        return False


def _continues(file: BinaryIO, header: Header, number: int) -> bool:
    """Return whether a file is the segment with this number of the job with this header. Reads the first line."""
    try:
        found = decoded_header(file.readline())
    except (OSError, UnicodeError, msgspec.MsgspecError):
        return False
    same_job = msgspec.structs.replace(found, journal=0, segment=0)
    return found.segment == number and same_job == msgspec.structs.replace(
        header, journal=0, segment=0
    )
