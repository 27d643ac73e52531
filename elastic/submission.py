"""Submits collectives and waits for them: checks arguments, claims a handle, calls the group under the guard.

Nothing is sent before every argument has been checked. What a collective computes is in `reductions` and `exchanges`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from elastic import exchanges, reductions, runtime
from elastic.collectives.interface import Collectives, Op
from elastic.handles import Handles
from elastic.reductions import Started

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]

_handles = Handles()


def _need_tensors(kind: str, tensors: Sequence[object]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{kind} takes a torch.Tensor, not a {type(tensor).__name__};"
                " convert it with torch.as_tensor()"
            )


def start_allreduce(
    tensors: Tensors,
    name: str | None,
    op: Op,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    in_place: bool = False,
    pick: Callable[[list[torch.Tensor]], Any] = list,
) -> int:
    """``pick`` makes the result of the list of reduced tensors; so in all starters."""
    _need_tensors("allreduce", tensors)
    reductions.check("allreduce", tensors, op, (prescale, postscale) != (1.0, 1.0))

    def begin(group: Collectives) -> Started:
        return reductions.allreduce(group, tensors, op, prescale, postscale, in_place)

    return _submit("allreduce", name, tensors, begin, pick)


def start_reducescatter(
    tensors: Tensors,
    name: str | None,
    op: Op,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    pick: Callable[[list[torch.Tensor]], Any] = list,
) -> int:
    _need_rows("reducescatter", tensors)
    reductions.check("reducescatter", tensors, op, (prescale, postscale) != (1.0, 1.0))
    if op not in (Op.AVERAGE, Op.SUM):
        raise ValueError(f"reducescatter can't use {op.name.title()}; use Average or Sum")

    def begin(group: Collectives) -> Started:
        parts = [
            reductions.reducescatter(group, tensor, op, prescale, postscale) for tensor in tensors
        ]
        return [work for works, _ in parts for work in works], lambda: [end() for _, end in parts]

    return _submit("reducescatter", name, tensors, begin, pick)


def start_allgather(
    tensors: Tensors,
    name: str | None,
    *,
    pick: Callable[[tuple[list[torch.Tensor], list[int]]], Any] = tuple,
) -> int:
    """The result is (gathered tensors; in which row of each this rank's rows start)."""
    _need_rows("allgather", tensors)
    return _submit(
        "allgather", name, tensors, lambda group: exchanges.allgather(group, tensors), pick
    )


def start_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, *, in_place: bool
) -> int:
    _need_tensors("broadcast", [tensor])
    size = runtime.current().place.size
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise ValueError(f"root_rank is {root_rank!r}; give a rank between 0 and {size - 1}")

    def begin(group: Collectives) -> Started:
        return exchanges.broadcast(group, tensor, root_rank, in_place)

    return _submit("broadcast", name, [tensor], begin, _identity)


def start_alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, name: str | None
) -> int:
    if tensor.dim() == 0:
        raise ValueError("alltoall needs a tensor with at least 1 dimension; use tensor.reshape(1)")
    counts = _splits(splits, len(tensor))

    def begin(group: Collectives) -> Started:
        rows = counts
        if rows is None:
            if len(tensor) % group.size:
                raise ValueError(
                    f"alltoall can't deal {len(tensor)} rows evenly to {group.size} ranks; give splits"
                )
            rows = [len(tensor) // group.size] * group.size
        elif len(rows) != group.size:
            raise ValueError(f"{len(rows)} splits were given for {group.size} ranks; give one each")
        return exchanges.alltoall(group, tensor, rows)

    return _submit("alltoall", name, [tensor], begin, _identity)


def _submit(
    kind: str,
    name: str | None,
    tensors: Tensors,
    begin: Callable[[Collectives], Started],
    pick: Callable[[Any], Any],
) -> int:
    """Claims a handle, starts the collective on the group of the tensors' device; ``pick`` makes the result."""
    if not tensors:
        raise ValueError(f"{kind} was given no tensors; give at least one")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{kind}: all tensors of a group must be on one device, not on {devices}")
    rt = runtime.current()
    handle = _handles.claim(rt, kind, name)
    try:
        with rt.guard(_handles.name(handle)), torch.no_grad():
            works, finish = begin(rt.group("named", devices.pop()))
    except BaseException:
        _handles.release(handle)
        raise
    _handles.submitted(handle, works, lambda: pick(finish()))
    return handle


def _splits(splits: torch.Tensor | Sequence[int] | None, rows: int) -> list[int] | None:
    """Rows per rank. Raises ValueError for what can't be sent; how many ranks there are is checked later."""
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError("splits must be a vector of torch.int32; use splits.to(torch.int32)")
        splits = splits.tolist()
    counts = [int(count) for count in splits]
    if any(count < 0 for count in counts) or sum(counts) > rows:
        raise ValueError(
            f"splits {counts} add up to more than the tensor's {rows} rows, or are negative"
        )
    return counts


def _need_rows(kind: str, tensors: Tensors) -> None:
    _need_tensors(kind, tensors)
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(
                f"{kind} needs tensors with at least 1 dimension; use tensor.reshape(1)"
            )


def _identity(result: T) -> T:
    return result


def poll(handle: int) -> bool:
    """Whether `synchronize` would return, or raise, at once. Raises ValueError for a handle that is not in flight."""
    return _handles.done(handle, runtime.current())


def synchronize(handle: int) -> Any:
    """Waits for a collective and returns its result; None for a handle that was synchronized before.

    Raises PeerLost if the world broke meanwhile, or if the handle belongs to an earlier one.
    """
    rt = runtime.current()
    taken = _handles.take(handle, rt)
    if taken is None:
        return None
    works, finish, name = taken
    with rt.guard(name):
        for work in works:
            work.wait()
        return finish()


def group_size(device: torch.device) -> int:
    """Number of ranks that share the collectives on this device: 1 before a newcomer's first world."""
    rt = runtime.current()
    with rt.guard("forming the named group"):
        return rt.group("named", device).size


def is_root(root_rank: int, device: torch.device) -> bool:
    """Whether this rank's tensor was the one that was broadcast."""
    return group_size(device) == 1 or runtime.current().place.rank == root_rank
