"""Submission of collectives, and waiting for their results.

All arguments are checked before anything is sent. `engine` compares the submissions of the ranks. `reductions` and
`broadcast_allgather_alltoall` compute the results. ``members`` are the ranks of a process set, or None for the world.

In all ``start_*`` functions, ``pick`` converts the raw result to the one that the user receives, and ``soon`` states
whether the caller waits immediately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from elastic import context
from elastic.collectives import own_gpu
from elastic.collectives.algorithms import adasum, reductions
from elastic.collectives.dtensor import is_dtensor
from elastic.collectives.groups import group_factory
from elastic.collectives.interface import Op
from elastic.errors import (
    CollectiveFailed,
    Interrupted,
    Invalid,
    NotInitialized,
    TensorMismatch,
    Unsupported,
)
from elastic.monitoring import moved_tensors
from elastic.negotiation.handles import Handles
from elastic.negotiation.messages import (
    AGREE,
    ALL,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
)
from elastic.negotiation.pending import Pending, run_alone

Tensors = Sequence[torch.Tensor]
Members = tuple[int, ...] | None

_CPU = torch.device("cpu")
_handles = Handles()
_callers: Members = None


@contextlib.contextmanager
def among(callers: Members) -> Iterator[None]:
    """Restrict collectives over the whole world to the ranks in ``callers``, within a context.

    All of these ranks run the same code.
    """
    global _callers
    _callers = callers
    try:
        yield
    finally:
        _callers = None


def _need_tensors(kind: str, tensors: Sequence[object]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{kind} takes a torch.Tensor, not a {type(tensor).__name__}: convert it with torch.as_tensor()"
            )
        if is_dtensor(tensor):
            raise Unsupported(
                f"{kind} got a DTensor, of which each rank stores only a part: pass tensor.full_tensor(), or"
                " tensor.to_local() for this rank's part. fully_shard synchronizes parameters and gradients itself"
            )


def start_allreduce(
    tensors: Tensors,
    name: str | None,
    op: Op,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    members: Members = None,
    into: Tensors | None = None,
    pick: Callable[[list[torch.Tensor]], Any] = list,
    soon: bool = False,
) -> int:
    """Start an allreduce.

    Args:
        into: tensors that receive the results. See `reductions.allreduce`.
    """
    _need_tensors(ALLREDUCE, tensors)
    reductions.check(ALLREDUCE, tensors, op, (prescale, postscale) != (1.0, 1.0))
    if op is Op.ADASUM:
        adasum.check(group_size(_CPU, members))
    scales = (float(prescale), float(postscale))
    return _submit(ALLREDUCE, name, tensors, pick, members, soon, into=into, op=op, scales=scales)


def start_reducescatter(
    tensors: Tensors,
    name: str | None,
    op: Op,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    members: Members = None,
    pick: Callable[[list[torch.Tensor]], Any] = list,
    soon: bool = False,
) -> int:
    _need_rows(REDUCESCATTER, tensors)
    if op not in (Op.AVERAGE, Op.SUM):
        raise Unsupported(f"reducescatter can't use {op.name.title()}: use Average or Sum")
    reductions.check(REDUCESCATTER, tensors, op, (prescale, postscale) != (1.0, 1.0))

    scales = (float(prescale), float(postscale))
    return _submit(REDUCESCATTER, name, tensors, pick, members, soon, op=op, scales=scales)


def start_allgather(
    tensors: Tensors,
    name: str | None,
    *,
    members: Members = None,
    pick: Callable[[tuple[list[torch.Tensor], list[int]]], Any] = tuple,
    soon: bool = False,
) -> int:
    """Start an allgather.

    The result consists of the gathered tensors, and the index of this rank's first row in each of them.
    """
    _need_rows(ALLGATHER, tensors)

    return _submit(ALLGATHER, name, tensors, pick, members, soon)


def start_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    *,
    members: Members = None,
    in_place: bool,
    soon: bool = False,
) -> int:
    """Start a broadcast. ``root_rank`` is a rank of the world, even if a process set is given."""
    _need_tensors(BROADCAST, [tensor])
    size = context.current().place.size
    if not isinstance(root_rank, int) or isinstance(root_rank, bool) or not 0 <= root_rank < size:
        raise ValueError(f"root_rank is {root_rank!r}: pass a rank between 0 and {size - 1}")
    if members is not None and root_rank not in members:
        raise ValueError(
            f"root_rank {root_rank} is not in the process set {list(members)}: pass one of its ranks"
        )
    if members is None and _callers is not None and len(_callers) > 1 and root_rank not in _callers:
        raise ValueError(
            f"root_rank {root_rank} has just joined or missed the newest commit, so it does not take part in"
            f" collectives of reset callbacks: pass one of the ranks {list(_callers)}"
        )

    return _submit(
        BROADCAST,
        name,
        [tensor],
        None,
        members,
        soon,
        into=[tensor] if in_place else None,
        root=root_rank,
    )


def start_alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    *,
    members: Members = None,
    soon: bool = False,
) -> int:
    _need_tensors(ALLTOALL, [tensor])
    if tensor.dim() == 0:
        raise ValueError("alltoall needs a tensor with at least 1 dimension: use tensor.reshape(1)")
    size = group_size(_CPU, members)
    rows = _splits(splits, len(tensor))
    if rows is None:
        if len(tensor) % size:
            raise ValueError(
                f"alltoall can't divide {len(tensor)} rows evenly among {size} ranks: pass splits"
            )
        rows = [len(tensor) // size] * size
    elif len(rows) != size:
        raise ValueError(f"{len(rows)} splits were given for {size} ranks: pass one per rank")

    return _submit(ALLTOALL, name, [tensor], None, members, soon, splits=tuple(rows))


def barrier(members: Members = None) -> None:
    """Wait until every member has called this function."""
    synchronize(_submit(BARRIER, None, (), None, members, soon=True))


def start_join() -> int:
    """Start a join: this rank contributes zeros until all ranks have joined. Returns a handle.

    `synchronize` returns the last rank that joined.
    """
    return _submit(JOIN, JOIN, (), None, None, soon=False)


def join_noted(handle: int) -> bool:
    """Return whether the coordinator has recorded this join.

    If so, it precedes any join that is submitted later on any rank.
    """
    found = _handles.find(handle, context.current())
    return found is None or found.pending.noted or found.pending.done()


def agree(kind: str, name: str, payload: str) -> list[str]:
    """Exchange ``payload`` with all ranks under a kind and a name. Return the payloads of all ranks in rank order."""
    handle = _submit(AGREE, f"{kind}.{name}", (), list, None, soon=True, payload=payload)
    answers: list[str] = synchronize(handle)
    return answers


def _submit(
    kind: str,
    name: str | None,
    tensors: Tensors,
    pick: Callable[[Any], Any] | None,
    members: Members,
    soon: bool,
    *,
    into: Tensors | None = None,
    op: int = 0,
    root: int = 0,
    scales: tuple[float, float] = (1.0, 1.0),
    splits: tuple[int, ...] = (),
    payload: str = "",
) -> int:
    if why := context.refusal():
        raise Invalid(f"{kind}{f' {name}' if name else ''} was called {why}")
    if not tensors and kind not in (BARRIER, AGREE, JOIN):
        raise ValueError(f"{kind} got an empty list: pass at least one tensor")
    device = tensors[0].device if tensors else _CPU
    if len(tensors) > 1 and any(tensor.device != device for tensor in tensors):
        devices = sorted({str(tensor.device) for tensor in tensors})
        raise ValueError(
            f"{kind}: the tensors of a group are on the devices {', '.join(devices)}: move them to one"
            " device"
        )
    rt = context.current()
    if kind != BROADCAST:
        moved_tensors.took(tensors)
    if members is None and kind not in (AGREE, JOIN):
        members = _callers
    pending = Pending(
        kind,
        "" if name is None else name if kind == JOIN else f"{kind}.{name}",
        members or ALL,
        tensors,
        device,
        op=op,
        root=root,
        scales=scales,
        splits=splits,
        payload=payload,
        into=into,
    )
    handle = _handles.claim(rt, pending, pick)
    try:
        with rt.guard(_handles.name(handle)):
            if group_size(device, members) == 1:
                run_alone(pending, rt.alone_group())
            else:
                _to_engine(rt, pending, soon)
    except BaseException:
        _handles.release(handle)
        raise
    return handle


def _to_engine(rt: context.Context, pending: Pending, soon: bool) -> None:
    # Check the device before the negotiation: a later error would end the collective on the other ranks.
    group_factory.check_device(pending.device.type)
    own_gpu.meet(pending.device)
    rt.engine().submit(pending, soon)


def _splits(splits: torch.Tensor | Sequence[int] | None, rows: int) -> list[int] | None:
    """Validate the numbers of rows for the ranks, and return them as a list. Return None if ``splits`` is None.

    The caller checks the number of entries.

    Raises:
        ValueError: an entry is negative, or the sum exceeds ``rows``.
    """
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError("splits is not a vector of torch.int32: pass splits.to(torch.int32)")
        splits = splits.tolist()
    counts = [int(count) for count in splits]
    if any(count < 0 for count in counts) or sum(counts) > rows:
        raise ValueError(
            f"splits {counts} contain a negative number or exceed the {rows} rows of the tensor: pass the number"
            " of rows for each rank"
        )
    return counts


def _need_rows(kind: str, tensors: Tensors) -> None:
    _need_tensors(kind, tensors)
    for tensor in tensors:
        if tensor.dim() == 0:
            raise Unsupported(
                f"{kind} needs tensors with at least 1 dimension: use tensor.reshape(1)"
            )


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return or raise immediately.

    Raises:
        ValueError: the handle is not in flight.
    """
    return _handles.done(handle, context.current())


def synchronize(handle: int) -> Any:
    """Wait for a collective and return its result. Return None if the handle was already synchronized.

    Args:
        handle: handle that an ``_async`` function returned.

    Raises:
        TensorMismatch: the ranks' tensors do not match.
        PeerLost: a worker was lost, or the handle belongs to an earlier world.
    """
    rt = context.current()
    found = _handles.find(handle, rt)
    if found is None:
        return None
    try:
        if rt.broken:
            found.pending.drain()
        if isinstance(found.pending.error, TensorMismatch):
            # Every rank receives this error. Raise it unchanged, even if it has also ended the world.
            raise found.pending.error
        with rt.guard(found.shown):
            found.pending.wait()
            result = found.pending.result()
            result = result if found.pick is None else found.pick(result)
    except BaseException as error:
        # After an interruption (Ctrl-C, a signal handler), the collective is still in flight, so keep its handle valid.
        if found.pending.over(error):
            _handles.release(handle)
        raise
    _handles.release(handle)
    return result


def over(handle: int) -> bool:
    """Return whether `synchronize` would return or raise immediately.

    This function accepts handles that are not in flight.
    """
    found = _handles.peek(handle)
    if found is None or found.pending.done():
        return True
    try:
        rt = context.current()
    except NotInitialized:
        return True
    return found.stale(rt) or rt.broken


def offer(handle: int) -> None:
    """Send a request that was submitted with ``soon=True``, even while another thread is waiting for other collectives.

    A failure here is raised again by `synchronize`.
    """
    found = _handles.peek(handle)
    if found is not None:
        with contextlib.suppress(CollectiveFailed):
            found.pending.offer()


def wait_for_any(
    handles: Sequence[int], enough: Callable[[], bool], until: float | None = None
) -> list[int]:
    """Wait until at least one of these handles is complete, and return the complete ones.

    Return an empty list if ``enough()`` becomes true first, or at time ``until`` of `time.monotonic`. If no handle is
    complete but one was decided, return that one, because all its ranks are about to transfer data. A failure here is
    raised again by `synchronize`.
    """
    found = {handle: each for handle in handles if (each := _handles.peek(handle)) is not None}
    claimed = list(found.values())

    def decided() -> bool:
        return any(each.pending.decided for each in claimed)

    if claimed and not decided():
        with (
            contextlib.suppress(NotInitialized, Interrupted, CollectiveFailed),
            context.current().guard(claimed[0].shown),
        ):
            claimed[0].pending.drive(lambda: enough() or decided(), until)
    ready = [handle for handle in handles if over(handle)]
    return ready or [handle for handle, each in found.items() if each.pending.decided][:1]


def group_size(device: torch.device, members: Members = None) -> int:
    """Return the number of ranks that take part in a collective, or 1 before a new worker has joined a world."""
    rt = context.current()
    if rt.provisional:
        return 1
    members = _callers if members is None else members
    return rt.place.size if members is None else len(members)


def is_root(root_rank: int, device: torch.device, members: Members = None) -> bool:
    """Return whether this rank was the root of the broadcast."""
    return group_size(device, members) == 1 or context.current().place.rank == root_rank
