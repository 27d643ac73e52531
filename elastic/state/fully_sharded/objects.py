"""Python objects between the ranks of a group, over its collectives. Acts."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from elastic.collectives.interface import Collectives


def gather(group: Collectives, value: Any) -> list[Any]:
    """Every rank's, in rank order. Raises CollectiveFailed."""
    if group.size == 1:
        return [value]
    content = _bytes(value)
    lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(group.size)]
    group.allgather(lengths, torch.tensor([len(content)], dtype=torch.int64, device="cpu")).wait()
    longest = max(int(each) for each in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(content)] = content
    parts = [torch.empty_like(padded, device="cpu") for _ in range(group.size)]
    group.allgather(parts, padded).wait()
    return [
        pickle.loads(part[: int(length)].numpy().tobytes())
        for part, length in zip(parts, lengths, strict=True)
    ]


def broadcast(group: Collectives, value: Any, root: int) -> Any:
    """Root's. Raises CollectiveFailed."""
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
