"""What a checkpoint of a held commit consists of: tensors and objects by their names, and who writes which.

The names are those of the state dict ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), ...}``, as
torch.distributed.checkpoint flattens it. Tensors that such a state dict leaves out, buffers registered with
``persistent=False`` for instance, stand under ``elastic``. Every rank makes the same plan of the same commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from elastic.state.held import Held, HeldRows

Path = tuple[Any, ...]
LEAVES = 1000  # a value of more is one object


@dataclass(frozen=True)
class StateItem:
    """One tensor. ``paths``: all its places in the state dict; tied parameters have several.

    ``rows``: those that this rank has of a sharded tensor; then ``tensor`` is the whole one without content.
    """

    part: str
    key: str
    tensor: torch.Tensor
    paths: tuple[Path, ...]
    by_rank0: bool  # it may differ between replicas, and rank 0's counts
    rows: HeldRows | None = None


@dataclass(frozen=True)
class Contents:
    """``objects``: leaves of the state dict that are no tensors of a commit, by path."""

    items: list[StateItem]
    objects: dict[Path, Any]

    def flat(self) -> tuple[dict[str, Any], dict[str, Path]]:
        """The state dict as torch.distributed.checkpoint flattens it, with tensors without content in place of those of
        the commit, and the path of each name.
        """
        values: dict[Path, Any] = {}
        for item in self.items:
            one, dtype = item.tensor, item.tensor.dtype
            empty = torch.empty_strided(one.shape, one.stride(), dtype=dtype, device="meta")
            values.update(dict.fromkeys(item.paths, empty))
        values.update(self.objects)
        return {dotted(path): each for path, each in values.items()}, {dotted(p): p for p in values}


def dotted(path: Path) -> str:
    """The name of a path for torch.distributed.checkpoint."""
    return ".".join(map(str, path))


def contents(held: Held) -> Contents:
    """Of a commit whose copies are complete."""
    items: list[StateItem] = []
    objects: dict[Path, Any] = {}
    for name, value in held.values.items():
        leaves = dict(_leaves(value, name))
        objects.update(leaves if len(leaves) <= LEAVES else {(name,): value})
    for name, part in held.parts.items():
        tensors = part.tensors | {key: each.whole for key, each in part.sharded.items()}
        keys = {id(tensor): key for key, tensor in tensors.items()}
        paths: dict[str, list[Path]] = {key: [] for key in tensors}
        for path, leaf in _leaves(part.described(), name):
            key = keys.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
            if key is None:
                objects[path] = leaf
            else:
                paths[key].append(path)
        equal = part.part.equal_everywhere(part.structure)
        for key, tensor in tensors.items():
            places = tuple(paths[key]) or (("elastic", name, key),)
            rows = part.sharded.get(key)
            by_rank0 = rows is None and equal is not None and key not in equal
            items.append(StateItem(name, key, tensor, places, by_rank0, rows))
    return Contents(items, objects)


def _leaves(value: Any, name: str) -> Iterator[tuple[Path, Any]]:
    """As torch.distributed.checkpoint takes a state dict apart. What it can't, as {1: ..., "1": ...}, stays whole."""
    try:
        flat, paths = flatten_state_dict({name: value})
    except ValueError:  # two of the names would be the same
        yield (name,), value
        return
    for key, leaf in flat.items():
        yield paths[key], leaf


def shares(items: list[StateItem], size: int) -> list[list[StateItem]]:
    """Who writes what, by rank: shares of about equally many bytes, the same on every rank. Sharded tensors are left
    out: each rank writes its rows.
    """
    items = [item for item in items if item.rows is None]
    mine: list[list[StateItem]] = [[] for _ in range(size)]
    filled = [0] * size
    for item in items:
        if item.by_rank0:
            mine[0].append(item)
            filled[0] += item.tensor.nbytes
    rest = [item for item in items if not item.by_rank0]
    for item in sorted(rest, key=lambda each: -each.tensor.nbytes):
        rank = filled.index(min(filled))
        mine[rank].append(item)
        filled[rank] += item.tensor.nbytes
    return mine
