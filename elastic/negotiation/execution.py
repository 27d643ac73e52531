"""Start of negotiated collectives, with fusion of tensors. A joined rank contributes zeros.

`coordinator` and `fusion` decide which collectives run and in what order; `reductions` and
`broadcast_allgather_alltoall` compute the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from elastic.collectives import own_gpu
from elastic.collectives.algorithms import reductions
from elastic.collectives.interface import Collectives, Op
from elastic.errors import CollectiveFailed, TensorMismatch
from elastic.monitoring import timeline
from elastic.negotiation.messages import (
    AGREE,
    ALLREDUCE,
    BARRIER,
    NOTIFY,
    Members,
    Request,
    Response,
)
from elastic.negotiation.pending import FusedBatch, Pending


def start(
    members: Members,
    batch: list[tuple[Response, Pending | None]],
    group_for: Callable[[str, torch.device, Members], Collectives],
) -> None:
    """Start a batch of decided collectives.

    The batch is the same on every rank. If a collective cannot be started, its exception is raised.
    """
    response, pending = batch[0]
    request = response.request
    if timeline.on:
        for _, asked in batch:
            if asked is not None:
                timeline.end(asked.row())
    if response.error:
        if pending is not None:
            pending.settled(error=error_of(response))
        return
    if request.kind in (BARRIER, AGREE, NOTIFY):
        if pending is not None:
            pending.settled(response.payloads)
        return
    device = _device(request) if pending is None else pending.device
    rows = [asked.row() for _, asked in batch if asked is not None] if timeline.on else []
    for row in rows:
        timeline.begin(row, request.kind.upper())
    began_ns = timeline.now_ns() if rows else 0
    with torch.no_grad(), _on(device):
        for _, asked in batch:
            if asked is not None:
                asked.await_tensors()
        group = group_for("named", device, members)
        if request.kind == ALLREDUCE:
            _start_allreduce(group, batch, device, rows, began_ns)
        else:
            assert pending is not None, "only allreduce runs with joined ranks"
            _mark(rows, began_ns)
            now_ns = timeline.now_ns() if rows else 0
            started = pending.begin(group, response)
            pending.started(FusedBatch(started, rows, _backend(request), now_ns))


def error_of(response: Response) -> BaseException | None:
    """Return the error that the submitting ranks raise for a response, or None if the collective can run."""
    if not response.error:
        return None
    if response.refused:
        return CollectiveFailed(response.error, rank=next(iter(response.missing), None))
    return TensorMismatch(response.error, calls=response.calls)


def _start_allreduce(
    group: Collectives,
    batch: list[tuple[Response, Pending | None]],
    device: torch.device,
    rows: list[str],
    began_ns: int,
) -> None:
    request = batch[0][0].request
    tensors: list[torch.Tensor] = []
    into: list[torch.Tensor | None] = []
    for response, pending in batch:
        own = _zeros(response.request, device) if pending is None else pending.tensors
        tensors.extend(own)
        into.extend(own if pending is None else pending.targets())
    started = reductions.allreduce(group, tensors, Op(request.op), *request.scales, into)
    _mark(rows, began_ns)
    whole = FusedBatch(started, rows, _backend(request), timeline.now_ns() if rows else 0)
    at = 0
    for response, pending in batch:
        count = len(response.request.tensors)
        if pending is not None:
            pending.started(whole, (at, at + count))
        at += count


def _mark(rows: list[str], began_ns: int) -> None:
    if rows:
        timeline.spans(rows, "MEMCPY_IN_FUSION_BUFFER", began_ns, timeline.now_ns())


def _device(request: Request) -> torch.device:
    return own_gpu.of(request.device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _zeros(request: Request, device: torch.device) -> list[torch.Tensor]:
    return [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for dtype, shape in request.tensors
    ]


def _backend(request: Request) -> str:
    return f"{'NCCL' if request.device == 'cuda' else 'GLOO'}_{request.kind.upper()}"
