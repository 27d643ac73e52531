"""One line that stays at the bottom of a terminal while others scroll by above it. Decides nothing.

It is drawn after output that ends a line, and taken away before the next: what is written in between, such as a
progress bar that begins with a return, is left as it is. Only a terminal is written to in this way, no file or pipe.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rich.cells import set_cell_size

from elastic.driver.processes.console import Write

ERASE = b"\r\x1b[2K"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
WIDTH = 80  # where a terminal does not say


class StatusLine:
    """``write`` writes to a terminal that is ``columns()`` wide. Any thread may call."""

    def __init__(self, write: Write, columns: Callable[[], int]) -> None:
        self._write = write
        self._columns = columns
        self._line = b""
        self._drawn = False
        self._at_start = True  # of a line of the terminal
        self._changing = threading.Lock()

    def write(self, data: bytes) -> None:
        """What scrolls by. Stands in for the terminal's own."""
        with self._changing:
            self._at_start = data.endswith(b"\n")
            drawn, self._drawn = self._drawn, self._at_start and bool(self._line)
            line = self._line if self._drawn else b""
            self._write((ERASE if drawn else b"") + data + line)

    def show(self, data: bytes) -> None:
        """From here on the line is this text; blank: there is none."""
        with self._changing:
            text = data.decode(errors="replace").strip()
            self._line = self._fitted(text) if text else b""
            if self._at_start and (self._line or self._drawn):
                self._write((ERASE if self._drawn else b"") + self._line)
                self._drawn = bool(self._line)

    def _fitted(self, text: str) -> bytes:
        """One row: the last column stays free, or the terminal would begin another."""
        plain = "".join(c if c.isprintable() else " " for c in text)
        return f"{DIM}{set_cell_size(plain, max(1, self._columns() - 1)).rstrip()}{PLAIN}".encode()


def columns_of(fd: int) -> int:
    """Of the terminal behind a descriptor, now."""
    try:
        return os.get_terminal_size(fd).columns or WIDTH
    except OSError:
        return WIDTH
