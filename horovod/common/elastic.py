"""State for scripts that write their own, under Horovod's path."""

from __future__ import annotations

from elastic.state import ObjectState, State

__all__ = ["ObjectState", "State"]
