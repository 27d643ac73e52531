"""Horovod's exceptions, under the path that scripts import.

Importing this module selects Horovod's exception classes.
"""

from elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from elastic.horovod_errors import HorovodVersionMismatchError, raise_as_horovod

raise_as_horovod()

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
