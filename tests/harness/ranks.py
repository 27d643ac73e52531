"""Ranks under test as real processes that stay: each test sends them a function and gets every rank's result.

They are forked from a server that has already done their imports, which take seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal

import cloudpickle
import pytest

from elastic.driver.processes.preloaded_program import OURS
from elastic.protocol.messages import Address
from elastic.rendezvous.store import Store, listen
from harness.ports import free_port

START_S = 60.0
RUN_S = 60.0
STORE_S = 20.0

# objects that a test's functions leave in a rank's process for later ones
kept: dict[str, Any] = {}


def forks() -> multiprocessing.context.ForkServerContext:
    """One server per process of pytest; its imports are those of the first request."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*OURS, "pytest", "hypothesis"])
    return context


class Died(Exception):
    """The rank's process has ended."""


class Ranks:
    """``run(function, *arguments)`` calls ``function(rank, size, *arguments)`` on all ranks concurrently."""

    def __init__(self, size: int) -> None:
        context = forks()
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.poll(START_S), "a rank did not start"
            assert pipe.recv() == "started"

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's result. Raises AssertionError with the traceback of the first rank that raised."""
        self.start(function, *arguments)
        results = [self.result(rank) for rank in range(self.size)]
        for rank, result in enumerate(results):
            assert not isinstance(result, Exception), f"rank {rank}: {result}"
        return results

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        blob = _pickled(function, arguments)
        for pipe in self._pipes:
            pipe.send_bytes(blob)

    def result(self, rank: int, timeout_s: float = RUN_S) -> Any:
        """Return the result of one rank; an exception object if it raised or died."""
        pipe = self._pipes[rank]
        if not pipe.poll(timeout_s):
            return TimeoutError(f"no result within {timeout_s:g} s")
        try:
            return cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return Died(f"exit code {self._processes[rank].exitcode}")

    def kill(self) -> None:
        """Kill all. By handle: the pid of a rank that died in the test may be reused by now."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def in_a_world(size: int) -> Iterator[Ranks]:
    """Ranks that have formed a world of a fixed size."""
    return _entered(size, join)


def _entered(size: int, enter: Callable[..., Any] | None) -> Iterator[Ranks]:
    with contextlib.closing(Ranks(size)) as ranks:
        if enter is not None:
            ranks.run(enter, store_to_be())
        yield ranks


def fixture(
    size: int,
    scope: Literal["function", "module"] = "module",
    enter: Callable[..., Any] | None = None,
) -> Any:
    """Ranks for a module's tests, or for each test: in a world by ``enter``, or in none."""

    @pytest.fixture(scope=scope)
    def ranks() -> Iterator[Ranks]:
        yield from _entered(size, enter)

    return ranks


def store_to_be() -> Address:
    """Reserve an address for the store of rank 0 of a world."""
    return Address("127.0.0.1", free_port())


def on_all(
    test: Callable[[int, int], None], after: Callable[[int, int], None] | None = None
) -> Callable[[Ranks], None]:
    """Decorate a test whose body runs on every rank, with ``(rank, size)``; then ``after`` runs as another call."""

    def run(ranks: Ranks) -> None:
        ranks.run(test)
        if after is not None:
            ranks.run(after)

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def serve_stores(rank: int, size: int, count: int = 1) -> list[Address]:
    """For `Ranks.run`: rank 0 binds the stores of so many groups to come, and tells where. A port that is only chosen
    when it is needed may be taken by then.
    """
    kept["listeners"] = [listen("127.0.0.1") for _ in range(count)] if rank == 0 else []
    return [listener.address for listener in kept["listeners"]]


def open_store(
    rank: int, address: Address, generation: int = 0, timeout_s: float = STORE_S
) -> Store:
    """Return the next of the stores that rank 0 has bound, which is at this address. In a rank's process."""
    listener = kept["listeners"].pop(0) if rank == 0 else None
    store = Store(address, listener, timeout_s, generation=generation)
    store.open()
    return store


def _pickled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    if function.__module__ == __name__:
        return bytes(cloudpickle.dumps((function, arguments)))
    # By value, because the ranks can't import test modules by pytest's names.
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((function, arguments)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def join(rank: int, size: int, address: Any) -> None:
    from elastic.runtime import lifecycle

    lifecycle.init_static(rank, size, address)


def _serve(pipe: Connection, rank: int, size: int) -> None:
    from harness.scripts import light  # noqa: F401

    pipe.send("started")
    while True:
        try:
            blob = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = cloudpickle.loads(blob)
            result = function(rank, size, *arguments)
        except BaseException:
            result = RuntimeError(traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(result))
