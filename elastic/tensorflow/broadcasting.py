"""Broadcasts of TensorFlow variables and Python objects, and gathering of objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch

from elastic.api import broadcasting
from elastic.negotiation.process_sets import ProcessSet, global_process_set
from elastic.tensorflow import bridge


@bridge.as_written
def broadcast_variables(
    variables: Sequence[tf.Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Overwrite variables with the values of rank ``root_rank``. The values are sent packed.

    Args:
        variables: TensorFlow or Keras variables, in the same order and with the same shapes and dtypes on every rank.
        root_rank: rank in the world, also if ``process_set`` is given.
        process_set: see `elastic.api.ops`.
        inplace: ignored.

    Returns:
        In a graph, the operation that performs the broadcast; otherwise None.

    Raises:
        ValueError: shapes or dtypes differ between ranks. Raised on every rank, before any variable is changed.
        PeerLost: a worker was lost.
    """

    def compute(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return broadcasting.broadcast_copies(tensors, root_rank, process_set)

    values = [tf.convert_to_tensor(value) for value in variables]
    if not values:
        return None
    shapes = [value.shape for value in values]
    made = bridge.call(compute, values, shapes, name="broadcast", blocks=True)
    assigned = [variable.assign(value) for variable, value in zip(variables, made, strict=True)]
    return None if tf.executing_eagerly() else tf.group(*assigned)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return a TensorFlow 1 graph operation that broadcasts all global variables.

    Args:
        root_rank: rank in the world that sends its values.

    Raises:
        RuntimeError: called in eager mode, which has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "TensorFlow has no global variables in eager mode: pass the variables of the model and of the optimizer"
            " to broadcast_variables()"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Hook for ``MonitoredTrainingSession`` that broadcasts rank ``root_rank``'s variables once the session exists."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcast a Python object from one rank to all.

    Args:
        obj: any picklable object; ignored on ranks other than ``root_rank``.
        root_rank: rank in the world, also if ``process_set`` is given.
        session: ignored.
        name, process_set: see `elastic.api.ops`.

    Returns:
        ``obj`` itself on ``root_rank``, and a copy of it on all other ranks.

    Raises:
        PeerLost: a worker was lost.
    """
    return broadcasting.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that takes an object and broadcasts it like `broadcast_object`.

    Args:
        root_rank, session, name, process_set: arguments of `broadcast_object`.
    """
    return lambda obj: broadcasting.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather a Python object from each rank on every rank.

    Args:
        obj: any picklable object. Its size may differ between ranks.
        session: ignored.
        name, process_set: see `elastic.api.ops`.

    Returns:
        A list of copies, in rank order.

    Raises:
        PeerLost: a worker was lost.
    """
    return broadcasting.allgather_object(obj, name, process_set)
