"""Broadcast of variables and objects, and allgather of objects, under Horovod's module name."""

from elastic.tensorflow.broadcasting import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]
