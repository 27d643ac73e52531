"""Queue of a worker's reports to the driver, which keeps them until a driver is available. Pure: no I/O, no clock.

    add --> waiting, up to KEPT --Reported--> in flight, up to WINDOW_BYTES --ReportsTaken--> delivered
            the oldest is dropped             sent again after a change of the driver or connection

The reports in flight never exceed the system's socket buffers, so sending does not block even if the driver does not
read. A report gets its number when it is first sent. The driver accepts number n only after n - 1, or if ``oldest``
shows that an earlier driver has accepted n - 1. Reports are therefore delivered in order, exactly once, even if
messages are lost.
"""

from __future__ import annotations

from collections import deque

import msgspec

from elastic.protocol.messages import Place, Reported

KEPT = 1000  # maximum number of reports that wait to be sent
KEPT_BYTES = 16 * 1024 * 1024  # maximum total size in bytes of the reports that wait to be sent
WINDOW_BYTES = 128 * 1024
OVERHEAD_BYTES = 100  # approximate overhead of one message in bytes


class ReportQueue:
    """Queue of one worker's reports to the driver. Not thread-safe."""

    def __init__(self, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept, self._kept_bytes = kept, kept_bytes
        self._waiting: deque[Reported] = deque()  # reports that have no number yet
        self._waiting_bytes = 0
        self._under_way: deque[Reported] = deque()
        self._under_way_bytes = 0
        self._sent = 0  # number of unacknowledged reports that were sent on the current connection
        self._number = 0
        self._dropped = 0  # number of reports dropped since the last one that was sent

    def __len__(self) -> int:
        """Return the number of reports not yet delivered."""
        return len(self._waiting) + len(self._under_way)

    def add(self, generation: int, place: Place, at: float, metrics: bytes) -> None:
        report = Reported(0, 0, generation, place.rank, place.size, at, metrics)
        self._waiting.append(report)
        self._waiting_bytes += _size(report)
        while len(self._waiting) > self._kept or self._waiting_bytes > self._kept_bytes:
            self._waiting_bytes -= _size(self._waiting.popleft())
            self._dropped += 1

    @property
    def due(self) -> bool:
        """Return whether a report can be sent now."""
        if self._sent < len(self._under_way):
            return True
        if not self._waiting or not self._under_way:
            return bool(self._waiting)
        return self._under_way_bytes + _size(self._waiting[0]) <= WINDOW_BYTES

    def next(self) -> Reported | None:
        """Return the next report to send, or None. Call the method until it returns None."""
        if not self.due:
            return None
        if self._sent == len(self._under_way):
            self._number_first()
        report = self._under_way[self._sent]
        self._sent += 1
        return msgspec.structs.replace(report, oldest=self._under_way[0].number)

    def _number_first(self) -> None:
        report = self._waiting.popleft()
        self._waiting_bytes -= _size(report)
        self._under_way_bytes += _size(report)
        self._number += 1
        numbered = msgspec.structs.replace(report, number=self._number, dropped=self._dropped)
        self._under_way.append(numbered)
        self._dropped = 0

    def taken(self, number: int) -> None:
        """Remove all reports up to this number, which the driver has accepted."""
        while self._under_way and self._under_way[0].number <= number:
            self._under_way_bytes -= _size(self._under_way.popleft())
            self._sent = max(0, self._sent - 1)

    def resend(self) -> None:
        """Queue the reports in flight again, because they may have been lost with the previous connection."""
        self._sent = 0


def _size(report: Reported) -> int:
    return len(report.metrics) + OVERHEAD_BYTES
