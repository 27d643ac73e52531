"""optax optimizer that averages gradients over all workers."""

from __future__ import annotations

from typing import Any

from elastic.api.compression import Compression
from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.jax import collectives
from elastic.negotiation.process_sets import ProcessSet, global_process_set


def distributed_gradients(
    optimizer: Any,
    op: Op = Op.AVERAGE,
    *,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optax optimizer that reduces gradients over all ranks before ``optimizer`` uses them.

    Its state is that of ``optimizer``. ``update`` does not copy CPU gradients if it is called outside of compiled
    functions. In a function compiled by ``jax.jit``, it transfers gradients to the host and back. For the best speed
    compile the gradient and the update separately, and call `elastic.jax.allreduce` between them.

    Args:
        optimizer: an ``optax.GradientTransformation``. To clip by the norm of the averaged gradients, pass the chain
            that contains the clipping.
        op, compression, prescale_factor, postscale_factor, process_set: see `elastic.jax.allreduce`.

    Returns:
        An ``optax.GradientTransformationExtraArgs``.

    Raises:
        Invalid: ``optimizer`` is not an optax optimizer.

    Example::

        optimizer = elastic.jax.distributed_gradients(optax.adamw(1e-3))
        updates, opt_state = optimizer.update(gradients, opt_state, params)
    """
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise Invalid(
            f"optimizer is a {type(optimizer).__name__}: pass an optax optimizer, for example optax.adamw(1e-3)"
        )
    wrapped = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        reduced = collectives.allreduce(
            updates,
            op,
            compression=compression,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        found: tuple[Any, Any] = wrapped.update(reduced, state, params, **extra)
        return found

    return optax.GradientTransformationExtraArgs(wrapped.init, update)
