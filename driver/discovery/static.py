"""A list that never changes: ``-H``, a hostfile, or plain ``-np``."""

from __future__ import annotations

from collections.abc import AsyncIterator


class StaticDiscovery:
    """Yields its list once."""

    def __init__(self, hosts: dict[str, int]) -> None:
        self._hosts = dict(hosts)

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        yield dict(self._hosts)
