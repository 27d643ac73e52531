"""Collectives on pytrees of JAX arrays, for eager and compiled functions.

The leaves of a tree are JAX arrays, or arrays and numbers that ``jnp.asarray`` converts. All ranks pass trees of the
same structure, shapes and dtypes. Results are JAX arrays on the device of the leaves. On the CPU, leaves are not
copied.

In a function compiled by ``jax.jit``, collectives run in the order in which they were traced. Each transfers its leaves
to the host and back, so on a GPU call them outside of compiled functions. They can't run inside ``jax.vmap`` or a
function that ``jax.grad`` differentiates.

All functions raise TypeError for a leaf that is not an array or a number, `UnsupportedType` for a dtype that can't be
sent or reduced, `Invalid` in a context where JAX can't run a collective, `TensorMismatch` on every rank for mismatched
trees, `NotInitialized` before ``init()``, and `PeerLost` if a worker was lost, which ``elastic.run`` handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from elastic.api import broadcasting, ops
from elastic.api.compression import Compression
from elastic.collectives.interface import Op
from elastic.errors import Invalid, UnsupportedType
from elastic.jax import arrays, compiled
from elastic.negotiation.process_sets import ProcessSet, global_process_set


def allreduce(
    tree: Any,
    op: Op = Op.AVERAGE,
    *,
    name: str | None = None,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce all leaves of a tree over all ranks.

    Args:
        tree: tree of uint8, int8, int16, int32, int64, float16, bfloat16, float32 or float64 leaves.
        op: reduction operation of `elastic.jax`: Average, Sum, Min, Max, Product or Adasum.
        name, compression, prescale_factor, postscale_factor, process_set: see `elastic.allreduce`.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Raises:
        TypeError, UnsupportedType, Invalid, TensorMismatch, PeerLost: see the module docstring.

    Example::

        loss, gradients = value_and_grad(params, batch)
        gradients = elastic.jax.allreduce(gradients)
    """

    def compute(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return ops.grouped_allreduce(
            tensors,
            name=name,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    return _apply(compute, tree)


def broadcast(
    tree: Any, root_rank: int = 0, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcast the tree of rank ``root_rank`` to every rank, including PRNG keys.

    A `JaxState` broadcasts its trees itself. Call this function before the first step in scripts without a `JaxState`.

    Args:
        tree: tree of leaves of any dtype that torch has.
        root_rank: rank in the world, also if ``process_set`` is given.
        process_set: the ranks that call this function.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Raises:
        ValueError: structures, shapes or dtypes differ between ranks. Raised on every rank.
        TypeError, UnsupportedType, PeerLost: see the module docstring.
    """
    return _apply(
        lambda tensors: broadcasting.broadcast_copies(tensors, root_rank, process_set), tree
    )


def allgather(
    tree: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the leaves of all ranks along their first dimension, in rank order.

    Args:
        tree: tree of leaves of any dtype that torch has, with at least one dimension. The size of the first dimension
            may differ between ranks; all other sizes are equal.
        name, process_set: see `elastic.allgather`.

    Returns:
        A tree of the same structure.

    Raises:
        Invalid: called in a compiled function, where the shape of the result is unknown.
        TypeError, UnsupportedType, TensorMismatch, PeerLost: see the module docstring.
    """
    if any(map(arrays.is_traced, jax.tree.leaves(tree))):
        raise Invalid(
            "allgather can't run in a function that JAX compiles, because the shape of its result depends on"
            " the number of workers: call allgather outside, on the function's results"
        )

    def compute(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return ops.grouped_allgather(tensors, name=name, process_set=process_set)

    return _apply(compute, tree)


def _apply(compute: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], tree: Any) -> Any:
    """Return a tree in which the leaves are replaced by the results of ``compute``.

    In a compiled function, ``compute`` runs each time the function runs.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    given = list(map(_array, leaves))
    if any(map(arrays.is_traced, given)):
        if any(map(arrays.is_key, given)):
            raise UnsupportedType(
                "PRNG keys can't be sent from a compiled function: send the keys outside of it"
            )
        return jax.tree.unflatten(structure, compiled.call(compute, given))
    results = compute([arrays.view(each) for each in given])
    made = [
        arrays.array_like(result, each.sharding, weak=False, key=_key(each))
        for result, each in zip(results, given, strict=True)
    ]
    return jax.tree.unflatten(structure, made)


def _array(leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        if not arrays.is_traced(leaf):
            arrays.check_device(leaf, "an array")
        return leaf
    if isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        return jnp.asarray(leaf)
    raise TypeError(f"the tree contains a {type(leaf).__name__}: pass trees of arrays and numbers")


def _key(array: jax.Array) -> Any:
    return jax.random.key_impl(array) if arrays.is_key(array) else None
