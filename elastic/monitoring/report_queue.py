"""Decides which of a worker's reports are sent, and which are kept for a driver that has to come first. Pure.

    add --> waiting, KEPT of them --Reported--> under way, WINDOW_BYTES --ReportsTaken--> taken
              the oldest makes room              said again when there is another driver, or another connection to it

What is under way is never more than the system's buffers hold, so that nobody blocks who sends it, even if nobody
reads. A number is given when a report is sent first. The driver takes number n only if it has taken n - 1, or if
``oldest`` says that somebody has: so none is missing, none comes twice, and the order is kept, whatever was lost on the
way.
"""

from __future__ import annotations

from collections import deque

import msgspec

from elastic.protocol.messages import Place, Reported

KEPT = 1000  # reports that have not been sent
KEPT_BYTES = 16 * 1024 * 1024  # ... and not more than this
WINDOW_BYTES = 128 * 1024
OVERHEAD_BYTES = 100  # of a message, about


class ReportQueue:
    """One worker's. Its methods are not to be called at the same time."""

    def __init__(self, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept, self._kept_bytes = kept, kept_bytes
        self._waiting: deque[Reported] = deque()  # without a number yet
        self._waiting_bytes = 0
        self._under_way: deque[Reported] = deque()
        self._under_way_bytes = 0
        self._said = 0  # of those under way, on the present connection
        self._number = 0
        self._dropped = 0  # since the last that was sent

    def __len__(self) -> int:
        """Those that nobody has said to have taken."""
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
        """Whether there is anything to be sent now."""
        if self._said < len(self._under_way):
            return True
        if not self._waiting or not self._under_way:
            return bool(self._waiting)
        return self._under_way_bytes + _size(self._waiting[0]) <= WINDOW_BYTES

    def next(self) -> Reported | None:
        """What is to be sent now, if anything is; ask again then."""
        if not self.due:
            return None
        if self._said == len(self._under_way):
            self._number_first()
        report = self._under_way[self._said]
        self._said += 1
        return msgspec.structs.replace(report, oldest=self._under_way[0].number)

    def _number_first(self) -> None:
        """The first that waits is under way from here."""
        report = self._waiting.popleft()
        self._waiting_bytes -= _size(report)
        self._under_way_bytes += _size(report)
        self._number += 1
        numbered = msgspec.structs.replace(report, number=self._number, dropped=self._dropped)
        self._under_way.append(numbered)
        self._dropped = 0

    def taken(self, number: int) -> None:
        """The driver has all up to this one."""
        while self._under_way and self._under_way[0].number <= number:
            self._under_way_bytes -= _size(self._under_way.popleft())
            self._said = max(0, self._said - 1)

    def say_again(self) -> None:
        """What was said on the connection before may be lost."""
        self._said = 0


def _size(report: Reported) -> int:
    return len(report.metrics) + OVERHEAD_BYTES
