"""`DistributedOptimizer`: wraps an optimizer so that gradients are averaged over all workers before each step.

This module checks the arguments and adds Horovod's methods. `elastic.optimizer.gradients.gradient_reducer` decides when
and how gradients are sent, and performs all communication.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elastic.api.compression import Compression
from elastic.collectives.algorithms import adasum
from elastic.collectives.dtensor import is_dtensor
from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.exact.shards import Shards
from elastic.negotiation.process_sets import ProcessSet, global_process_set, require_global, resolve
from elastic.optimizer import adasum_optimizer, wrapped_optimizer, zero1_optimizer
from elastic.optimizer.adasum_optimizer import AdasumDistributed, BackwardPasses
from elastic.optimizer.gradients import reduction_description
from elastic.optimizer.gradients.flat_buckets import Compressor
from elastic.optimizer.gradients.gradient_options import (
    Options,
    check_compression,
    check_predivide_factor,
)
from elastic.optimizer.gradients.gradient_reducer import GradientReducer
from elastic.optimizer.shard_sums.reducer import ShardReducer
from elastic.optimizer.wrapped_optimizer import UNNAMED, Reducer, WrappedOptimizer, check_passes
from elastic.optimizer.zero1_optimizer import DividedOptimizer
from elastic.runtime import lifecycle


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = global_process_set,
    shards: Shards | None = None,
    zero: int = 0,
) -> Any:
    """Wrap ``optimizer`` so that ``step()`` applies gradients reduced over all workers. Call ``init()`` first.

    The reduction is complete when the last backward pass of a step returns, so clip gradients after that. See
    docs/migration.md. With ``shards``, it is complete when the loop over the shards ends.

    All ranks pass the same parameters in the same order. The first step of a world checks this.

    Args:
        optimizer: a torch optimizer. Create schedulers after wrapping it.
        named_parameters: for example ``model.named_parameters()``. It must cover all parameters, with unique names.
        compression: `Compression.none`, ``fp16``, ``bf16``, or any object with ``compress(tensor) -> (tensor,
            context)`` and ``decompress(tensor, context) -> tensor``.
        backward_passes_per_step: number of backward passes whose gradients are summed locally (not averaged) before a
            reduction.
        op: Average, Sum, Min, Max, Product or Adasum. With Adasum, each rank steps with its own gradients and the steps
            are combined: see `elastic.optimizer.adasum_optimizer`. Adasum requires 1, 2, 4, 8, ... ranks, and ignores
            ``groups``.
        gradient_predivide_factor: factor f. Average divides by f before the sum and by ``size / f`` after it.
        num_groups: deprecated form of ``groups``, as in Horovod.
        groups: number of groups to split the parameters into, or lists of parameters. The gradients of a group are
            reduced together, in one buffer per dtype. Parameters outside all groups are grouped by size.
        sparse_as_dense: if True, sparse gradients (of embeddings) are reduced as dense tensors and converted back.
            Otherwise, indices and values are gathered.
        process_set: ranks that average among themselves. Other ranks step with their local gradients, as without the
            wrapper.
        shards: an `elastic.exact.shards.Shards`, which divides the global batch into the same number of micro-batches
            in any world. Gradients are the mean over the shards, or with Sum their sum. ``backward_passes_per_step``
            then counts the passes of one shard, and ``compression`` rounds each shard's gradient and each partial sum.
        zero: 1 divides the optimizer state among the ranks (ZeRO-1): each rank steps its elements of every parameter
            and receives the other elements from the other ranks. Requires a torch optimizer that updates each element
            independently, and in an elastic job a `TorchState` with the optimizer: see docs/sharded.md.

    Returns:
        An instance of a subclass of ``optimizer``'s class with the same name. It shares ``param_groups``, ``state`` and
        ``defaults``, so learning rate schedulers, ``state_dict`` and ``GradScaler`` work as with ``optimizer``. The
        subclass adds the methods of `WrappedOptimizer`.

    Raises:
        Invalid: (a ValueError) an argument is invalid.
        StateMismatch: parameters differ between ranks. Raised by the first step of a world.
        NotInitialized: ``init()`` was not called.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = elastic.DistributedOptimizer(optimizer, model.named_parameters())
        loss(model(inputs), targets).backward()  # gradients are averaged when it returns
        optimizer.step()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Invalid(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer: pass a torch optimizer"
        )
    if isinstance(optimizer, WrappedOptimizer):
        raise Invalid(
            "this optimizer is already a DistributedOptimizer: wrap an optimizer only once"
        )
    process_set = process_set or global_process_set
    reduction = _checked_op(op)
    _check_process_set(process_set, reduction)
    check_passes(backward_passes_per_step)
    check_compression(compression)
    check_predivide_factor(gradient_predivide_factor, reduction)
    if num_groups:
        warnings.warn(
            "DistributedOptimizer's num_groups is deprecated; use groups",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    groups = _checked_groups(groups)
    names = _checked_names(optimizer, named_parameters)
    sharded = next((name for parameter, name in names.items() if is_dtensor(parameter)), None)
    if sharded is not None:
        raise Invalid(
            f"{sharded} is a DTensor, so torch already reduces its gradient: use the optimizer without"
            " DistributedOptimizer"
        )
    if shards is not None:
        _check_shards(
            shards, reduction, compression, gradient_predivide_factor, groups, process_set
        )
    if zero not in (0, 1):
        raise Invalid(f"zero is {zero!r}: pass 0, or 1 for ZeRO-1")
    if zero:
        _check_zero(optimizer, reduction, shards, sparse_as_dense, process_set)
    world = lifecycle.current()
    # Check the world size at every step, because it may change in an elastic job.
    if reduction is Op.ADASUM and not world.elastic:
        adasum.check(world.place.size)

    added = (
        AdasumDistributed
        if reduction is Op.ADASUM
        else DividedOptimizer
        if zero
        else WrappedOptimizer
    )
    optimizer_class = _subclass(type(optimizer), added)  # type: ignore[arg-type]
    made = reduction_description.OptimizerArguments(
        Options(reduction, gradient_predivide_factor, compression, groups),
        backward_passes_per_step,
        sparse_as_dense,
        process_set is global_process_set,
        world.env.fusion_bytes,
        shards,
        zero,
    )
    distributed = wrapped_optimizer.wrap(optimizer, optimizer_class, names, made)
    reducer: Reducer
    if reduction is Op.ADASUM:
        reducer = BackwardPasses(distributed, names, backward_passes_per_step)
        adasum_optimizer.prepare(distributed, compression, sparse_as_dense)
    elif shards is not None:
        reducer = ShardReducer(
            distributed,
            names,
            shards,
            op=reduction,
            compression=compression,
            passes=backward_passes_per_step,
            sparse_as_dense=sparse_as_dense,
        )
    else:
        reducer = GradientReducer(
            distributed,
            names,
            op=reduction,
            predivide_factor=gradient_predivide_factor,
            compression=compression,
            passes=backward_passes_per_step,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    wrapped_optimizer.reduce_with(distributed, reducer)
    if isinstance(distributed, DividedOptimizer):
        distributed.divide(range(world.place.size))
        distributed.take_own_entries()
    if shards is not None or ((world.elastic or world.place.size > 1) and process_set.included()):
        reducer.install_hooks()
    return distributed


@functools.cache
def _subclass(
    optimizer_class: type[torch.optim.Optimizer], added: type[WrappedOptimizer]
) -> type[WrappedOptimizer]:
    attributes = {
        # the class has the same name as in Horovod, because frameworks recognize a wrapped optimizer by
        # str(type(optimizer))
        "__module__": "horovod.torch.optimizer",
        "__qualname__": optimizer_class.__qualname__,
        "__doc__": optimizer_class.__doc__,
    }
    return type(optimizer_class.__name__, (added, optimizer_class), attributes)


def _checked_op(op: int) -> Op:
    try:
        return Op(op)
    except ValueError as error:
        raise Invalid(f"op is {op!r}: pass Average, Sum, Adasum, Min, Max or Product") from error


def _check_process_set(process_set: ProcessSet, reduction: Op) -> None:
    if not isinstance(process_set, ProcessSet):
        raise Invalid(
            f"process_set is {process_set!r}: pass a ProcessSet that was registered with add_process_set()"
        )
    if reduction is Op.ADASUM:
        require_global(process_set)
    if process_set.included():
        resolve(process_set)  # called only for its check: raises an error for an unregistered set


def _check_shards(
    shards: object,
    reduction: Op,
    compression: object,
    predivide_factor: float,
    groups: object,
    process_set: ProcessSet,
) -> None:
    """Raise Invalid for options with which gradients would depend on the assignment of shards to ranks."""
    if not isinstance(shards, Shards):
        raise Invalid(f"shards is {shards!r}: pass an elastic.Shards")
    shards.check_workers(lifecycle.current().env.workers_min)
    refused = {
        f"op={reduction.name.title()}": reduction not in (Op.AVERAGE, Op.SUM),
        # Compressions to fp16 and bf16 are allowed: they round each shard's gradient separately.
        "a compression other than Compression.fp16 and bf16": compression
        not in (Compression.none, Compression.fp16, Compression.bf16),
        "gradient_predivide_factor": predivide_factor != 1.0,
        "groups": bool(groups),  # Buckets must be the same in every world.
        "process_set": process_set is not global_process_set,
    }
    for name, given in refused.items():
        if given:
            raise Invalid(
                f"shards can't be combined with {name}: omit {name}, or train without shards"
            )


def _check_zero(
    optimizer: torch.optim.Optimizer,
    reduction: Op,
    shards: object,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> None:
    """Raise Invalid for arguments that ``zero=1`` does not support."""
    refused = {
        "op=Adasum": reduction is Op.ADASUM,  # no gradients are reduced with Adasum
        "shards": shards is not None,
        "sparse_as_dense": sparse_as_dense,  # only dense gradients can be divided
        "process_set": process_set is not global_process_set,
    }
    for name, given in refused.items():
        if given:
            raise Invalid(f"zero=1 can't be combined with {name}: omit one of them")
    zero1_optimizer.check(optimizer)


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return {
            parameter: UNNAMED.format(number, index)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    if isinstance(named_parameters, torch.nn.Module) or callable(named_parameters):
        raise Invalid("named_parameters is not a list of pairs: pass model.named_parameters()")
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise Invalid(
            "named_parameters contains an entry that is not a (name, parameter) pair: pass model.named_parameters()"
        )
    seen: set[str] = set()
    twice = sorted({name for name, _ in named if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise Invalid(
            f"named_parameters contains duplicate names: {', '.join(twice)}. Make them unique, for example with"
            " a prefix for each model"
        )
    names = {parameter: name for name, parameter in named}
    missing = [
        f"parameter {index} of group {number}, shape {tuple(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if missing:
        raise Invalid(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters"
            f" ({missing[0]}{', ...' if missing[1:] else ''}): name all parameters, or pass None"
        )
    return names


def _checked_groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
) -> int | Sequence[Sequence[torch.Tensor]] | None:
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return groups
    if not isinstance(groups, list):
        raise Invalid(
            f"groups is {groups!r}: pass a number of groups, or a list of lists of parameters"
        )
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, list | tuple):
            raise Invalid(
                "groups has an entry that is not a list: pass a list of lists of parameters"
            )
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise Invalid(
                    f"groups contains a {type(parameter).__name__}: pass lists of parameters (tensors)"
                )
            if id(parameter) in seen:
                raise Invalid(
                    "groups contains a parameter twice: put each parameter in at most one group"
                )
            seen.add(id(parameter))
    return groups
