"""Horovod's exceptions, under the path from which scripts import them. The import selects Horovod's classes."""

from elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from elastic.horovod_errors import HorovodVersionMismatchError, raise_as_horovod

raise_as_horovod()

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
