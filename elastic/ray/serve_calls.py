"""What a persistent worker runs: ``python -m elastic.ray.serve_calls``. One function after another, until told to end.

Calls come through a unix socket that only this user can reach; the agent's actor listens there. A line of JSON says
which rank this is, once its world stands; then each frame that comes is answered with one, in order. A frame is four
bytes with the length of what follows. See `calls`.
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
from elastic.ray.calls import END, EXECUTE, MAKE, REGROUP, RUN, answered, failed

CALLS = "ELASTIC_CALLS"  # by default the socket `calls` next to the file of ELASTIC_CALL
CALL = "ELASTIC_CALL"
LENGTH = struct.Struct("!I")


class CallWorld(Protocol):
    """The world of a worker, as far as it concerns calls. `served_world` has the real one."""

    @property
    def rank(self) -> int: ...

    def call_off(self) -> None:
        """From any thread: what blocks in a collective raises."""

    def regroup(self) -> None:
        """Meets the other ranks in a new world."""

    def settle(self) -> None:
        """Waits until the driver has what this worker has reported, within a bound."""


class Calls:
    """The connection. `take` is for the thread that works; another one reads."""

    def __init__(self, connection: socket.socket, call_off: Callable[[], None]) -> None:
        """``call_off`` is called in the reading thread, as soon as `REGROUP` comes or nobody is there any more."""
        self._socket = connection
        self._call_off = call_off
        self._words: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def begin(self, hello: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(hello).encode() + b"\n")
        threading.Thread(target=self._read, name="elastic-calls", daemon=True).start()

    def take(self) -> bytes:
        """The next word; `END` also where nobody is there any more."""
        return self._words.get()

    def answer(self, answer: bytes) -> None:
        self._socket.sendall(LENGTH.pack(len(answer)))
        self._socket.sendall(answer)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while (head := self._exactly(LENGTH.size)) is not None:
                word = self._exactly(*LENGTH.unpack(head))
                if word is None:
                    break
                if word == REGROUP:
                    self._call_off()
                self._words.put(word)
        # Nobody waits for the answer, and nobody would free this worker from a collective.
        self._call_off()
        self._words.put(END)

    def _exactly(self, size: int) -> bytes | None:
        """None at the end."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return bytes(data)


class Serving:
    """What this worker keeps between calls."""

    def __init__(self, world: CallWorld) -> None:
        self._world = world
        self._made: list[Any] = []  # the instance, if there is one

    def answer(self, word: bytes) -> bytes:
        """Does what the word asks for. Nothing that a function raises comes out of here, and neither does its exit."""
        try:
            try:
                answer = answered(self._perform(word))
            finally:
                _flush()
                self._world.settle()
        except BaseException as error:
            answer = failed(error, self._world.rank)
            del error  # with its frames, and all that they hold
            gc.collect()
        return answer

    def _perform(self, word: bytes) -> Any:
        if word == REGROUP:
            return self._world.regroup()
        kind, parts = pickle.loads(word)
        if kind == MAKE:
            cls, args, kwargs = parts
            self._made = []  # the one before goes first
            self._made = [cls(*args, **kwargs)]
            return None
        if kind == RUN:
            function, args, kwargs = parts
            return function(*args, **kwargs)
        if kind == EXECUTE:
            (function,) = parts
            return function(*self._made)
        raise Invalid(
            f"a persistent worker got an unknown request {kind!r}: is another release running there?"
        )


def serve(connection: socket.socket, world: CallWorld, hello: dict[str, Any]) -> None:
    """Until `END`, or until nobody is there any more."""
    calls = Calls(connection, world.call_off)
    calls.begin({"rank": world.rank, **hello})
    serving = Serving(world)
    while (word := calls.take()) != END:
        answer = serving.answer(word)
        del word
        with contextlib.suppress(OSError):  # whoever asked has gone, as the next word will say
            calls.answer(answer)


def _flush() -> None:
    """What a function has printed is there before its value."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def main() -> None:
    call = os.environ.get(CALL, "")
    path = os.environ.get(CALLS, "") or (call and os.path.join(os.path.dirname(call), "calls"))
    if not path:
        raise Invalid(
            f"{CALLS} is not set: this program is started by elastic.ray.Executor, for its workers"
        )
    from elastic.ray.served_world import join

    world = join()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    worker = world.env.worker
    with connection:
        serve(connection, world, {"slot": worker.slot, "worker": str(worker)})


if __name__ == "__main__":
    main()
