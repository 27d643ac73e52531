"""Broadcasts of variables and objects, under the path that some scripts import them from."""

from elastic.tensorflow.variables import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]
