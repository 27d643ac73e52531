"""Broadcast and allgather of Python objects, under Horovod's module name."""

from elastic.api.broadcasting import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object"]
