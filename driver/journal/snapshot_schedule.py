"""Decides when the next snapshot of a journal is due. Pure: no I/O, no clock.

A snapshot blocks the driver, and saves the next driver the replay of the entries before it. It is therefore due when
the entries since the last snapshot are many, and either as large as a snapshot or the record of a whole recovery. In a
job with many workers, all hosts report twice in a recovery, and the next driver thus replays at most one recovery.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.driver.events import ReportRecovery
from elastic.driver.journal.entries import Entry

SNAPSHOT_EVERY = 2000  # minimum number of entries between snapshots
# after FORCED * SNAPSHOT_EVERY entries, a snapshot is taken even if workers wait for the driver
FORCED = 8


@dataclass
class SnapshotSchedule:
    """Counters of the entries since the last snapshot.

    Args:
        every: minimum number of entries between snapshots.
        entries: number of entries since the last snapshot.
        size: size of these entries in bytes.
        recovered: whether a recovery or a planned change was completed since the last snapshot.
        snapshot_size: size of the last snapshot in bytes, or 0 if there was none.
    """

    every: int = SNAPSHOT_EVERY
    entries: int = 0
    size: int = 0
    recovered: bool = False
    snapshot_size: int = 0

    def count(self, entry: Entry, size: int) -> None:
        """Count an entry that takes ``size`` bytes of the journal."""
        self.entries += 1
        self.size += size
        if not self.recovered and entry.actions:
            self.recovered = any(isinstance(each, ReportRecovery) for each in entry.actions)

    def taken(self, size: int) -> None:
        """Restart the counters after a snapshot of ``size`` bytes."""
        self.entries = self.size = 0
        self.recovered = False
        self.snapshot_size = size

    def due(self) -> bool:
        """Return whether a snapshot should be taken as soon as no worker waits for the driver."""
        return self.entries >= self.every and (self.recovered or self.size >= self.snapshot_size)

    def overdue(self) -> bool:
        """Return whether a snapshot should be taken even if workers wait for the driver."""
        return self.entries >= FORCED * self.every and self.size >= FORCED * self.snapshot_size
