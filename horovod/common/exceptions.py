"""Horovod's exceptions, under the path that scripts import them from. Who imports them means to catch them."""

from elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from elastic.horovod_errors import HorovodVersionMismatchError, raise_as_horovod

raise_as_horovod()

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
