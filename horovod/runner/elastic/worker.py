"""Horovod's notifications of host changes.

They arrive over the worker's connection to the driver, so a worker runs no service for them.
"""

from __future__ import annotations

from typing import Any

from elastic.runtime import host_updates
from elastic.runtime.host_updates import HostUpdateListener, HostUpdateResult


class WorkerNotificationManager:
    """Registry of objects with ``on_hosts_updated(timestamp, update_res)``, shared by all managers of a process."""

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Do nothing, because ``hvd.init()`` has already connected to the driver.

        The arguments are those of Horovod.
        """

    def register_listener(self, listener: HostUpdateListener) -> None:
        host_updates.register(listener)

    def remove_listener(self, listener: HostUpdateListener) -> None:
        """Remove a listener. Unknown listeners are ignored."""
        host_updates.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Notify all listeners as if the driver had sent the update. ``timestamp`` is in seconds since 1970."""
        host_updates.notify(timestamp, update_res)


_ABSENT = {"WorkerNotificationService", "WorkerNotificationClient"}


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise AttributeError(
            f"hvd-elastic does not provide {name}, because workers are notified over their connection to the"
            " driver: register an object with on_hosts_updated() at WorkerNotificationManager instead"
        )
    raise AttributeError(
        f"module 'horovod.runner.elastic.worker' has no attribute {name!r}: see its source for the"
        " available names"
    )


__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
