"""Broadcasts of objects, under the path that some scripts import them from."""

from elastic.api.broadcasting import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object"]
