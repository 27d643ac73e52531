"""Horovod's exceptions, for scripts that raise or catch them, and the two that this system raises where they do.

A script that only imports `elastic` sees ``PeerLost`` and ``WorldChanging``, which nobody catches by accident. A script
that imports Horovod's names has ``except HorovodInternalError:`` in it, to log, to clean up or to retry: there the same
two are raised as classes that are both. Pure. Importing this module changes nothing; the door calls `raise_as_horovod`.
"""

from __future__ import annotations

from typing import Any

from elastic import errors
from elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, PeerLost, WorldChanging


class HorovodPeerLost(PeerLost, HorovodInternalError):
    """``PeerLost``, as a script written for Horovod catches it. Caught and not raised again, it comes back at the next
    collective, step or commit.
    """


class HorovodWorldChanging(WorldChanging, HostsUpdatedInterrupt):
    """``WorldChanging``, as a script written for Horovod catches it.

    ``skip_sync`` is False: whether a worker started meanwhile lacks the state is only known when the next world stands.
    """

    def __init__(self, *args: Any) -> None:
        BaseException.__init__(self, *args)
        self.skip_sync = False

    def __reduce__(self) -> tuple[type[HorovodWorldChanging], tuple[Any, ...]]:
        return type(self), self.args


class HorovodVersionMismatchError(ImportError):
    """The library was built against another version of the framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"built with {name} {version}, but {name} {installed_version} is installed;"
            f" install {name} {version}, or rebuild"
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> tuple[type[HorovodVersionMismatchError], tuple[str, str, str]]:
        return type(self), (str(self.name), self.version, self.installed_version)


def raise_as_horovod() -> None:
    """From now on, in this process, a lost peer and a planned change are Horovod's exceptions too."""
    errors.raised_as[PeerLost] = HorovodPeerLost
    errors.raised_as[WorldChanging] = HorovodWorldChanging
