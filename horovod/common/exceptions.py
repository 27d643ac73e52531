"""Horovod's exceptions, at the path that scripts import. The import selects Horovod's classes."""

from elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from elastic.horovod_errors import HorovodVersionMismatchError, raise_as_horovod

raise_as_horovod()

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
