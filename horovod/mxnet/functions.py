"""Broadcasts of objects, at a path that some scripts import."""

from elastic.api.broadcasting import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object"]
