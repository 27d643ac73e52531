"""Broadcast of parameters, optimizer states and objects, under Horovod's module name."""

from __future__ import annotations

from elastic.api import broadcasting
from elastic.api.broadcasting import *  # noqa: F403

__all__: list[str] = []
__all__ += broadcasting.__all__
