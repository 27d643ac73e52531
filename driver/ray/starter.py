"""Starter of agents on the nodes of a Ray cluster. Each agent belongs to an actor on its node (see `agent_actor`).

Ray may take a long time, for example to call an actor on a node whose loss it has not detected, or to answer any call
while its head node is unavailable. The starter never waits for Ray in the event loop, and every wait has a time limit.
The bootstrap with the job's secret is sent in a call to the actor, never in its constructor, whose arguments Ray
stores.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from elastic.driver.launch.starter import Bootstrap, StartFailed
from elastic.driver.network.blocking_calls import begun, to_thread, within
from elastic.driver.output_interfaces import Log
from elastic.driver.ray.actors import Actors, RayActors, Taken
from elastic.driver.ray.node.worker_calls import CallFailed
from elastic.driver.ray.start_failures import another_release, exit_cause, why_no_actor
from elastic.version import __version__

NAME = "hvd-elastic-agent"
# time limit from the first call to Ray until the agent is ready, in seconds; starting Python is slow on a new node
START_S = 30.0
AT_ONCE = 32
CLOSE_S = 12.0  # seconds that an agent has for killing its workers and exiting
ASK_S = 10.0  # time limit for calls that return immediately, in seconds
KILL_S = 3.0
AGAIN_S = 0.05  # seconds before a retry if the actor's name is still taken
UNAVAILABLE_S = 1.0  # seconds before an unreachable actor is called again


def name_of(job: str, host: str) -> str:
    """Return the name of the actor that runs the agent of this host."""
    return f"{NAME}:{job}:{host}"


class _Held:
    def __init__(self, host: str, *, outlives: bool) -> None:
        self.host = host
        self.outlives = outlives
        self.actor: Any = None
        self.unwanted = False  # whether the actor must be killed as soon as it exists
        self.listening: asyncio.Task[None] | None = None
        self.ranks: list[int] = []  # ranks of its persistent workers, according to its last answer


class RayStarter:
    """Starter that starts agents through actors. Must be created in the event loop.

    Args:
        node_of: called with a host. Returns its node, or raises KeyError.
        call: pickled function of the workers.
        log: called with the level and the text of each log line.
        job: name of the job.
        detached: whether all agents outlive this driver, instead of only those whose bootstrap requests it.
        actors: operations on actors.
        start_s: time limit for a start, in seconds.
        close_s: time limit for stopping an agent, in seconds.
        at_once: maximum number of concurrent starts.
    """

    def __init__(
        self,
        node_of: Callable[[str], str],
        call: bytes,
        log: Log,
        *,
        job: str,
        detached: bool = False,
        actors: Actors | None = None,
        start_s: float = START_S,
        close_s: float = CLOSE_S,
        at_once: int = AT_ONCE,
    ) -> None:
        self._node_of = node_of
        self._call = call
        self._log = log
        self._job = job
        self._detached = detached
        self._actors = actors or RayActors()
        self._start_s = start_s
        self._close_s = close_s
        self._turns = asyncio.Semaphore(at_once)
        self._held: dict[str, _Held] = {}  # actors with ready agents, by host
        self._closed = False

    # ---- interface of a starter --------------------------------------------------------------------------------------

    async def start(self, bootstrap: Bootstrap) -> None:
        """Start the agent of a host.

        If an agent already runs there, it is stopped first, because its workers are orphaned.
        """
        host = bootstrap.host
        try:
            node = self._node_of(host)
        except KeyError:
            raise StartFailed(
                f"no agent was started on {host}, because its node has left the Ray cluster: see `ray list nodes`"
            ) from None
        async with self._turns:
            self._refuse_if_closed(host)
            self._forget(host)
            held = _Held(host, outlives=self._detached or bootstrap.outlives)
            try:
                await self._begin(held, node, bootstrap)
                self._refuse_if_closed(host)
            except BaseException:
                self._discard(held)
                raise
            self._keep(held)

    async def close(self) -> None:
        self._closed = True
        ending = [held for held in self._held.values() if not held.outlives]
        for host in [*self._held]:
            self._forget(host)
        await asyncio.gather(*(self._end(held.actor) for held in ending))

    # ---- only for agents in Ray --------------------------------------------------------------------------------------

    async def redirect(self, addresses: list[str]) -> None:
        """Send the addresses of this driver to the agents of the previous driver, within a time limit."""
        prefix = name_of(self._job, "")
        try:
            names = await to_thread(self._actors.names, within_s=self._start_s)
        except Exception as error:
            self._log("warning", f"the agents of this job can't be found: {_words(error)}")
            return
        found = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        await asyncio.gather(*(self._redirect(host, addresses) for host in found))

    async def present(self) -> int:
        """Return the number of persistent workers that are connected to their agents' actors."""

        async def ask(held: _Held) -> None:
            held.ranks = []
            with contextlib.suppress(Exception):
                held.ranks = await self._ask(held.actor, "present", within_s=ASK_S)

        await asyncio.gather(*(ask(held) for held in [*self._held.values()]))
        return len({rank for held in self._held.values() for rank in held.ranks})

    async def call(self, rank: int, blob: bytes, timeout_s: float | None = None) -> bytes:
        """Call the persistent worker of this rank, and return its pickled answer.

        Raises:
            CallFailed: no worker has this rank, the worker exited, or it did not answer within ``timeout_s`` seconds.
        """
        held = self._with(rank)
        if held is None:
            await self.present()
            held = self._with(rank)
        if held is None:
            raise CallFailed(
                f"no running worker has rank {rank}: pass a rank of the current workers"
            )
        try:
            answer: tuple[bytes, str] = await self._ask(
                held.actor, "call", rank, blob, timeout_s, within_s=None
            )
        except Exception as error:
            raise CallFailed(
                f"the worker of rank {rank} exited: {exit_cause(held.host, str(error))}"
            ) from None
        if answer[1]:
            raise CallFailed(answer[1])
        return answer[0]

    # ---- one start ---------------------------------------------------------------------------------------------------

    async def _begin(self, held: _Held, node: str, bootstrap: Bootstrap) -> None:
        host, loop = held.host, asyncio.get_running_loop()
        deadline = loop.time() + self._start_s

        def left() -> float:
            return max(0.0, deadline - loop.time())

        try:
            await self._make(held, node, left)
            release = await self._ask(held.actor, "hello", within_s=left())
            if release != __version__:
                raise StartFailed(another_release(host, release, __version__))
            config = msgspec.json.encode(bootstrap)
            ready_s = max(0.1, left() - 1.0)
            why = await self._ask(
                held.actor, "start", config, self._call, ready_s, within_s=left() + 1.0
            )
        except StartFailed:
            raise
        except Exception as error:
            kind, text = type(error).__name__, str(error)
            raise StartFailed(why_no_actor(host, node, kind, text, limit_s=self._start_s)) from None
        if why:
            raise StartFailed(why)

    async def _make(self, held: _Held, node: str, left: Callable[[], float]) -> None:
        name = name_of(self._job, held.host)

        def make() -> None:
            held.actor = self._actors.make(name, node, detached=held.outlives)
            if held.unwanted:
                self._actors.kill(held.actor)

        while True:
            try:
                await to_thread(make, within_s=left())
                return
            except Taken:
                earlier = await to_thread(self._actors.find, name, within_s=left())
            if earlier is not None:
                await self._end(earlier, within_s=left())
            await asyncio.sleep(min(AGAIN_S, left()))

    def _keep(self, held: _Held) -> None:
        self._held[held.host] = held
        held.listening = asyncio.create_task(self._listen(held))

    def _forget(self, host: str) -> None:
        held = self._held.pop(host, None)
        if held is not None and held.listening is not None:
            held.listening.cancel()

    def _discard(self, held: _Held) -> None:
        held.unwanted = True
        if held.actor is not None:
            begun(lambda: self._actors.kill(held.actor), "ray call")

    def _refuse_if_closed(self, host: str) -> None:
        if self._closed:
            raise StartFailed(f"no agent was started on {host}, because the job is ending")

    async def _end(self, actor: Any, within_s: float | None = None) -> None:
        limit_s = self._close_s if within_s is None else min(self._close_s, within_s)
        with contextlib.suppress(Exception):
            await self._ask(actor, "end", within_s=limit_s)
        with contextlib.suppress(Exception):
            await to_thread(self._actors.kill, actor, within_s=KILL_S)

    # ---- one actor ---------------------------------------------------------------------------------------------------

    async def _ask(self, actor: Any, method: str, *args: Any, within_s: float | None) -> Any:
        future = await to_thread(self._actors.ask, actor, method, *args, within_s=within_s)
        return await within(asyncio.wrap_future(future), within_s)

    async def _listen(self, held: _Held) -> None:
        number, ended = 0, None
        while ended is None:
            try:
                number, lines, ended = await self._ask(held.actor, "news", number, within_s=None)
            except Exception as error:
                # the node may become reachable again
                if type(error).__name__ == "ActorUnavailableError":
                    await asyncio.sleep(UNAVAILABLE_S)
                    continue
                lines, ended = [], ("warning", exit_cause(held.host, str(error)))
            for level, text in lines:
                self._log(level, f"the agent on {held.host}: {text}")
        self._log(*ended)
        if self._held.get(held.host) is held:
            del self._held[held.host]

    async def _redirect(self, host: str, addresses: list[str]) -> None:
        try:
            actor = await to_thread(
                self._actors.find, name_of(self._job, host), within_s=self._start_s
            )
            if actor is None:
                return
            await self._ask(actor, "redirect", addresses, within_s=ASK_S)
        except Exception as error:
            self._log(
                "warning",
                f"the agent on {host} could not be notified of the driver's address: {_words(error)}",
            )
            return
        if host not in self._held and not self._closed:
            held = _Held(host, outlives=True)
            held.actor = actor
            self._keep(held)

    def _with(self, rank: int) -> _Held | None:
        return next((held for held in self._held.values() if rank in held.ranks), None)


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
