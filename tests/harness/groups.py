"""Groups over a real store: connected as by a rank under test, and with all ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from elastic.collectives.groups.group_factory import ConnectingGroup, Store, listen
from elastic.collectives.interface import Work
from elastic.errors import CollectiveFailed, PeerLost

TIMEOUT_S = 20.0
CALLS_S = 30.0
Result = TypeVar("Result")


def at_once(function: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
    """Call like `map`, with a thread for each call. Raises the first exception that is not a lost peer."""
    calls = list(zip(*arguments, strict=True))
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        errors = [e for future in futures if (e := future.exception(CALLS_S)) is not None]
    if errors:
        own = (e for e in errors if not isinstance(e, CollectiveFailed | PeerLost))
        raise next(own, errors[0])
    return [future.result() for future in futures]


def wait_in_two_orders(works: Sequence[Work]) -> None:
    """Wait for all in two threads, one of them from the end."""

    def wait_for_all(mine: Sequence[Work]) -> None:
        for each in mine:
            each.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(wait_for_all, [works, works[::-1]], timeout=TIMEOUT_S))
    assert all(work.done() for work in works)


def connecting(
    store: Store,
    rank: int,
    size: int,
    purpose: str = "named",
    timeout_s: float = TIMEOUT_S,
    collective_timeout_s: float | None = None,
    device_type: str = "cpu",
    **more: Any,
) -> ConnectingGroup:
    return ConnectingGroup(
        store,
        purpose=purpose,
        rank=rank,
        size=size,
        device_type=device_type,
        bind_host="127.0.0.1",
        timeout_s=timeout_s,
        collective_timeout_s=collective_timeout_s,
        **more,
    )


class World:
    """One generation; `group` makes a group of all ranks for a purpose, over Gloo unless it is to be ``native``."""

    def __init__(self, size: int, generation: int = 1, native: bool = False) -> None:
        listener = listen("127.0.0.1")
        self.stores = [
            Store(
                listener.address,
                None if rank else listener,
                TIMEOUT_S,
                generation=generation,
                secret=b"secret",
            )
            for rank in range(size)
        ]
        self.stores[0].open()
        self.groups: list[Any] = []  # all that were made
        self._native = native

    def group(self, purpose: str = "named") -> list[Any]:
        made = self.on_all(lambda rank: self.connecting(rank, purpose).connect())
        self.groups += made
        return made

    def connecting(self, rank: int, purpose: str = "named", **more: Any) -> ConnectingGroup:
        store, size = self.stores[rank], len(self.stores)
        return connecting(store, rank, size, purpose, native=self._native, **more)

    def on_all(self, function: Callable[[int], Result]) -> list[Result]:
        return at_once(function, range(len(self.stores)))

    def close(self) -> None:
        for group in self.groups:
            group.abort()
        for group in self.groups:
            group.close()
        for store in self.stores:
            store.close()
