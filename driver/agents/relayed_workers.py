"""Connections of all workers through their hosts' agents, with the interface of `Server`. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, Protocol, cast

from elastic.driver.agents.messages import Drop, Tell
from elastic.protocol.messages import Address, Message, Worker


class AgentConnections(Protocol):
    """The agents of all hosts: see `elastic.driver.agents.agent_manager.AgentManager`."""

    async def listen(
        self,
        interface: str,
        port: int,
        heard: Callable[[Worker, Any], None],
        gone: Callable[[Worker, bool], None],
    ) -> Address: ...

    def order(self, host: str, *messages: Any) -> bool: ...

    async def hang_up(self) -> None: ...


class RelayedWorkers:
    """The workers of all hosts."""

    def __init__(self, fleet: AgentConnections) -> None:
        self._fleet = fleet

    async def open(
        self,
        interface: str,
        port: int = 0,
        *,
        heard: Callable[[Worker, Any], None],
        gone: Callable[[Worker, bool], None],
        expected: Callable[[Worker], bool],
    ) -> Address:
        """Serve agents; see `Server.open`. The agents know which workers may connect, since they started them."""
        return await self._fleet.listen(interface, port, heard, gone)

    def send(self, worker: Worker, message: Message) -> bool:
        return self._fleet.order(worker.host, Tell([worker], cast(Any, message)))

    def send_each(self, messages: Iterable[tuple[Worker, Message]]) -> None:
        """Send messages; consecutive ones for the same host are sent together, without waiting for the rest."""
        for host, group in groupby(messages, key=lambda each: each[0].host):
            self._fleet.order(
                host, *(Tell([worker], cast(Any, message)) for worker, message in group)
            )

    def broadcast(self, workers: Iterable[Worker], message: Message) -> None:
        by_host: dict[str, list[Worker]] = {}
        for worker in workers:
            by_host.setdefault(worker.host, []).append(worker)
        for host, local in by_host.items():
            self._fleet.order(host, Tell(local, cast(Any, message)))

    def connected(self, worker: Worker) -> bool:
        """Return False: exits never wait for remaining messages here, since the agent has ordered them."""
        return False

    def drain(self, worker: Worker) -> None:
        """Do nothing; see `connected`."""

    def disconnect(self, worker: Worker) -> None:
        self._fleet.order(worker.host, Drop(worker))

    async def close(self) -> None:
        await self._fleet.hang_up()
