"""Horovod's exceptions, under the path that scripts import them from."""

from __future__ import annotations

from elastic.horovod_errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
)

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
