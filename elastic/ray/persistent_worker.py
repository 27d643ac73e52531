"""Program of a persistent worker: ``python -m elastic.ray.persistent_worker``.

The program executes requests until it receives END.

Calls arrive through a unix socket that only this user can access, served by the agent's actor. Once its world is
formed, the worker sends its rank in a line of JSON. From then on, it answers each frame with a frame, in order. A frame
consists of its length in four bytes, followed by the data. See `call_results`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from elastic.errors import Invalid
from elastic.ray.call_results import END, EXECUTE, MAKE, REGROUP, RUN, answered, failed

CALLS = "ELASTIC_CALLS"  # default: the socket `call_results` in the folder of the file ELASTIC_CALL
CALL = "ELASTIC_CALL"
LENGTH = struct.Struct("!I")


class CallWorld(Protocol):
    """Runtime of a persistent worker, as used by calls. `persistent_worker_world` implements it."""

    @property
    def rank(self) -> int: ...

    def call_off(self) -> None:
        """Make all blocking collectives raise an error. Thread-safe."""

    def regroup(self) -> None:
        """Form a new world with the other ranks."""

    def settle(self) -> None:
        """Wait until the driver has received this worker's reports, for a limited time."""


class Calls:
    """Connection through which calls arrive.

    The working thread calls `take`; another thread reads from the connection.
    """

    def __init__(self, connection: socket.socket, call_off: Callable[[], None]) -> None:
        """Start the thread that reads requests.

        Args:
            connection: connected socket.
            call_off: called in the reading thread when `REGROUP` arrives or the connection is closed.
        """
        self._socket = connection
        self._call_off = call_off
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def begin(self, hello: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(hello).encode() + b"\n")
        threading.Thread(target=self._read, name="elastic-calls", daemon=True).start()

    def take(self) -> bytes:
        """Return the next request, or `END` if the connection is closed."""
        return self._requests.get()

    def answer(self, answer: bytes) -> None:
        self._socket.sendall(LENGTH.pack(len(answer)))
        self._socket.sendall(answer)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while (head := self._exactly(LENGTH.size)) is not None:
                request = self._exactly(*LENGTH.unpack(head))
                if request is None:
                    break
                if request == REGROUP:
                    self._call_off()
                self._requests.put(request)
        # Cancel the current call: after the connection has closed, nothing else would release it from a collective.
        self._call_off()
        self._requests.put(END)

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return bytes(data)


class Serving:
    """Executor of a persistent worker's calls, which keeps the worker's instance between calls."""

    def __init__(self, world: CallWorld) -> None:
        self._world = world
        self._made: list[Any] = []  # the instance of ``executable_cls``, if one was created

    def answer(self, request: bytes) -> bytes:
        """Execute a request and return the answer.

        This method catches all exceptions of a function, including SystemExit.
        """
        try:
            try:
                answer = answered(self._perform(request))
            finally:
                _flush()
                self._world.settle()
        except BaseException as error:
            answer = failed(error, self._world.rank)
            del error  # Release the traceback's frames and the objects that they reference.
            gc.collect()
        return answer

    def _perform(self, request: bytes) -> Any:
        if request == REGROUP:
            return self._world.regroup()
        kind, parts = pickle.loads(request)
        if kind == MAKE:
            cls, args, kwargs = parts
            self._made = []  # Release the previous instance before the next one is created.
            self._made = [cls(*args, **kwargs)]
            return None
        if kind == RUN:
            function, args, kwargs = parts
            return function(*args, **kwargs)
        if kind == EXECUTE:
            (function,) = parts
            return function(*self._made)
        raise Invalid(
            f"a persistent worker received an unknown request {kind!r}: install the same release on all nodes"
        )


def serve(connection: socket.socket, world: CallWorld, hello: dict[str, Any]) -> None:
    """Execute calls until `END` arrives or the connection is closed."""
    calls = Calls(connection, world.call_off)
    calls.begin({"rank": world.rank, **hello})
    serving = Serving(world)
    while (request := calls.take()) != END:
        answer = serving.answer(request)
        del request
        with contextlib.suppress(OSError):  # If the caller has exited, `take` returns `END` next.
            calls.answer(answer)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def main() -> None:
    call = os.environ.get(CALL, "")
    path = os.environ.get(CALLS, "") or (call and os.path.join(os.path.dirname(call), "calls"))
    if not path:
        raise Invalid(f"{CALLS} is not set: start this program through elastic.ray.Executor")
    from elastic.ray.persistent_worker_world import join

    world = join()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    worker = world.env.worker
    with connection:
        serve(connection, world, {"slot": worker.slot, "worker": str(worker)})


if __name__ == "__main__":
    main()
