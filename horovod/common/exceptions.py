"""Horovod's exceptions, under the path that scripts import.

After this module is imported, `elastic` raises its interruptions as subclasses of these exceptions.
"""

from elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from elastic.horovod_errors import HorovodVersionMismatchError, raise_as_horovod

raise_as_horovod()

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
