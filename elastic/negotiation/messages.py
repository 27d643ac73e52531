"""What the ranks tell each other about a collective before it runs, and whether what they ask for fits together. Pure.

A rank asks by a `Request`; ``kind`` and ``name`` say which collective is meant, the rest has to agree in the way of its
kind. What was found is `Response`. Ranks of a process set are named by their ranks in the world; no members means all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import msgspec

from elastic.protocol.calls import Called, Calls, distinct

Members = tuple[int, ...]  # ranks in the world, ascending; empty: all of them
ALL: Members = ()

ALLREDUCE, REDUCESCATTER = "allreduce", "reducescatter"
ALLGATHER, BROADCAST, ALLTOALL = "allgather", "broadcast", "alltoall"
BARRIER, AGREE, JOIN, LEAVE = "barrier", "agree", "join", "leave"
WAIT = "wait"  # with a name: the only thread of this rank that submits waits for that collective

_FEW = 4  # tensors of a group that a sentence lists
_OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_ELEMENT_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
}  # others have 8, which is near enough for deciding what is small


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One rank's call of one collective."""

    kind: str
    name: str  # with the kind in front: allreduce.loss
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of each
    device: str = "cpu"
    op: int = 0
    root: int = 0
    scales: tuple[float, float] = (1.0, 1.0)
    splits: tuple[int, ...] = ()  # of alltoall: rows for each member
    payload: str = ""  # of agree; of wait, the line of the script
    lasting: bool = False  # it was given a name, so that the same will come again

    def called_by(self, rank: int, line: str = "") -> Called:
        """What this rank has called, for people."""
        tensors = [f"{dtype} {list(shape)}" for dtype, shape in self.tensors]
        more = [f"{len(tensors) - _FEW} more"] if len(tensors) > _FEW else []
        return Called(rank, self.name, line, ", ".join([*tensors[:_FEW], *more]))

    @property
    def size_bytes(self) -> int:
        """Of all its tensors together, near enough."""
        return sum(math.prod(shape) * _ELEMENT_BYTES.get(dtype, 8) for dtype, shape in self.tensors)


class Response(msgspec.Struct, frozen=True, array_like=True):
    """A collective that all its members asked for, or why it can't be.

    ``rows``: for each member, in order, its rows of each tensor (allgather), or those that it sends to each (alltoall).
    """

    request: Request  # of the first member that asked
    rows: tuple[tuple[int, ...], ...] = ()
    payloads: tuple[str, ...] = ()
    number: int = -1  # by which it is known from now on; -1: by none
    error: str = ""
    refused: bool = False  # the error is nobody's mistake: a rank is gone
    calls: Calls = ()  # of the ranks, where the error is that they differ
    missing: tuple[
        int, ...
    ] = ()  # the ranks that are gone, or never submitted it, where it is refused

    def asked_by(self, position: int) -> Request:
        """What the member at this position asked for."""
        request = self.request
        if request.kind == ALLGATHER:
            tensors = tuple(
                (dtype, (rows, *shape[1:]))
                for (dtype, shape), rows in zip(request.tensors, self.rows[position], strict=True)
            )
            return msgspec.structs.replace(request, tensors=tensors)
        if request.kind == ALLTOALL:
            return msgspec.structs.replace(request, splits=self.rows[position])
        return request


class RequestList(msgspec.Struct, frozen=True, array_like=True):
    """From a rank to the coordinator: these can run as far as I am concerned."""

    members: Members
    epoch: int  # in which ``known`` were given their numbers
    known: bytes = b""  # a bit for each number, the lowest first
    requests: tuple[Request, ...] = ()


class ResponseList(msgspec.Struct, frozen=True, array_like=True):
    """From the coordinator to all members: run these now, first the known ones by number, then the others in order."""

    members: Members
    epoch: int  # a new one: all numbers before it are forgotten
    known: bytes = b""
    responses: tuple[Response, ...] = ()
    last_joined: int = -1  # every rank of the world has joined, this one last
    joined: int = -1  # this rank's join has been heard: whoever joins now does so after it


def settle(requests: Mapping[int, Request], members: Sequence[int]) -> Response:
    """``requests`` by rank. Members without one have joined, and contribute zeros."""
    ranks = [rank for rank in members if rank in requests]
    first = requests[ranks[0]]
    error = mismatch({rank: requests[rank] for rank in ranks})
    if not error and len(ranks) < len(members) and first.kind != ALLREDUCE:
        joined = [rank for rank in members if rank not in requests]
        has = "has" if len(joined) == 1 else "have"
        error = f"{first.name} can't run: {_ranks(joined)} {has} joined, and can only contribute zeros to an allreduce"
    if error:
        calls = distinct(requests[rank].called_by(rank) for rank in ranks)
        return Response(first, error=error, calls=calls)
    rows: tuple[tuple[int, ...], ...] = ()
    if first.kind == ALLGATHER:
        rows = tuple(tuple(shape[0] for _, shape in requests[rank].tensors) for rank in ranks)
    elif first.kind == ALLTOALL:
        rows = tuple(requests[rank].splits for rank in ranks)
    payloads = tuple(requests[rank].payload for rank in ranks) if first.kind == AGREE else ()
    return Response(first, rows, payloads)


def mismatch(requests: Mapping[int, Request]) -> str:
    """What differs between the ranks' requests of one name: a sentence that names ranks; empty if they fit together."""
    first = next(iter(requests.values()))
    if all(request == first for request in requests.values()):
        return ""
    ragged = first.kind in (ALLGATHER, ALLTOALL)
    aspects = (
        ("the number of tensors", lambda r: [f"{len(r.tensors)}"]),
        ("the dtype", lambda r: [dtype for dtype, _ in r.tensors]),
        (
            "the shape beyond the first dimension" if ragged else "the shape",
            functools.partial(_shapes, ragged=ragged),
        ),
        ("the reduction", lambda r: [_OPS[r.op]]),
        ("the root rank", lambda r: [f"{r.root}"]),
        ("prescale_factor", lambda r: [repr(r.scales[0])]),
        ("postscale_factor", lambda r: [repr(r.scales[1])]),
        ("the device", lambda r: [r.device]),
    )
    for what, of in aspects:
        values: dict[tuple[str, ...], list[int]] = {}
        for rank, request in requests.items():
            values.setdefault(tuple(of(request)), []).append(rank)
        if len(values) > 1:
            shown = _where_they_differ([*values])
            who = ", ".join(
                f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
                for value, ranks in zip(shown, values.values(), strict=True)
            )
            return f"{first.name}: mismatched tensors, the ranks differ in {what}: {who}"
    return ""


def _shapes(request: Request, ragged: bool) -> list[str]:
    if ragged:
        return [
            str(["any", *shape[1:]]).replace("'", "") if shape else "[]"
            for _, shape in request.tensors
        ]
    return [str(list(shape)) for _, shape in request.tensors]


def _where_they_differ(values: Sequence[tuple[str, ...]]) -> list[str]:
    """The first few of them; of a long list, those around the first difference."""
    if max(map(len, values)) <= _FEW:
        return [", ".join(value) for value in values]
    at = next(i for i, items in enumerate(zip(*values, strict=False)) if len(set(items)) > 1)
    return [f"{value[at]} in tensor {at} of {len(value)}" for value in values]


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 2 and 5``, ``ranks 0 to 7``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = list(map(str, ranks[:8]))
    if len(ranks) > 8:
        return f"ranks {', '.join(shown)} and {len(ranks) - 8} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


ranks_in_words = _ranks
