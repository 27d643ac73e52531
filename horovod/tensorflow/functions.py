"""Broadcasts of variables and objects, at a path that some scripts import."""

from elastic.tensorflow.variables import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]
