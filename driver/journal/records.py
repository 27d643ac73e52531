"""A record of a journal that is kept in a store elsewhere, cut into pieces that the store takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PIECE = 768 * 1024  # bytes; etcd takes 1.5 MiB in one transaction


@dataclass(eq=False)
class PendingRecord:
    """Not written yet, or not to its end."""

    data: bytearray
    begins: bool = False  # with it, nothing before it counts any more
    begun: bool = False  # nothing can be added to it
    written: int = 0  # pieces

    @property
    def pieces(self) -> int:
        """How many it has."""
        return -(-len(self.data) // PIECE)

    def takes(self, line: bytes) -> bool:
        """Whether this can be added to it."""
        return not (self.begins or self.begun) and len(self.data) + len(line) <= PIECE

    def next_piece(self) -> bytes:
        """What is to be written now, without its head."""
        start = self.written * PIECE
        return bytes(self.data[start : start + PIECE])
