"""Collectives for TensorFlow with Horovod's names, signatures and defaults; `elastic.negotiation` implements them.

All functions take tensors, variables or values that can be converted to a tensor. They run eagerly and inside
``tf.function``, and have gradients. Reductions support (u)int8, int16, int32, int64, float16, bfloat16, float32 and
float64. Functions that only move data also support bool and complex dtypes. Shapes and dtypes must be the same on all
ranks, unless the description of a function states otherwise.

These arguments are common to all functions:

    name: identifies the call, so ranks may submit their calls in different orders. Calls without a name are matched by
        their order among the calls of the same collective.
    op: `Average` (default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
    average: deprecated; True is ``op=Average``, False is ``op=Sum``.
    prescale_factor, postscale_factor: the tensor is multiplied by them before and after the reduction; Average and Sum
        only.
    compression: `Compression.none`, `.fp16`, `.bf16`, or a class with the methods ``compress`` and ``decompress``.
    process_set: the ranks that call the function (default: all ranks of the world).
    device_dense, device_sparse, ignore_name_scope: ignored.

All functions raise the errors of torch's collectives (see `elastic.api.ops`). In eager mode, an error is also an
instance of TensorFlow's class: ``tf.errors.FailedPreconditionError`` for mismatched tensors,
``tf.errors.InvalidArgumentError`` for invalid arguments. In a ``tf.function`` or a session, an error is an instance of
TensorFlow's class only, with the same text; a lost rank raises ``tf.errors.UnknownError`` there. ``hvd.elastic.run``
recovers from a lost rank in both cases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch

from elastic.api.ops import Adasum, Average, Max, Min, Product, Sum, as_op
from elastic.collectives.interface import Op
from elastic.monitoring import moved_tensors
from elastic.negotiation import submission
from elastic.negotiation.process_set_table import Ranks
from elastic.negotiation.process_sets import (
    ProcessSet,
    global_process_set,
    process_set_by_id,
    resolve,
)
from elastic.optimizer import join as joining
from elastic.runtime import basics
from elastic.tensorflow import bridge, result_memory
from elastic.tensorflow.broadcasting import broadcast_variables
from elastic.tensorflow.compression import Compression
from elastic.tensorflow.graphs.packing import pack

Tensors = Sequence[tf.Tensor]
# Function that returns the participating ranks. It is called when a graph runs, because a graph outlives a world.
Members = Callable[[], "Ranks | None"]
_CPU = torch.device("cpu")


# ---- allreduce ---------------------------------------------------------------------------------


def allreduce(
    tensor: tf.Tensor | tf.IndexedSlices,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Reduce a tensor over all ranks. Differentiable.

    Args:
        tensor: tensor of any shape and a dtype that can be reduced; or ``tf.IndexedSlices``, which are gathered from
            all ranks. For IndexedSlices, ``op`` must be Sum or Average, which divides the values by the number of
            ranks.

    Returns:
        A new tensor of the same shape and dtype, or IndexedSlices.

    Raises:
        UnsupportedType, ValueError, TensorMismatch, PeerLost: see the description of this module.

    Example::

        loss = hvd.allreduce(loss)  # the mean over all ranks
    """
    if isinstance(tensor, tf.IndexedSlices):
        return reduce_slices(tensor, name, _members(process_set), as_op(op, average))
    factors = (prescale_factor, postscale_factor)
    members = _members(process_set)
    return reduce_dense([tensor], name, members, as_op(op, average), factors, compression)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce several tensors over all ranks in one call. Differentiable.

    Small tensors of one dtype share a buffer.

    Args:
        tensors: dense tensors of any shapes and of dtypes that can be reduced.
        average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor, process_set,
            ignore_name_scope, name: see the description of this module.

    Returns:
        A list of new tensors, in the same order.

    Raises:
        ValueError: a tensor is ``tf.IndexedSlices``.
        UnsupportedType, TensorMismatch, PeerLost: see the description of this module.
    """
    if not tensors:
        return []
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise ValueError(
            "grouped_allreduce does not support tf.IndexedSlices: call allreduce for each"
        )
    factors = (prescale_factor, postscale_factor)
    members = _members(process_set)
    return reduce_dense(tensors, name, members, as_op(op, average), factors, compression)


def reduce_dense(
    tensors: Tensors,
    name: str | None,
    members: Members,
    op: Op,
    factors: tuple[float, float],
    compression: Any,
) -> list[tf.Tensor]:
    """Reduce dense tensors like `grouped_allreduce`, but determine the ranks when the operation runs."""
    return _compressed(
        tensors, compression, lambda packed: _reduce(name, members, op, factors, packed)
    )


@bridge.as_written
def _reduce(
    name: str | None, members: Members, op: Op, factors: tuple[float, float], tensors: Tensors
) -> list[tf.Tensor]:
    name = bridge.named("allreduce", name)

    def compute(found: list[torch.Tensor]) -> bridge.InFlight:
        into, places = None, list(range(len(found)))
        if op is not Op.ADASUM and result_memory.pays(found):
            places, into = result_memory.made(found)
        handle = submission.start_allreduce(
            [found[place] for place in places],
            name,
            op,
            *factors,
            members=members(),
            into=into,
            soon=True,
        )

        def in_place(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            made = dict(zip(places, results, strict=True))
            return [made[place] for place in range(len(places))]

        return bridge.InFlight(handle, in_place)

    @tf.custom_gradient
    def reduction(*given: tf.Tensor) -> Any:
        carried, unpack = (list(given), list) if op is Op.ADASUM else pack(given)
        reduced = bridge.call(
            compute, carried, [tensor.shape for tensor in carried], name="allreduce"
        )

        def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
            return _of_floating(
                lambda floating: _reduce(_backward(name), members, op, factors, floating),
                gradients,
                given,
            )

        return unpack(reduced), backward

    return list(reduction(*tensors))


def reduce_slices(
    slices: tf.IndexedSlices, name: str | None, members: Members, op: Op
) -> tf.IndexedSlices:
    """Reduce IndexedSlices like `allreduce`, but determine the ranks when the operation runs.

    Raises NotImplementedError for operators other than Average and Sum.
    """
    if op not in (Op.AVERAGE, Op.SUM):
        raise NotImplementedError(
            f"tf.IndexedSlices can't be reduced with {op.name.title()}: use Average or Sum, or"
            " sparse_as_dense=True"
        )
    names = (None, None) if name is None else (f"{name}.values", f"{name}.indices")
    (values,) = _gather(names[0], members, [slices.values], sparse=True)
    (indices,) = _gather(names[1], members, [slices.indices])
    if op is Op.AVERAGE:
        values = values / tf.cast(size_of(members), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def size_of(members: Members) -> tf.Tensor:
    """Return the number of ranks in ``members`` as an int32 tensor that is computed each time the graph runs."""
    return bridge.asked(lambda: submission.group_size(_CPU, members()), "size")


# ---- allgather ---------------------------------------------------------------------------------


def allgather(
    tensor: tf.Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate all ranks' tensors along dimension 0, in rank order. Differentiable.

    Args:
        tensor: tensor of shape ``[rows, ...]``. ``rows`` may differ between ranks.

    Returns:
        A new tensor of shape ``[sum of all rows, ...]`` and the same dtype.
    """
    return grouped_allgather([tensor], name, process_set=process_set)[0]


def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather several tensors from all ranks in one call. Differentiable.

    Arguments and errors are those of `allgather`, with a list of tensors.

    Returns:
        A list with the result of `allgather` for each tensor.
    """
    return _gather(name, _members(process_set), [tf.convert_to_tensor(each) for each in tensors])


@bridge.as_written
def _gather(
    name: str | None, members: Members, tensors: Tensors, *, sparse: bool = False
) -> list[tf.Tensor]:
    """Gather tensors. The gradient is this rank's rows of the averaged gradient, as in Horovod.

    Args:
        sparse: whether the tensors belong to a sparse gradient.
    """
    name = bridge.named("allgather", name)

    def compute(found: list[torch.Tensor]) -> bridge.InFlight:
        if sparse:
            moved_tensors.took_elements(moved_tensors.SPARSE)
        return bridge.InFlight(
            submission.start_allgather(found, name, members=members(), soon=True),
            lambda made: [*made[0], torch.tensor(made[1], dtype=torch.int64, device="cpu")],
        )

    @tf.custom_gradient
    def gathering(*given: tf.Tensor) -> Any:
        shapes = [_any_rows(tensor) for tensor in given]
        shapes.append(tf.TensorShape([len(given)]))
        dtypes = [*(tensor.dtype for tensor in given), tf.int64]
        # For each result, the index of this rank's first row.
        *made, starts = bridge.call(compute, given, shapes, dtypes, "allgather")

        def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
            def rows(floating: Tensors) -> list[tf.Tensor]:
                averages = _average(_backward(name), members, floating)
                places = [number for number, each in enumerate(given) if _differentiable(each)]
                lengths = [tf.shape(given[place], tf.int64)[0] for place in places]
                return [
                    each[starts[place] : starts[place] + length]
                    for each, place, length in zip(averages, places, lengths, strict=True)
                ]

            return _of_floating(rows, gradients, given)

        return made, backward

    return list(gathering(*tensors))


# ---- broadcast ---------------------------------------------------------------------------------


def broadcast(
    tensor: tf.Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensor of rank ``root_rank`` on every rank. Differentiable.

    Args:
        tensor: tensor of the same shape and dtype on all ranks. Only the values on ``root_rank`` are used.
        root_rank: rank in the world, also if ``process_set`` is given.
        name, ignore_name_scope, process_set: see the description of this module.
    """
    return _broadcast(name, _members(process_set), root_rank, tf.convert_to_tensor(tensor))


def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Variable]:
    """Overwrite variables with those of rank ``root_rank``, and return the variables. Not differentiable.

    Args:
        variables: variables in the same order, and with the same shapes and dtypes, on every rank.
        root_rank: rank in the world, also if ``process_set`` is given.
        name: ignored.
        process_set: the ranks that call this function.
    """
    broadcast_variables(variables, root_rank, process_set)
    return list(variables)


@bridge.as_written
def _broadcast(name: str | None, members: Members, root: int, tensor: tf.Tensor) -> tf.Tensor:
    """Broadcast a tensor. The gradient is the averaged gradient on the root and zeros elsewhere, as in Horovod."""
    name = bridge.named("broadcast", name)

    def compute(found: list[torch.Tensor]) -> bridge.InFlight:
        handle = submission.start_broadcast(
            found[0], root, name, members=members(), in_place=False, soon=True
        )
        return bridge.InFlight(handle, lambda made: [made])

    @tf.custom_gradient
    def casting(given: tf.Tensor) -> Any:
        (made,) = bridge.call(compute, [given], [given.shape], name="broadcast")

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            (average,) = _average(_backward(name), members, [gradient])
            mine = bridge.asked(lambda: submission.is_root(root, _CPU, members()), "is_root")
            return tf.where(mine > 0, average, tf.zeros_like(average))

        return made, backward

    return casting(tensor)


# ---- alltoall ----------------------------------------------------------------------------------


def alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send ``splits[r]`` rows of the tensor to each rank r, and return the rows received. Differentiable.

    Args:
        tensor: tensor of shape ``[rows, ...]``.
        splits: an int32 vector with one number per rank; by default all ranks get the same number of rows.

    Returns:
        The received rows, in rank order; with ``splits`` also a vector with the number of rows from each rank.
    """
    tensor = tf.convert_to_tensor(tensor)
    if splits is None:
        return _exchange(name, _members(process_set), tensor, None)[0]
    given = tf.cast(tf.convert_to_tensor(splits), tf.int32)
    return _exchange(name, _members(process_set), tensor, given)


@bridge.as_written
def _exchange(
    name: str | None, members: Members, tensor: tf.Tensor, splits: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchange rows. The gradient of a row is sent back to the rank that sent the row."""
    name = bridge.named("alltoall", name)

    def compute(found: list[torch.Tensor]) -> bridge.InFlight:
        rows = found[1] if len(found) > 1 else None
        handle = submission.start_alltoall(found[0], rows, name, members=members(), soon=True)
        return bridge.InFlight(handle, lambda made: [made[0], made[1].to(torch.int32)])

    @tf.custom_gradient
    def exchange(given: tf.Tensor) -> Any:
        inputs = [given] if splits is None else [given, splits]
        shapes = [_any_rows(given), tf.TensorShape([None])]
        made, received = bridge.call(compute, inputs, shapes, [given.dtype, tf.int32], "alltoall")

        def backward(gradient: tf.Tensor, _: Any = None) -> tf.Tensor:
            returned, _sent = _exchange(_backward(name), members, gradient, received)
            missing = tf.shape(given)[0] - tf.shape(returned)[0]
            rest = tf.concat([[missing], tf.shape(returned)[1:]], 0)
            back = tf.concat([returned, tf.zeros(rest, returned.dtype)], 0)
            back.set_shape(given.shape)
            return back

        return (made, received), backward

    made, received = exchange(tensor)
    return made, received


# ---- reducescatter -----------------------------------------------------------------------------


def reducescatter(
    tensor: tf.Tensor,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over all ranks, and return this rank's share of the rows. Differentiable.

    Args:
        tensor: tensor of shape ``[rows, ...]`` and a dtype that can be reduced, the same on all ranks.
        op: Average or Sum.
        device_dense, compression, name, process_set, ignore_name_scope, prescale_factor, postscale_factor: see the
            description of this module.

    Returns:
        This rank's rows, with the dtype of ``tensor``. If the rows cannot be divided evenly, each of the first ranks
        receives one additional row.

    Raises:
        NotImplementedError: ``tensor`` is ``tf.IndexedSlices``.
        UnsupportedType, ValueError, TensorMismatch, PeerLost: see the description of this module.
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name,
    )[0]


def grouped_reducescatter(
    tensors: Tensors,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce and scatter several tensors in one call. Differentiable.

    Arguments and errors are those of `reducescatter`, with a list of tensors.

    Returns:
        A list with the result of `reducescatter` for each tensor.
    """
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("reducescatter does not support tf.IndexedSlices: use allreduce")
    reduction, factors = as_op(op, None), (prescale_factor, postscale_factor)
    return _compressed(
        tensors,
        compression,
        lambda packed: _scatter(name, _members(process_set), reduction, factors, packed),
    )


@bridge.as_written
def _scatter(
    name: str | None, members: Members, op: Op, factors: tuple[float, float], tensors: Tensors
) -> list[tf.Tensor]:
    """Reduce and scatter. As in Horovod, the gradient is an allgather, times the number of ranks for Sum."""
    name = bridge.named("reducescatter", name)

    def compute(found: list[torch.Tensor]) -> bridge.InFlight:
        handle = submission.start_reducescatter(
            found, name, op, *factors, members=members(), soon=True
        )
        return bridge.InFlight(handle)

    def gathered(found: list[torch.Tensor]) -> bridge.InFlight:
        size = submission.group_size(_CPU, members()) if op is Op.SUM else 1
        scaled = [each * (factors[0] * factors[1] * size) for each in found]
        handle = submission.start_allgather(scaled, _backward(name), members=members(), soon=True)
        return bridge.InFlight(handle, lambda made: list(made[0]))

    @tf.custom_gradient
    def scattering(*given: tf.Tensor) -> Any:
        made = bridge.call(
            compute, given, [_any_rows(each) for each in given], name="reducescatter"
        )

        def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
            floating = [each.shape for each in given if _differentiable(each)]
            return _of_floating(
                lambda chosen: bridge.call(gathered, chosen, floating, name="allgather"),
                gradients,
                given,
            )

        return made, backward

    return list(scattering(*tensors))


# ---- other operations --------------------------------------------------------------------------


def join() -> tf.Tensor:
    """Contribute zeros from this rank until all ranks have joined. See `elastic.optimizer.join.join`.

    Returns:
        The last rank to join, as an int32 tensor.
    """
    return bridge.asked(joining.join, "join", blocks=True)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks as an int32 tensor that is computed each time a graph runs.

    Args:
        process_set_id: ID of the process set. 0 is the whole world.
        name: name of the operation.
    """
    return bridge.asked(lambda: process_set_by_id(process_set_id).size() or 0, name or "size")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host as an int32 tensor that is computed each time a graph runs."""
    return bridge.asked(basics.local_size, name or "local_size")


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this worker's rank as an int32 tensor that is computed each time a graph runs."""
    return bridge.asked(basics.rank, name or "rank")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this worker's local rank as an int32 tensor that is computed each time a graph runs."""
    return bridge.asked(basics.local_rank, name or "local_rank")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor that is 1 if this rank belongs to the process set, and otherwise 0.

    Args:
        process_set_id, name: see `size_op`.
    """
    return bridge.asked(lambda: process_set_by_id(process_set_id).included(), name or "included")


# ---- helpers -----------------------------------------------------------------------------------


def _members(process_set: ProcessSet) -> Members:
    return functools.partial(resolve, process_set)


def _compressed(
    tensors: Tensors, compression: Any, compute: Callable[[Tensors], list[tf.Tensor]]
) -> list[tf.Tensor]:
    packed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    made = compute([tensor for tensor, _ in packed])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(made, packed, strict=True)
    ]


def _backward(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def _average(name: str | None, members: Members, gradients: Tensors) -> list[tf.Tensor]:
    parts = [
        tf.stack([tf.math.real(each), tf.math.imag(each)]) if each.dtype.is_complex else each
        for each in gradients
    ]
    averages = _reduce(name, members, Op.AVERAGE, (1.0, 1.0), parts)
    return [
        tf.complex(average[0], average[1]) if each.dtype.is_complex else average
        for average, each in zip(averages, gradients, strict=True)
    ]


def _any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    return tf.TensorShape([None]).concatenate(tensor.shape[1:]) if tensor.shape.rank else None


def _differentiable(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _of_floating(
    compute: Any, gradients: Sequence[tf.Tensor], given: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Apply ``compute`` to the gradients of floating-point and complex tensors.

    The choice depends only on dtypes, so it is the same on all ranks.
    """
    chosen = [_differentiable(tensor) for tensor in given]
    made = iter(
        compute([tf.convert_to_tensor(g) for g, use in zip(gradients, chosen, strict=True) if use])
        if any(chosen)
        else []
    )
    return [next(made) if use else None for use in chosen]


__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
