"""Exceptions for scripts written for Horovod: this package's interruptions as subclasses of Horovod's exceptions.

Pure: no I/O, no clock.

In a script that only imports `elastic`, interruptions are ``PeerLost`` and ``WorldChanging``. They derive from
BaseException, so ``except RuntimeError:`` does not catch them by accident. A script that imports Horovod's names may
contain ``except HorovodInternalError:``, to log, clean up or retry. For such scripts, the ``horovod`` package calls
`raise_as_horovod`: the interruptions that are raised are then subclasses of Horovod's exceptions. Importing this module
alone has no effect.
"""

from __future__ import annotations

from typing import Any

from elastic import errors
from elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, PeerLost, WorldChanging


class HorovodPeerLost(PeerLost, HorovodInternalError):
    """Subclass of ``PeerLost`` that ``except HorovodInternalError`` catches in scripts written for Horovod.

    If a handler of the script does not re-raise the exception, it is raised again at the next collective, step or
    commit.
    """


class HorovodWorldChanging(WorldChanging, HostsUpdatedInterrupt):
    """Subclass of ``WorldChanging`` that ``except HostsUpdatedInterrupt`` catches in scripts written for Horovod.

    ``skip_sync`` is False, because only the next world determines whether any worker lacks the state.
    """

    def __init__(self, *args: Any) -> None:
        BaseException.__init__(self, *args)
        self.skip_sync = False

    def __reduce__(self) -> tuple[type[HorovodWorldChanging], tuple[Any, ...]]:
        return type(self), self.args


class HorovodVersionMismatchError(ImportError):
    """Error that Horovod raises for a library built against another version of the framework."""

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
    """Make this process raise PeerLost and WorldChanging as subclasses of Horovod's exceptions from now on."""
    errors.raised_as[PeerLost] = HorovodPeerLost
    errors.raised_as[WorldChanging] = HorovodWorldChanging
