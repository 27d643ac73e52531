"""Notification of listeners about changes of the job's hosts.

Each listener has the method ``on_hosts_updated(timestamp, update_res)``.

Every State under ``elastic.run`` is notified, and scripts may register their own objects. Listeners are notified when
the list of hosts changes, and again when the driver prepares a planned change, before any worker stops for it. A
notification has no effect on the change, which the driver coordinates: a State that was not notified stops at the same
safepoint. The loss of a worker is reported by PeerLost, not by notifications.
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
    """Kind of a change of the job's hosts, with Horovod's values.

    Notifications always have the kind ``mixed``, because the driver does not send the details of the change to workers.
    """

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostUpdateListener(Protocol):
    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None: ...


_lock = threading.Lock()
_listeners: list[HostUpdateListener] = []


def register(listener: HostUpdateListener) -> None:
    """Register a listener. Idempotent and thread-safe."""
    with _lock:
        if not any(each is listener for each in _listeners):
            _listeners.append(listener)


def remove(listener: HostUpdateListener) -> None:
    """Unregister a listener, if it is registered."""
    with _lock:
        _listeners[:] = [each for each in _listeners if each is not listener]


@contextlib.contextmanager
def registered(listener: HostUpdateListener) -> Iterator[None]:
    """Context manager that registers a listener. A listener that was registered before stays registered afterwards."""
    with _lock:
        before = any(each is listener for each in _listeners)
    register(listener)
    try:
        yield
    finally:
        if not before:
            remove(listener)


def notify(timestamp: float, result: HostUpdateResult) -> None:
    """Notify all listeners.

    This function runs in the thread that reads the driver's messages, so listeners should return immediately. If a
    listener raises an exception, it is printed, and the other listeners are still notified.

    Args:
        timestamp: time of the change in seconds since 1970.
        result: kind of change, as in `HostUpdateResult`.
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


__all__ = ["HostUpdateListener", "HostUpdateResult", "notify", "register", "registered", "remove"]
