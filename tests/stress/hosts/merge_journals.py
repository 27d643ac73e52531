"""Merge the journals of successive drivers into one, as if they had shared a file.

With etcd each driver writes a copy to its own file, which begins with the state that it found. The previous driver's
copy may contain later entries, which it had not stored in etcd when it ended, and never acted upon. These are omitted;
the state shows where they begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic.driver.journal.entries import Entry, Resumed, Snapshot, encoded
from elastic.driver.journal.journal import recording
from elastic.driver.membership import snapshot
from elastic.driver.membership.membership import Membership
from elastic.errors import Invalid


def term_of(part: Path) -> int:
    """Return the term of the driver that began it; 0 if it is empty."""
    if not part.exists() or not part.stat().st_size:
        return 0
    return recording(part).header.writer.term


def join(parts: Sequence[Path], into: Path) -> None:
    """Merge journals, in the order of the drivers. Raises Invalid if one does not continue the previous one."""
    found = [recording(part) for part in parts]
    lines = [encoded(found[0].header)]
    for number, each in enumerate(found):
        later = found[number + 1] if number + 1 < len(found) else None
        entries = [entry for _, entry in each.entries]
        if each.start is not None:
            lines.append(encoded(Resumed(each.start.writer)))
            machine = snapshot.restore_snapshot(bytes(each.start.snapshot), each.settings)
        else:
            machine = Membership(each.settings)
        if later is not None:
            if later.start is None:
                raise Invalid(f"{parts[number + 1]} does not continue another journal")
            entries = entries[: _shared(machine, entries, later.start, parts[number + 1])]
        lines += [encoded(entry) for entry in entries]
    into.write_bytes(b"".join(lines))


def _shared(machine: Membership, entries: Sequence[Entry], start: Snapshot, path: Path) -> int:
    """Return the number of entries that lead to this state."""
    wanted = bytes(start.snapshot)
    shared = None
    for number, entry in enumerate([None, *entries]):
        if entry is not None:
            machine.handle(entry.event, now=entry.at, more=entry.more)
        if snapshot.take_snapshot(machine) == wanted:
            shared = number
    if shared is None:
        raise Invalid(f"{path} begins with a state that the previous journal never reached")
    return shared
