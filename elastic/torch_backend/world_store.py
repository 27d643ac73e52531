"""Store of this package's process groups for torch.distributed: one of torch's stores per world.

torch uses it for barriers over the store, and scripts for their own keys. Rank 0 serves it on a separate port, which it
sends to the other ranks in a collective exchange. In an elastic job, this happens in each world once all ranks have
used the store. The next world has another, empty store. A worker that has not joined a world has a private store.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from elastic.collectives.groups.group_factory import listen
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime

_torch: Any = distributed  # torch's stubs lack the stores
_TorchStore: Any = _torch.Store
_KEY = "torch.distributed store"


class WorldStore(_TorchStore):  # type: ignore[misc]
    """Store that forwards every method to the current world's store."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._known: tuple[int, Any] | None = None  # (generation, store)
        self._limit = timedelta(seconds=1800)

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    def set(self, key: str, value: Any) -> None:
        self._present().set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._present().get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._present().add(key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._present().compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._present().check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._present().wait(keys, self._limit if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._present().delete_key(key))

    def num_keys(self) -> int:
        return int(self._present().num_keys())

    def append(self, key: str, value: Any) -> None:
        self._present().append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._present().multi_get(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._present().multi_set(keys, values)

    def meet(self) -> None:
        """Connect to the store together with all ranks.

        All ranks must call this method.

        Raises:
            CollectiveFailed: a rank was lost, in a job of fixed size.
            PeerLost: a rank was lost.
        """
        self._present()

    def _present(self) -> Any:
        rt = lifecycle.current()
        with self._lock:
            if self._known is None or self._known[0] != rt.generation:
                self._known = (rt.generation, self._made(rt))
            return self._known[1]

    def _made(self, rt: WorkerRuntime) -> Any:
        place, store = rt.place, rt.session.groups.store
        if rt.provisional or place.size == 1 or store is None:
            return _torch.HashStore()
        mine = b""
        listener = None
        if place.rank == 0:
            listener = listen(rt.env.bind_host)
            mine = f"{listener.address.host} {listener.address.port}".encode()
        with rt.guard("the store of torch.distributed"):
            limit_s = rt.env.collective_timeout_s
            addresses = store.exchange(_KEY, place.rank, place.size, mine, limit_s)
        host, _, port = addresses[0].decode().rpartition(" ")
        made: Any = _torch.TCPStore(
            host,
            int(port),
            is_master=listener is not None,
            timeout=self._limit,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.socket.detach(),
        )
        return made
