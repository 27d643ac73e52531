"""The end of what each worker wrote to stderr, for the day that it dies. Decides nothing."""

from __future__ import annotations

from elastic.protocol.messages import Worker

TAIL_LIMIT = 20 * 1024  # bytes


class Tails:
    """Of all workers whose output passes here."""

    def __init__(self) -> None:
        self._tails: dict[Worker, bytearray] = {}

    def add(self, worker: Worker, data: bytes) -> None:
        tail = self._tails.setdefault(worker, bytearray())
        tail += data
        del tail[:-TAIL_LIMIT]

    def of(self, worker: Worker) -> str:
        return bytes(self._tails.get(worker, b"")).decode(errors="replace")

    def drop(self, worker: Worker) -> None:
        self._tails.pop(worker, None)
