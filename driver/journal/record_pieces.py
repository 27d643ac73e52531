"""Record of a journal in a remote store, split into pieces within the size limit of the store.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

PIECE = 768 * 1024  # maximum size of a piece in bytes; etcd accepts 1.5 MiB per transaction


@dataclass(eq=False)
class PendingRecord:
    """Record that has not been written completely."""

    data: bytearray
    begins: bool = (
        False  # whether the record contains a snapshot, which invalidates all earlier records
    )
    begun: bool = False  # whether writing has begun, after which no line can be added
    written: int = 0  # number of pieces written so far

    @property
    def pieces(self) -> int:
        """Return the number of pieces of the record."""
        return -(-len(self.data) // PIECE)

    def takes(self, line: bytes) -> bool:
        """Return whether a line can be added to the record."""
        return not (self.begins or self.begun) and len(self.data) + len(line) <= PIECE

    def next_piece(self) -> bytes:
        """Return the next piece to write, without its head line."""
        start = self.written * PIECE
        return bytes(self.data[start : start + PIECE])
