"""Buffer of timeline records that have not been sent yet. Times are passed in.

A record is a tuple ``(kind, row, name, at_ns, ns)``. Kinds are the letters of the trace format:

    X  a span of ``ns`` nanoseconds that began at ``at_ns``
    B  the beginning of a span that is still open
    E  the end of the innermost open span of its row
    i  an instant

A span becomes one X when it ends. Only a long span is recorded while it is open, as B and later E, so that the timeline
shows the last operation of a killed worker. The buffer never blocks and has a maximum size: if records arrive faster
than they are taken, new ones are dropped and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from elastic.protocol.messages import Trace

LIMIT = 100_000  # maximum number of buffered records, which take about 20 MB
LASTS_NS = 1_000_000_000  # age in nanoseconds at which an open span is recorded as a B


# An open span: name, begin, and whether it was recorded as a B. A list is created in less than half the time of an
# object.
_Open = list[Any]


class TraceBuffer:
    """Buffer of trace records. Any thread may add records, and one thread removes them."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.dropped = 0  # number of records dropped since the last `take_dropped`
        self._limit = limit
        self._records: list[Trace] = []
        self._open: dict[str, list[_Open]] = {}  # open spans by row, outermost first
        # Guards the open spans, because any thread may end a span or record it as a long one. Adding a record needs no
        # lock.
        self._spans = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    # ---- adding

    def add(self, record: Trace) -> None:
        if len(self._records) < self._limit:
            self._records.append(record)
        else:
            self.dropped += 1

    def extend(self, records: Iterable[Trace]) -> None:
        for record in records:
            self.add(record)

    def begin(self, row: str, name: str, at_ns: int) -> None:
        with self._spans:
            spans = self._open.get(row)
            if spans is None:
                spans = self._open[row] = []
            spans.append([name, at_ns, False])

    def end(self, row: str, at_ns: int) -> None:
        """End the innermost open span of the row, if any."""
        with self._spans:
            spans = self._open.get(row)
            if not spans:
                return
            span = spans.pop()
            if not spans:
                del self._open[row]  # Names that are never used again must not accumulate.
        self._close(row, span, at_ns)

    def end_all(self, at_ns: int) -> None:
        """End all open spans, because their world has ended."""
        with self._spans:
            opened, self._open = self._open, {}
        for row, spans in opened.items():
            for span in reversed(spans):
                self._close(row, span, at_ns)

    def _close(self, row: str, span: _Open, at_ns: int) -> None:
        name, began_ns, recorded = span
        if recorded:
            # Add the E record even if the buffer is full, because each B record needs one.
            self._records.append(("E", row, name, at_ns, 0))
        else:
            self.add(("X", row, name, began_ns, at_ns - began_ns))

    # ---- taking

    def report_open_spans(self, now_ns: int) -> None:
        """Record long spans that have not ended."""
        with self._spans:
            for row, spans in self._open.items():
                for span in spans:
                    name, at_ns, recorded = span
                    if recorded:
                        continue
                    if now_ns - at_ns < LASTS_NS or len(self._records) >= self._limit:
                        break  # Spans nested in this one are younger, so they are not long either.
                    span[2] = True
                    self._records.append(("B", row, name, at_ns, 0))

    def take(self, most: int) -> list[Trace]:
        """Remove and return up to ``most`` records, oldest first."""
        taken = self._records[:most]
        del self._records[: len(taken)]
        return taken

    def take_dropped(self) -> int:
        """Return the number of records dropped since the last call."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def clear(self) -> None:
        with self._spans:
            self._open = {}
        self._records.clear()
        self.dropped = 0
