"""Accepted operator requests that the world does not satisfy yet. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection

from elastic.driver.events import DrainRequested, RemoveRequested, ScaleRequested
from elastic.protocol.messages import Worker

OperatorRequest = DrainRequested | RemoveRequested | ScaleRequested


def request_text(request: OperatorRequest) -> str:
    """Format a request as its command, for example ``scale 4`` or ``drain h7 --off``."""
    match request:
        case ScaleRequested(workers=workers):
            return f"scale {workers}"
        case DrainRequested(host=host, off=off):
            return f"drain {host}{' --off' if off else ''}"
        case RemoveRequested(worker=worker):
            return f"remove {worker}"


class PendingRequests:
    """Accepted requests of one job that are not satisfied yet. Times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._pending: list[tuple[float, OperatorRequest]] = []

    def accept(self, request: OperatorRequest, members: Collection[Worker], now: float) -> None:
        """Record a request, unless the world already satisfies it. Replaces an earlier request for the same object."""
        kept = [each for each in self._pending if _object(each[1]) != _object(request)]
        self._pending = kept if _is_met(request, members) else [*kept, (now, request)]

    def met(self, members: Collection[Worker], now: float) -> list[str]:
        """Remove the requests that a new world satisfies. Return a log line for each."""
        done = [each for each in self._pending if _is_met(each[1], members)]
        self._pending = [each for each in self._pending if each not in done]
        return [f"done after {now - at:.1f} s: {request_text(request)}" for at, request in done]


def _object(request: OperatorRequest) -> tuple[type, object]:
    match request:
        case ScaleRequested():
            return ScaleRequested, None
        case DrainRequested(host=host):
            return DrainRequested, host
        case RemoveRequested(worker=worker):
            return RemoveRequested, worker


def _is_met(request: OperatorRequest, members: Collection[Worker]) -> bool:
    match request:
        case ScaleRequested(workers=workers):
            return len(members) == workers
        case DrainRequested(host=host, off=off):
            return off or all(worker.host != host for worker in members)
        case RemoveRequested(worker=worker):
            return worker not in members
