"""Format of timeline records as JSON for Perfetto and chrome://tracing. Pure: records in, text out.

The format is the JSON array of Google's "Trace Event Format". Each worker is shown as a process and each tensor as a
thread, so that nested phases are drawn inside each other. Times are microseconds since the timeline began.

Thread IDs are unique across processes and differ from process IDs: Perfetto merges threads with equal IDs, and treats a
thread whose ID equals its process's ID as the main thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from elastic.protocol.messages import Trace

# Maximum number of rows per process. Needed because a script may give every collective a different name.
ROWS_LIMIT = 10_000
LOST = "dropped records"  # name of the row that shows dropped records
OTHERS = "others"  # name of the row that shows all records after a process has ROWS_LIMIT rows
NAME_LIMIT = 200  # maximum number of characters of the name of a row or an event
FIRST_ROW = 1_000_001
KINDS = frozenset("XBEi")


class TraceFormat:
    """Formatter of the records in one timeline file.

    Args:
        start_ns: start of the timeline on the clock of all records, in nanoseconds.
        epoch_us: start of the timeline in microseconds since 1970.
    """

    def __init__(self, start_ns: int, epoch_us: int) -> None:
        self._start_ns = start_ns
        self._epoch_us = epoch_us
        self._processes: dict[str, int] = {}
        self._names: dict[str, str] = {}  # most recent name of each process
        self._rows: dict[tuple[int, str], int] = {}
        self._rows_of: dict[int, int] = {}  # number of rows of each process
        self._quoted: dict[str, str] = {}

    def opening(self) -> list[str]:
        """Return the first event, which contains the start of the timeline in microseconds since 1970.

        The event has the name that Horovod uses.
        """
        name = "start_time_since_epoch_in_micros"
        return [self._meta(name, 1, None, {name: self._epoch_us})]

    def process(self, key: str, name: str, order: int) -> list[str]:
        """Return the events that set a process's name and its position in the display."""
        if self._names.get(key) == name:
            return []
        self._names[key] = name
        pid = self._pid(key)
        return [
            self._meta("process_name", pid, None, {"name": name}),
            self._meta("process_sort_index", pid, None, {"sort_index": order}),
        ]

    def knows(self, key: str) -> bool:
        """Return whether this process has been named."""
        return key in self._names

    def records(self, key: str, records: Iterable[Trace], offset_ns: int = 0) -> list[str]:
        """Format the records of one process, in order.

        ``offset_ns`` is added to their times. Records of an unknown kind are skipped.
        """
        lines: list[str] = []
        since_ns = self._start_ns - offset_ns
        pid = self._pid(key)
        rows, quoted = self._rows, self._quoted
        for kind, row, name, at_ns, ns in records:
            tid = rows.get((pid, row)) or self._row(pid, row, lines)
            text = quoted.get(name) or self._quote(name)
            at_us = max(0, at_ns - since_ns) / 1e3
            if kind == "X":
                more = f',"dur":{max(0, ns) / 1e3:.3f}'
            elif kind == "i":
                more = ',"s":"t"'
            elif kind in KINDS:
                more = ""
            else:
                continue
            lines.append(
                f'{{"ph":"{kind}","name":{text},"pid":{pid},"tid":{tid},"ts":{at_us:.3f}{more}}}'
            )
        return lines

    def event(self, key: str, record: Trace, args: Mapping[str, Any]) -> list[str]:
        """Format one record. The details are shown when a user selects the event in a viewer."""
        *rows, line = self.records(key, [record])
        return [*rows, f'{line[:-1]},"args":{json.dumps(dict(args))}}}']

    def dropped(self, key: str, count: int, at_ns: int) -> list[str]:
        """Return an instant event that marks where records are missing."""
        record = ("i", LOST, f"{count} records dropped", at_ns, 0)
        return self.event(key, record, {"count": count})

    # ---- numbers and names

    def _pid(self, key: str) -> int:
        return self._processes.setdefault(key, len(self._processes) + 1)

    def _row(self, pid: int, row: str, lines: list[str]) -> int:
        count = self._rows_of.get(pid, 0)
        if count >= ROWS_LIMIT and row != OTHERS:
            return self._rows.get((pid, OTHERS)) or self._row(pid, OTHERS, lines)
        self._rows_of[pid] = count + 1
        tid = self._rows[pid, row] = FIRST_ROW + len(self._rows)
        lines.append(self._meta("thread_name", pid, tid, {"name": row[:NAME_LIMIT]}))
        lines.append(self._meta("thread_sort_index", pid, tid, {"sort_index": count}))
        return tid

    def _quote(self, name: str) -> str:
        if len(self._quoted) > ROWS_LIMIT:
            self._quoted.clear()
        text = self._quoted[name] = json.dumps(name[:NAME_LIMIT])
        return text

    def _meta(self, name: str, pid: int, tid: int | None, args: Mapping[str, Any]) -> str:
        of = {} if tid is None else {"tid": tid}
        return json.dumps(
            {"ph": "M", "name": name, "pid": pid, **of, "args": dict(args)}, separators=(",", ":")
        )
