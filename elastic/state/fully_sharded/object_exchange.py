"""Exchange of Python objects between the ranks of a group, through the group's collectives."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from elastic.collectives.interface import Collectives

_LENGTH = 8  # size in bytes of the length prefix
_FIRST = 8192  # size in bytes of the first exchange


def gather(group: Collectives, value: Any) -> list[Any]:
    """Gather one value from each rank. Return all values on every rank, in rank order.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    if group.size == 1:
        return [value]
    content = _bytes(value)
    # A short value needs only one exchange. During recovery, this matters because each exchange waits for the slowest
    # rank.
    first = torch.zeros(_FIRST, dtype=torch.uint8, device="cpu")
    first[:_LENGTH].view(torch.int64)[0] = len(content)
    short = content[: _FIRST - _LENGTH]
    first[_LENGTH : _LENGTH + len(short)] = short
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
    content = (
        _bytes(value) if group.rank == root else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    length = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
    group.broadcast(length, root).wait()
    if group.rank != root:
        content = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    group.broadcast(content, root).wait()
    return value if group.rank == root else pickle.loads(content.numpy().tobytes())


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
