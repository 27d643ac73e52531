"""Exchange of Python objects between the ranks of a group, through the group's collectives.

The objects are this package's own, for which plain pickle suffices: it takes a sixth of the time of
`elastic.pickling.pickled`, which values of scripts need.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.collectives.interface import Collectives, Op
from elastic.collectives.store_group import DistantGroup

_LENGTH = 8  # size in bytes of the length prefix
# Size in bytes of the first exchange, which fits into the initial congestion window of TCP. A shorter value needs no
# second exchange, which matters in a recovery: each exchange waits for the slowest rank, and takes a round trip
# between distant hosts.
_FIRST = 8192


def gather(group: Collectives, value: Any) -> list[Any]:
    """Gather one value from each rank. Return all values on every rank, in rank order.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    if group.size == 1:
        return [value]
    content = _bytes(value)
    first = _first(content)
    parts = _allgather(group, first)
    lengths = [int(part[:_LENGTH].view(torch.int64)[0]) for part in parts]
    if max(lengths) > _FIRST - _LENGTH:
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(content)] = content
        parts = _allgather(group, padded)
    else:
        parts = [part[_LENGTH:] for part in parts]
    return [
        pickle.loads(part[:length].numpy().tobytes())
        for part, length in zip(parts, lengths, strict=True)
    ]


def _allgather(group: Collectives, tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor, device="cpu") for _ in range(group.size)]
    group.allgather(parts, tensor).wait()
    return parts


def broadcast(group: Collectives, value: Any, root: int) -> Any:
    """Broadcast a value from rank ``root`` to all ranks, and return it.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    if group.size == 1:
        return value
    if group.rank == root:
        broadcast_bytes(group, pickle.dumps(value), root)
        return value
    return pickle.loads(broadcast_bytes(group, b"", root))


def broadcast_bytes(
    group: Collectives | DistantGroup, content: bytes | bytearray, root: int
) -> bytes | bytearray:
    """Broadcast the bytes of rank ``root`` to all ranks, and return them. Other ranks' ``content`` is ignored.

    A bytearray is sent without being copied.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    if isinstance(group, DistantGroup):
        return broadcast_with_replies(group, content, root, b"")[0]
    return _broadcast_tensors(group, content, root)


def _broadcast_tensors(
    group: Collectives | DistantGroup, content: bytes | bytearray, root: int
) -> bytes | bytearray:
    if group.rank == root:
        whole = _tensor(content)
        group.broadcast(_first(whole), root).wait()
    else:
        first = torch.empty(_FIRST, dtype=torch.uint8, device="cpu")
        group.broadcast(first, root).wait()
        content = bytearray(int(first[:_LENGTH].view(torch.int64)[0]))
        whole = _tensor(content)
        short = whole[: _FIRST - _LENGTH]
        short.copy_(first[_LENGTH : _LENGTH + len(short)])
    if len(whole) > _FIRST - _LENGTH:
        group.broadcast(whole[_FIRST - _LENGTH :], root).wait()
    return content


def broadcast_with_replies(
    group: Collectives | DistantGroup, content: bytes | bytearray, root: int, reply: bytes
) -> tuple[bytes | bytearray, list[bytes] | None]:
    """Broadcast the bytes of rank ``root``, and send the replies of the other ranks to all ranks at the same time.

    Only a `DistantGroup` sends replies.

    Args:
        group: the group.
        content: bytes to broadcast. Ignored on other ranks than ``root``.
        root: rank that broadcasts.
        reply: bytes that this rank sends. Ignored on ``root``.

    Returns:
        The bytes of ``root``, and the replies of the other ranks in rank order. The replies are None, on all ranks, if
        they are not sent, or one of them is too large.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    if not isinstance(group, DistantGroup):
        return broadcast_bytes(group, content, root), None
    found, replies = group.start_broadcast(content, root, reply)()
    received = _broadcast_tensors(group, content, root) if found is None else found
    usable = [each for each in replies if each is not None]
    return received, usable if len(usable) == len(replies) else None


def start_broadcast(
    group: Collectives | DistantGroup, content: bytes, root: int
) -> Callable[[], bytes | bytearray]:
    """Start to broadcast the bytes of rank ``root``. Return a function that waits for them and returns them.

    Only a `DistantGroup` broadcasts in the background. In other groups, broadcasts must be in one order on all ranks,
    so the bytes are broadcast before this call returns.

    Raises:
        CollectiveFailed: a rank was lost. The returned function raises it as well.
    """
    if not isinstance(group, DistantGroup):
        broadcast = broadcast_bytes(group, content, root)
        return lambda: broadcast
    wait = group.start_broadcast(content, root)

    def received() -> bytes | bytearray:
        found = wait().content
        return _broadcast_tensors(group, content, root) if found is None else found

    return received


def any_of(group: Collectives | DistantGroup, flags: Sequence[bool]) -> list[bool]:
    """Return, for each flag, whether it is set on at least one rank. All ranks pass the same number of flags.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    if isinstance(group, DistantGroup):
        found_flags = group.any_of(flags)
        if found_flags is not None:
            return found_flags
    found = torch.tensor(flags, dtype=torch.int64, device="cpu")
    group.allreduce(found, Op.MAX).wait()
    return [bool(each) for each in found.tolist()]


def _first(content: torch.Tensor) -> torch.Tensor:
    """Return the first exchange of a value: its length and its first bytes."""
    first = torch.zeros(_FIRST, dtype=torch.uint8, device="cpu")
    first[:_LENGTH].view(torch.int64)[0] = len(content)
    short = content[: _FIRST - _LENGTH]
    first[_LENGTH : _LENGTH + len(short)] = short
    return first


def _bytes(value: Any) -> torch.Tensor:
    return _tensor(pickle.dumps(value))


def _tensor(content: bytes | bytearray) -> torch.Tensor:
    """Return the bytes as a tensor, which shares the memory of a bytearray."""
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if isinstance(content, bytes):
        content = bytearray(content)
    return torch.frombuffer(content, dtype=torch.uint8)
