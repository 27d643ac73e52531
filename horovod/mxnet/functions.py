"""Broadcasts of objects, under a path from which some scripts import them."""

from elastic.api.broadcasting import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object"]
