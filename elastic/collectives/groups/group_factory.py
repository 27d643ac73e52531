"""Creation of groups with the backend of a device. `cpu` selects how the ranks of a CPU group connect.

A `ConnectingGroup` exists before any blocking call, so that another thread can abort the creation of the group and,
later, the group itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import distributed

from elastic.collectives.interface import Collectives
from elastic.collectives.single_rank import LocalCollectives
from elastic.rendezvous.store import Store, StoreListener, listen

# device type that selects a group for point-to-point messages, a `Messenger`
MESSAGES = "messages"


def meeting(purpose: str, device_type: str, size: int) -> str:
    """Return the rendezvous store key under which the ranks of a group exchange data while it is created."""
    return f"{purpose}/nccl/{size}" if device_type == "cuda" else f"{purpose}/{size}"


def prepare(native: bool) -> None:
    """Import the modules and load the libraries that CPU groups need.

    Without this call, the first group would load them during its creation, while other ranks wait.
    """
    from elastic.collectives.groups import cpu  # noqa: F401
    from elastic.collectives.shared_memory import native_library

    if native:
        native_library.load()


def prepare_gpu(device: torch.device) -> None:
    """Import the modules and load the libraries that groups on this GPU need.

    Call this in a worker that already has tensors on the GPU.
    """
    if distributed.is_nccl_available():
        from elastic.collectives import nccl

        nccl.warm_up(device)


class Abortable(Protocol):
    """Interface of a resource that the link thread can abort, and that a forked child must release."""

    def abort(self) -> None: ...

    def close_in_forked_child(self) -> None: ...


class ConnectingGroup:
    """Group of one generation, which can be aborted before, while and after it is connected.

    Args:
        purpose: name of the group, unique within the generation and equal on all its ranks.
        rank: rank within the group.
        size: number of ranks of the group.
        bind_host: numeric address to which peers connect.
        timeout_s: timeout for connecting, in seconds.
        collective_timeout_s: timeout of each collective in seconds; defaults to ``timeout_s``.
        native: whether CPU ranks of one host may share memory.
        apart: see `cpu.CpuGroup`.
        agreed: see `cpu.CpuGroup`.

    Raises:
        ValueError: the device has no backend.
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
        native: bool = True,
        apart: bool = False,
        agreed: bool = False,
    ) -> None:
        self._store = store
        self._purpose = purpose
        self._bind_host = bind_host
        if collective_timeout_s is None:
            collective_timeout_s = timeout_s
        self.group, self._connect = _making(
            rank, size, device_type, timeout_s, collective_timeout_s, native, apart, agreed
        )

    def connect(self) -> Collectives:
        """Block until all ranks are connected.

        Raises:
            CollectiveFailed: a rank is late or lost, or `abort` was called.
        """
        return self._connect(self._store, self._purpose, self._bind_host)

    def abort(self) -> None:
        """Abort the connection attempt, or the connected group. Thread-safe and idempotent.

        This method never blocks.
        """
        self.group.abort()

    def close_in_forked_child(self) -> None:
        """Close the parent's sockets in a forked child."""
        self.group.close_in_forked_child()


_Connect = Callable[[Store, str, str], Collectives]


def _making(
    rank: int,
    size: int,
    device_type: str,
    timeout_s: float,
    collective_timeout_s: float,
    native: bool,
    apart: bool,
    agreed: bool,
) -> tuple[Abortable, _Connect]:
    if size == 1:
        alone = LocalCollectives()
        return alone, lambda store, purpose, bind_host: alone
    messages = device_type == MESSAGES
    if not messages:
        check_device(device_type)
    # Backends are imported on demand, because torch may be built without one of them.
    if messages or device_type == "cpu":
        from elastic.collectives.groups.cpu import CpuGroup

        chosen = CpuGroup(
            rank, size, timeout_s, collective_timeout_s, native, apart, messages, agreed
        )

        def connect_chosen(store: Store, purpose: str, bind_host: str) -> Collectives:
            return chosen.connect(store, f"{purpose}/messages" if messages else purpose, bind_host)

        return chosen, connect_chosen
    if device_type == "cuda":
        from elastic.collectives.nccl import NcclCollectives

        nccl = NcclCollectives(rank, size, timeout_s, collective_timeout_s)

        def connect(store: Store, purpose: str, bind_host: str) -> Collectives:
            nccl.connect(store, purpose, bind_host)
            return nccl

        return nccl, connect
    raise AssertionError(
        f"no backend supports the device type {device_type!r}: add a backend, or reject the type in check_device()"
    )


def check_device(device_type: str) -> None:
    """Raise ValueError if no backend supports the device."""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(
            f"collectives do not support tensors on {device_type!r}: move the tensors to cpu or cuda first"
        )


__all__ = ["Abortable", "ConnectingGroup", "Store", "StoreListener", "check_device", "listen"]
