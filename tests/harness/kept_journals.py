"""Recorded journals of real jobs: `make journals` records them again.

``python -m harness.kept_journals FOLDER`` keeps the smallest set of journals in FOLDER that contains every resulting
action of every event, and every kind of reason.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from elastic.driver.journal.entries import (
    Entry,
    Line,
    Snapshot,
    Writer,
    decoded,
    decoded_header,
    digest_of,
    encoded,
)
from elastic.driver.journal.journal import read, replay
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.reasons import Reason

# Of tests/integration/jobs/test_sharded.py, four workers of one host: 0 is killed in generation 2, and 2 later while
# it mirrors a commit.
SHARDED = Path(__file__).parents[1] / "unit" / "chaos" / "invariants" / "sharded.jsonl.xz"
KEPT = Path(__file__).parents[1] / "unit" / "driver" / "journal" / "kept"


def unpacked(kept: Path, folder: Path) -> Path:
    """Write the journal as a file in ``folder``."""
    file = folder / kept.stem
    file.write_bytes(lzma.decompress(kept.read_bytes()))
    return file


def lines_of(journal: Path) -> tuple[bytes, list[Line]]:
    """Return its header, and the other lines."""
    header, *lines = journal.read_bytes().split(b"\n")[:-1]
    return header, [decoded(line) for line in lines]


def without_actions(lines: Sequence[Line]) -> list[Line]:
    """Convert it as etcd and Ray store a journal: digests instead of actions."""
    return [
        Entry(line.at, line.event, digest=digest_of(line.actions), more=line.more)
        if isinstance(line, Entry) and not line.error
        else line
        for line in lines
    ]


def from_the_middle(header: bytes, lines: Sequence[Line]) -> list[Line]:
    """Replace the first half by a snapshot."""
    entries = [line for line in lines if isinstance(line, Entry)]
    half = len(entries) // 2
    membership = Membership(decoded_header(header).checked())
    for entry in entries[:half]:
        membership.handle(entry.event, entry.at, more=entry.more)
    at = entries[half - 1].at if half else 0.0
    return [Snapshot(msgspec.Raw(take_snapshot(membership)), at, Writer()), *entries[half:]]


def as_bytes(lines: Sequence[Line]) -> list[bytes]:
    """Without line ends."""
    return [encoded(line).rstrip(b"\n") for line in lines]


def written(journal: Path, header: bytes, lines: Sequence[Line]) -> Path:
    journal.write_bytes(b"\n".join([header, *as_bytes(lines), b""]))
    return journal


def shown_by(journal: Path) -> Iterator[tuple[str, str]]:
    """Return the cases that the journal covers: pairs of an event and an action, actions and reasons."""
    for entry in read(journal)[1]:
        event = type(entry.event).__name__
        yield event, ""
        for action in entry.actions:
            yield event, type(action).__name__
            if isinstance(reason := getattr(action, "reason", None), Reason):
                yield type(action).__name__, reason.kind.value


def fewest(found: dict[Path, set[tuple[str, str]]]) -> list[Path]:
    """Select greedily the journal with the most new cases, a short one before a long one."""
    kept: list[Path] = []
    missing = set().union(*found.values())
    while missing:
        best = max(found, key=lambda path: len(found[path] & missing) / path.stat().st_size ** 0.5)
        kept.append(best)
        missing -= found[best]
    return kept


def main(folder: Path) -> None:
    journals = {path: set(shown_by(path)) for path in sorted(folder.glob("*.jsonl"))}
    kept = fewest(journals)
    KEPT.mkdir(exist_ok=True)
    for old in KEPT.glob("*.xz"):
        old.unlink()
    for path in kept:
        replay(path)
        (KEPT / f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
    print(f"{len(kept)} of {len(journals)} journals are kept in {KEPT}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
