"""Broadcasts of variables and objects, under a path from which some scripts import them."""

from elastic.tensorflow.variables import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]
