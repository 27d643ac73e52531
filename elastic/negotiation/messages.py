"""Messages with which ranks negotiate a collective before it runs, and the comparison of requests from several ranks.

Pure: no I/O, no clock.

A rank sends a `Request`: ``kind`` and ``name`` identify the collective, and the other fields must match as its
kind requires. The result is a `Response`. Members of a process set are given by their ranks in the world. An
empty list of members means all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import msgspec

from elastic.protocol.calls import Called, Calls, distinct

Members = tuple[int, ...]  # ranks of a process set, ascending; empty means the whole world
ALL: Members = ()

ALLREDUCE, REDUCESCATTER = "allreduce", "reducescatter"
ALLGATHER, BROADCAST, ALLTOALL = "allgather", "broadcast", "alltoall"
BARRIER, AGREE, JOIN, LEAVE = "barrier", "agree", "join", "leave"
# operation that reports that a rank's only submitting thread is blocked in the named collective
WAIT = "wait"
# operation that notifies all members; it runs as soon as one of them requests it
NOTIFY = "notify"

_FEW = 4  # maximum number of a group's tensors that an error message lists
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
}  # Other dtypes count as 8 bytes, which is accurate enough to recognize small tensors.


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Request of one rank to run a collective."""

    kind: str
    name: str  # name, prefixed with the kind of the collective, such as allreduce.loss
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of each tensor
    device: str = "cpu"
    op: int = 0
    root: int = 0
    scales: tuple[float, float] = (1.0, 1.0)
    # for alltoall only: number of rows that this rank sends to each member
    splits: tuple[int, ...] = ()
    payload: str = ""  # value of AGREE or NOTIFY, or script line of WAIT
    # whether the script has chosen the name, so that the request is likely to recur and worth caching
    lasting: bool = False

    def called_by(self, rank: int, line: str = "") -> Called:
        """Return a readable description of this rank's call, for error messages."""
        tensors = [f"{dtype} {list(shape)}" for dtype, shape in self.tensors]
        more = [f"{len(tensors) - _FEW} more"] if len(tensors) > _FEW else []
        return Called(rank, self.name, line, ", ".join([*tensors[:_FEW], *more]))

    @property
    def size_bytes(self) -> int:
        """Return the approximate total size of the tensors in bytes."""
        return sum(math.prod(shape) * _ELEMENT_BYTES.get(dtype, 8) for dtype, shape in self.tensors)


class Response(msgspec.Struct, frozen=True, array_like=True):
    """Decision on a collective that all members requested: the collective to run, or the reason why it cannot run.

    Args:
        rows: one tuple per member, in order: its number of rows of each tensor (allgather), or the number of rows that
            it sends to each member (alltoall).
    """

    request: Request  # request of the first member
    rows: tuple[tuple[int, ...], ...] = ()
    payloads: tuple[str, ...] = ()
    number: int = -1  # cache number from now on, or -1 for none
    error: str = ""
    refused: bool = False  # whether a rank that has left caused the error, rather than the script
    calls: Calls = ()  # descriptions of the ranks' calls, if the calls differ
    # ranks that have left or never submitted the request, if it is refused
    missing: tuple[int, ...] = ()

    def asked_by(self, position: int) -> Request:
        """Return the request of the member with this index."""
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
    """Message from a rank to the coordinator: the collectives that the rank is ready to run."""

    members: Members
    epoch: int  # epoch of the cache numbers in ``known``
    known: bytes = b""  # bit mask of the offered cache numbers, least significant first
    requests: tuple[Request, ...] = ()


class ResponseList(msgspec.Struct, frozen=True, array_like=True):
    """Message from the coordinator: the collectives that all members must run next.

    Those given by cache number come first.
    """

    members: Members
    epoch: int  # epoch of the cache numbers; an increase invalidates all earlier numbers
    known: bytes = b""
    responses: tuple[Response, ...] = ()
    last_joined: int = -1  # last rank to join, set once every rank of the world has joined
    joined: int = -1  # rank of a join that has just been recorded; later joins are ordered after it


def settle(requests: Mapping[int, Request], members: Sequence[int]) -> Response:
    """Merge the members' requests, a mapping from rank to request, into a response.

    Members without a request have joined and contribute zeros.
    """
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
    """Describe in a sentence how the ranks' requests of one name differ. Return an empty string if they match."""
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
            holders = ", ".join(
                f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
                for value, ranks in zip(shown, values.values(), strict=True)
            )
            return f"{first.name}: mismatched tensors, the ranks differ in {what}: {holders}"
    return ""


def _shapes(request: Request, ragged: bool) -> list[str]:
    if ragged:
        return [
            str(["any", *shape[1:]]).replace("'", "") if shape else "[]"
            for _, shape in request.tensors
        ]
    return [str(list(shape)) for _, shape in request.tensors]


def _where_they_differ(values: Sequence[tuple[str, ...]]) -> list[str]:
    if max(map(len, values)) <= _FEW:
        return [", ".join(value) for value in values]
    at = next(i for i, items in enumerate(zip(*values, strict=False)) if len(set(items)) > 1)
    return [f"{value[at]} in tensor {at} of {len(value)}" for value in values]


def _ranks(ranks: Sequence[int]) -> str:
    """Format a list of ranks as ``rank 1``, ``ranks 1, 2 and 5`` or ``ranks 0 to 7``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = list(map(str, ranks[:8]))
    if len(ranks) > 8:
        return f"ranks {', '.join(shown)} and {len(ranks) - 8} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


ranks_in_words = _ranks
