"""Makes groups: the only place that knows which backend serves which device.

`Connecting` exists before anything blocks, so that another thread can abort the making of a group, and later the group.
"""

from __future__ import annotations

from typing import Protocol

from elastic.collectives.interface import Collectives
from elastic.collectives.local import LocalCollectives
from elastic.collectives.store import Listener, Store, listen


def meeting(purpose: str, device_type: str, size: int) -> str:
    """The key under which the ranks of a group meet in the store while it is being formed."""
    return f"{purpose}/nccl/{size}" if device_type == "cuda" else f"{purpose}/{size}"


class Abortable(Protocol):
    """What the link thread can cut, and a forked child must let go of."""

    def abort(self) -> None: ...

    def forget(self) -> None: ...


class Connecting:
    """One group of one generation, from before it is connected to its end.

    ``purpose`` tells groups of one generation apart: equal on all its ranks, different from any other group's.
    ``rank`` and ``size`` count within the group. ``bind_host`` is the numeric address that peers connect to.
    ``timeout_s`` bounds the connecting, ``collective_timeout_s`` every single collective (by default the same).
    Raises ValueError for a device without a backend.
    """

    def __init__(
        self,
        store: Store,
        *,
        purpose: str,
        rank: int,
        size: int,
        device_type: str,
        bind_host: str,
        timeout_s: float,
        collective_timeout_s: float | None = None,
    ) -> None:
        self._store = store
        self._purpose = purpose
        self._bind_host = bind_host
        self._group = _group(rank, size, device_type, timeout_s, collective_timeout_s)

    def connect(self) -> Collectives:
        """Blocks until all ranks are connected. Raises CollectiveFailed if a rank is late or gone, or on `abort`."""
        connect = getattr(self._group, "connect", None)
        if connect is not None:
            connect(self._store, self._purpose, self._bind_host)
        return self._group

    def abort(self) -> None:
        """Ends the connecting, or the group if it is connected. Any thread, any number of times, never blocks."""
        self._group.abort()

    def forget(self) -> None:
        """In a forked child: holds none of the parent's sockets."""
        self._group.forget()


class _Group(Collectives, Abortable, Protocol):
    """What every backend gives: the seam, and the two calls that it shares with `Connecting`."""


def _group(
    rank: int, size: int, device_type: str, timeout_s: float, collective_timeout_s: float | None
) -> _Group:
    if size == 1:
        return LocalCollectives()
    # Imported here, because each needs its backend in torch's build.
    if device_type == "cpu":
        from elastic.collectives.gloo import GlooCollectives

        return GlooCollectives(rank, size, timeout_s, collective_timeout_s)
    if device_type == "cuda":
        from elastic.collectives.nccl import NcclCollectives

        return NcclCollectives(rank, size, timeout_s, collective_timeout_s)
    raise ValueError(
        f"there are no collectives for tensors on {device_type!r}; move them to cpu or cuda first"
    )


__all__ = ["Abortable", "Connecting", "Listener", "Store", "listen"]
