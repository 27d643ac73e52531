"""Checkpoints of a sharded state without other ranks: the commit of a plain one, divided as ``fully_shard`` divides."""

from __future__ import annotations

import torch

from elastic.checkpoints import commit_files
from elastic.checkpoints.files.manifest import CommitName, Manifest
from elastic.checkpoints.files.storage import Storage
from elastic.sharding.row_layout import rows_of
from elastic.state.handlers.held_commit import HeldCommit, HeldPart, HeldRows
from elastic.state.state import hold
from elastic.state.torch_state import TorchState


def share_of(state: TorchState, rank: int, size: int) -> HeldCommit:
    """Return the tensors of this rank: its rows of all parameters and of similar optimizer entries. Release it."""
    held = hold(state)
    held.release_shard = lambda: None
    for name, part in held.parts.items():
        held.parts[name] = _divided(part, rank, size)
    return held


def _divided(part: HeldPart, rank: int, size: int) -> HeldPart:
    names = part.part.equal_everywhere(part.structure)
    sharded = {
        key: each
        for key, each in part.tensors.items()
        if each.dim() and (names is None or key in names)
    }
    rest = {key: each for key, each in part.tensors.items() if key not in sharded}
    made = HeldPart(part.part, part.snapshot, part.bank, part.structure, part.own, rest)
    for key, each in sharded.items():
        begin, end = rows_of(len(each), rank, size)
        whole = torch.empty_like(each, device="meta")
        made.sharded[key] = HeldRows(whole, begin, each[begin:end].clone(), False)
    return made


def written_by(storage: Storage, state: TorchState, name: CommitName, size: int) -> Manifest:
    """Write a checkpoint of this number of ranks. Raises exceptions of the writes."""
    for rank in range(size):
        held = share_of(state, rank, size)
        try:
            commit_files.write_share(storage, name, held, rank, size, lambda: None)
        finally:
            held.release()
    held = share_of(state, 0, size)
    try:
        return commit_files.seal(storage, name, held, size, lambda: None)
    finally:
        held.release()
