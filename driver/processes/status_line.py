"""Status line at the bottom of a terminal, below the scrolling output. Makes no decisions.

The status line is drawn after output that ends with a newline, and erased before the next output. After an incomplete
line, such as a progress bar, it is not drawn. Files and pipes get no status line.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rich.cells import set_cell_size

from elastic.driver.processes.console import Write

ERASE = b"\r\x1b[2K"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
WIDTH = 80  # width assumed if the terminal does not report one


class StatusLine:
    """Status line of one terminal. Thread-safe.

    Args:
        write: function that writes bytes to the terminal.
        columns: function that returns the width of the terminal, in characters.
    """

    def __init__(self, write: Write, columns: Callable[[], int]) -> None:
        self._write = write
        self._columns = columns
        self._line = b""
        self._drawn = False
        self._at_start = True  # whether the cursor is at the start of a line
        self._changing = threading.Lock()

    def write(self, data: bytes) -> None:
        """Write scrolling output. Must be used instead of the terminal's original write function."""
        with self._changing:
            self._at_start = data.endswith(b"\n")
            drawn, self._drawn = self._drawn, self._at_start and bool(self._line)
            line = self._line if self._drawn else b""
            self._write((ERASE if drawn else b"") + data + line)

    def show(self, data: bytes) -> None:
        """Set the text of the status line. An empty text removes the line."""
        with self._changing:
            text = data.decode(errors="replace").strip()
            self._line = self._fitted(text) if text else b""
            if self._at_start and (self._line or self._drawn):
                self._write((ERASE if self._drawn else b"") + self._line)
                self._drawn = bool(self._line)

    def _fitted(self, text: str) -> bytes:
        """Truncate the text to one row.

        The last column is left free, because the terminal would otherwise wrap the line.
        """
        plain = "".join(c if c.isprintable() else " " for c in text)
        return f"{DIM}{set_cell_size(plain, max(1, self._columns() - 1)).rstrip()}{PLAIN}".encode()


def columns_of(fd: int) -> int:
    """Return the current width of the terminal with this file descriptor."""
    try:
        return os.get_terminal_size(fd).columns or WIDTH
    except OSError:
        return WIDTH
