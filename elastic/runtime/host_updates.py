"""Who is told when the hosts of the job are about to change: objects with ``on_hosts_updated(timestamp, update_res)``.

Every State under ``elastic.run`` is among them, and scripts may register their own. They are told when the list of
hosts changes, and again when the driver prepares a planned change, before anybody stops for it. Decides nothing: a
change is agreed by the driver, and a State that is not told stops at the same place. A lost worker is no such news:
that is a PeerLost.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, Protocol


class HostUpdateResult(enum.IntFlag):
    """What became of the hosts. What is told here is always ``mixed``: the worker learns that they change, not how."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostUpdateListener(Protocol):
    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None: ...


_lock = threading.Lock()
_listeners: list[HostUpdateListener] = []


def register(listener: HostUpdateListener) -> None:
    """Told from now on; once per change, however often it is registered. From any thread."""
    with _lock:
        if not any(each is listener for each in _listeners):
            _listeners.append(listener)


def remove(listener: HostUpdateListener) -> None:
    """Not told any more. One that was never registered is no error."""
    with _lock:
        _listeners[:] = [each for each in _listeners if each is not listener]


@contextlib.contextmanager
def told(listener: HostUpdateListener) -> Iterator[None]:
    """Registered as long as this lasts; if it was before, it stays so."""
    with _lock:
        before = any(each is listener for each in _listeners)
    register(listener)
    try:
        yield
    finally:
        if not before:
            remove(listener)


def tell(timestamp: float, result: HostUpdateResult) -> None:
    """``timestamp``: seconds since 1970. Called in the thread that listens to the driver: a listener should return at
    once. What it raises is shown, and the others are told nevertheless.
    """
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        try:
            listener.on_hosts_updated(timestamp, result)
        except Exception:
            print(
                f"elastic: {type(listener).__name__}.on_hosts_updated raised (ignored):\n{traceback.format_exc()}",
                file=sys.stderr,
            )


__all__ = ["HostUpdateListener", "HostUpdateResult", "register", "remove", "tell", "told"]
