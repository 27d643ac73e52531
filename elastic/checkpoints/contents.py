"""Contents of a checkpoint: names of the tensors and objects of an in-memory commit, and the rank that writes each.

The names are those of the state dict ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), ...}``,
flattened as in torch.distributed.checkpoint. Tensors that are not in such a state dict, for example buffers registered
with ``persistent=False``, are stored under ``elastic``. All ranks compute the same plan for the same commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from elastic.state.handlers.held_commit import HeldCommit, HeldRows

Path = tuple[Any, ...]
LEAVES = 1000  # maximum number of leaves; a value with more is stored as a single object


@dataclass(frozen=True)
class StateItem:
    """Tensor of a commit, and its paths in the state dict.

    Args:
        part: part of the state to which the tensor belongs.
        key: name of the tensor within that part.
        tensor: the tensor. For a sharded tensor, the whole tensor on the meta device.
        paths: all paths of the tensor in the state dict. Tied parameters have several.
        by_rank0: whether rank 0 writes the tensor.
        rows: this rank's rows of a sharded tensor, or None.
    """

    part: str
    key: str
    tensor: torch.Tensor
    paths: tuple[Path, ...]
    by_rank0: bool  # Rank 0 writes the tensor, because its value may differ between replicas.
    rows: HeldRows | None = None


@dataclass(frozen=True)
class Contents:
    """Tensors and objects of a checkpoint.

    Args:
        objects: leaves of the state dict other than the commit's tensors, by path.
    """

    items: list[StateItem]
    objects: dict[Path, Any]

    def flat(self) -> tuple[dict[str, Any], dict[str, Path]]:
        """Return the state dict, flattened as in torch.distributed.checkpoint, and the path of each flattened name.

        Tensors of the commit are replaced by tensors on the meta device.
        """
        values: dict[Path, Any] = {}
        for item in self.items:
            one, dtype = item.tensor, item.tensor.dtype
            empty = torch.empty_strided(one.shape, one.stride(), dtype=dtype, device="meta")
            values.update(dict.fromkeys(item.paths, empty))
        values.update(self.objects)
        return {dotted(path): each for path, each in values.items()}, {dotted(p): p for p in values}


def dotted(path: Path) -> str:
    """Return the flattened name that torch.distributed.checkpoint assigns to a path in a state dict."""
    return ".".join(map(str, path))


def contents(held: HeldCommit) -> Contents:
    """Return the contents of a checkpoint of an in-memory commit. This rank must hold a complete copy of the commit."""
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
    """Flatten a value in the same way as torch.distributed.checkpoint.

    A value that torch.distributed.checkpoint cannot flatten, such as {1: ..., "1": ...}, is yielded as a whole.
    """
    try:
        flat, paths = flatten_state_dict({name: value})
    except ValueError:  # Two values have the same flattened name.
        yield (name,), value
        return
    for key, leaf in flat.items():
        yield paths[key], leaf


def shares(items: list[StateItem], size: int) -> list[list[StateItem]]:
    """Assign the items to ranks so that all ranks write about the same number of bytes. Deterministic.

    Sharded tensors are omitted, since each rank writes its own rows.
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
