"""Horovod's exceptions, under Horovod's names and bases, for scripts that raise or catch them.

``elastic.run`` accepts the first two from user code; this system itself never raises them.
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed. Raised inside ``elastic.run``: restore the last commit and rejoin."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts have changed. Raised inside ``elastic.run``: rejoin with the state as it is.

    ``skip_sync``: kept because scripts set it; whether state is copied is decided from the commits, not from this.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


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
