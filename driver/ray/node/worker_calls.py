"""Server for calls to the persistent workers of one host. Makes no decisions and does not unpickle data.

A worker connects and sends one line of JSON, ``{"rank": 0, "slot": 0}``. Both sides then send frames, which consist of
the length in four bytes, big endian, and the data. The worker answers every call with one frame, in the order of the
calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import deque
from typing import Any

from elastic.driver.launch.agent_folder import PATH_LIMIT
from elastic.driver.network.blocking_calls import within
from elastic.errors import ElasticError

FRAME_LIMIT = 1 << 30  # maximum size of a frame, in bytes
LENGTH_BYTES = 4
HELLO_S = 30.0  # timeout for the first line of a new connection, in seconds


class CallFailed(ElasticError, RuntimeError):
    """Error raised when a worker is unavailable for a call or exits before it has answered.

    The message contains the rank.
    """


class _Caller:
    """Connection of one persistent worker.

    Args:
        waiting: futures of pending answers, in the order of the calls.
    """

    def __init__(self, rank: int, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self.writer = writer
        self.waiting: deque[asyncio.Future[bytes]] = deque()

    def lost(self, why: str) -> None:
        self.writer.transport.abort()
        for answer in self.waiting:
            if not answer.done():
                answer.set_exception(
                    CallFailed(f"the worker of rank {self.rank} has exited: {why}")
                )
        self.waiting.clear()


class WorkerCalls:
    """Server to which the persistent workers of one host connect, and through which they are called.

    Must be created in the event loop, and then opened with `open`. A new connection of a rank replaces the earlier one.
    """

    def __init__(self, path: str) -> None:
        if len(os.fsencode(path)) > PATH_LIMIT:
            raise OSError(f"{path} is too long for a Unix socket: set TMPDIR to a shorter path")
        self._path = path
        self._workers: dict[int, _Caller] = {}
        self._changed = asyncio.Condition()
        self._server: asyncio.AbstractServer | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Listen on the socket, which only this user can access.

        Raises:
            OSError: the socket cannot be bound.
        """
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        os.chmod(self._path, 0o600)

    async def present(self, count: int, within_s: float) -> list[int]:
        """Wait until ``count`` workers are connected, or until the time limit.

        Returns the ranks of the connected workers.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._await_count(count), within_s)
        return sorted(self._workers)

    async def call(self, rank: int, blob: bytes, timeout_s: float | None = None) -> bytes:
        """Call a worker, and return its pickled answer. Calls to the same worker run one at a time.

        A call that exceeds ``timeout_s`` seconds keeps running in the worker, and the next call waits until it has
        returned.

        Raises:
            CallFailed: the call is too large, no worker of this rank runs here, or the worker did not respond in time.
        """
        if len(blob) > FRAME_LIMIT:
            raise CallFailed(
                f"a call for rank {rank} has {len(blob)} bytes, but the limit is {FRAME_LIMIT}: load large data"
                " inside the function"
            )
        caller = self._workers.get(rank)
        if caller is None:
            raise CallFailed(
                f"no worker of rank {rank} runs on this host: call a rank of this host"
            )
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        caller.waiting.append(answer)
        caller.writer.write(len(blob).to_bytes(LENGTH_BYTES, "big") + blob)
        try:
            return await within(answer, timeout_s)
        except asyncio.TimeoutError:
            raise CallFailed(
                f"the worker of rank {rank} did not answer the call within {timeout_s:g} s: pass a longer timeout"
            ) from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        caller: _Caller | None = None
        why = "the worker disconnected"
        try:
            rank = _rank_of(await within(reader.readline(), HELLO_S))
            caller = _Caller(rank, writer)
            await self._seat(caller)
            while True:
                answer = await _frame(reader)
                if not caller.waiting:
                    raise ValueError(
                        "the worker sent a response without a pending call: use the same release on all"
                        " nodes"
                    )
                waiting = caller.waiting.popleft()
                if not waiting.done():
                    waiting.set_result(answer)
        except ValueError as error:
            why = str(error)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass
        except asyncio.CancelledError:
            why = "the host's agent is exiting"
        finally:
            self._serving.discard(task)
            writer.transport.abort()
            if caller is not None:
                caller.lost(why)
                if self._workers.get(caller.rank) is caller:
                    del self._workers[caller.rank]

    async def _seat(self, caller: _Caller) -> None:
        earlier = self._workers.get(caller.rank)
        if earlier is not None:
            earlier.lost("another process replaced the worker")
        self._workers[caller.rank] = caller
        async with self._changed:
            self._changed.notify_all()

    async def _await_count(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._workers) >= count)


def _rank_of(line: bytes) -> int:
    """Parse the rank in the first line that a worker sends.

    Raises:
        ValueError: the line contains no valid rank.
    """
    hello = json.loads(line)
    rank = hello.get("rank") if isinstance(hello, dict) else None
    if type(rank) is not int or rank < 0:
        raise ValueError(
            f"the worker's first line {line[:80]!r} contains no valid rank: start workers through"
            " elastic.ray.Executor"
        )
    return rank


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Read a frame.

    Raises:
        EOFError: the connection was closed.
        OSError: the connection failed.
        ValueError: the frame is longer than `FRAME_LIMIT`.
    """
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > FRAME_LIMIT:
        raise ValueError(
            f"the response of the worker has {length} bytes, but the limit is {FRAME_LIMIT}: return a smaller value,"
            " or write it to a file"
        )
    return await reader.readexactly(length)
