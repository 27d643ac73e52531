"""Restore a state from a checkpoint. Only values that are not plain data are unpickled."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic.checkpoints.files import manifest
from elastic.checkpoints.files.checksummed_file import Check
from elastic.checkpoints.files.manifest import Manifest, StoredTensor, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.plain_data import CorruptedData
from elastic.checkpoints.tensors_as_plain_data import dtype_named, from_plain
from elastic.errors import StateMismatch
from elastic.state.handlers import state_transfer
from elastic.state.handlers.part import Part, ShardsStateHandler
from elastic.state.handlers.python_values import loads
from elastic.state.handlers.tensor_spec import Destination, TensorSpec
from elastic.state.snapshots import change_detection
from elastic.state.state import ObjectState, names_of, parts_of, take_random, take_values

COMPUTE_AS_BEFORE = (
    "restore the earlier OMP_NUM_THREADS, processor type and versions, or pass --allow-inexact"
)


def load(storage: Storage, found: Manifest, state: ObjectState) -> None:
    """Set the state to the values of a commit, without committing the state. Sharded tensors are not loaded.

    Raises:
        StateMismatch: the state does not match the commit. Nothing was changed.
        UnreadableCommit: the checkpoint is corrupted, and the state may be incomplete, so another checkpoint must be
            loaded.
        OSError: the storage failed.
    """
    parts: Mapping[str, Part] = parts_of(state)
    shards = [part for part in parts.values() if isinstance(part, ShardsStateHandler)]
    here, there = state.layout(), found.layout
    for each in shards:
        there = each.comparable(there)
    where = f"{storage.url}/{found.name}"
    if there != here:
        differ = {*there.splitlines()} ^ {*here.splitlines()}
        computed = all(".arithmetic." in line for line in differ)
        raise StateMismatch(
            f"{state_transfer.difference(there, here, 'the checkpoint')}. The checkpoint in {where} was not"
            f" changed: {COMPUTE_AS_BEFORE if computed else 'run the script that wrote it'}, or start a new job"
            " with --fresh or another --checkpoint-dir"
        )
    values, structures = _python(storage, found, {name: part.value for name, part in parts.items()})
    if parts.keys() != structures.keys():
        raise StateMismatch(
            f"the checkpoint in {where} contains {sorted(structures)}, but this state has {sorted(parts)}: run"
            " the script that wrote the checkpoint"
        )
    missing = sorted({name for name in names_of(state) if name not in values})
    if missing:
        raise StateMismatch(
            f"the checkpoint in {where} lacks the values {', '.join(missing)} of this state: run the script that"
            " wrote the checkpoint, or start a new job with --fresh"
        )
    change_detection.notice()
    with torch.no_grad():
        fresh = _tensors(storage, found, parts, structures)
        for name, part in parts.items():
            part.place(structures[name], fresh.get(name, {}), None, restoring=False)
    for each in shards:
        each.resume_from(found.layout)
    take_values(state, values)


def load_random(generators: Sequence[Any], rank: int, state: ObjectState) -> None:
    """Set the random generators to the states that rank ``rank`` committed, if the manifest contains them.

    Raises:
        UnreadableCommit: the states are corrupted.
    """
    saved = generators[rank] if rank < len(generators) else None
    if saved is not None:
        try:
            take_random(state, from_plain(saved))
        except CorruptedData as error:
            raise UnreadableCommit(
                f"the random state of rank {rank} is corrupted: {error}", manifest.RESTORE
            ) from error


def _python(
    storage: Storage, found: Manifest, referred: dict[str, object]
) -> tuple[dict[str, Any], dict[str, Any]]:
    values: dict[str, Any] = {}
    structures: dict[str, Any] = {}
    by_kind = {"values": values, "structures": structures}
    try:
        for kind, texts in (("values", found.values), ("structures", found.structures)):
            by_kind[kind].update({name: from_plain(text) for name, text in texts.items()})
    except CorruptedData as error:
        raise UnreadableCommit(
            f"{manifest.MANIFEST} is corrupted: {error}", manifest.RESTORE
        ) from error
    if found.pickled:
        content = storage.read(f"{found.name}/{manifest.PICKLED}")
        check = Check(found.files[manifest.PICKLED])
        check.update(content)
        _compare(manifest.PICKLED, check)
        for (kind, name), value in loads(content, referred).items():
            by_kind[kind][name] = value
    return values, structures


def _compare(file: str, check: Check) -> None:
    if not check.passed():
        raise UnreadableCommit(
            f"{file} is corrupted: its checksum differs from the recorded one", manifest.RESTORE
        )


def _tensors(
    storage: Storage, found: Manifest, parts: Mapping[str, Part], structures: dict[str, Any]
) -> dict[str, dict[str, torch.Tensor]]:
    stored_whole = [each for each in found.tensors if each.rows is None]
    places: dict[tuple[str, str], torch.Tensor | Destination] = {}
    for name, part in parts.items():
        specs = {
            each.key: TensorSpec(tuple(each.shape), dtype_named(each.dtype))
            for each in stored_whole
            if each.part == name
        }
        chosen = part.destinations(structures[name], specs, restoring=False)
        places.update({(name, key): where for key, where in chosen.items()})
    fresh: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in by_file(stored_whole).items():
        for stored, tensor in read_file(storage, found, file, tensors):
            where = places[stored.part, stored.key]
            if isinstance(where, torch.Tensor):
                where.copy_(tensor)
            elif where is Destination.NEW:
                fresh.setdefault(stored.part, {})[stored.key] = tensor
    return fresh


def by_file(tensors: Iterable[StoredTensor]) -> dict[str, list[StoredTensor]]:
    found: dict[str, list[StoredTensor]] = {}
    for each in tensors:
        found.setdefault(each.file, []).append(each)
    return found


def read_file(
    storage: Storage, found: Manifest, file: str, tensors: list[StoredTensor]
) -> list[tuple[StoredTensor, torch.Tensor]]:
    """Read one file from beginning to end. Its checksum is verified before any tensor is used.

    Raises:
        UnreadableCommit: the file is corrupted.
        OSError: the storage failed.
    """
    read: list[tuple[StoredTensor, torch.Tensor]] = []
    check = Check(found.files[file])
    position = 0
    with storage.reading(f"{found.name}/{file}") as stream:
        for stored in sorted(tensors, key=lambda each: each.offset):
            block = stream.read(stored.offset - position + stored.length)
            check.update(block)
            content = io.BytesIO(block[stored.offset - position :])
            position = stored.offset + stored.length
            try:
                tensor = torch.load(content, weights_only=True, map_location="cpu")
            except Exception as error:
                raise UnreadableCommit(
                    f"{file} is corrupted: {stored.name} can't be read", manifest.RESTORE
                ) from error
            if not isinstance(tensor, torch.Tensor) or list(tensor.shape) != stored.stored_shape:
                raise UnreadableCommit(
                    f"{file} is corrupted: {stored.name} has another dtype or shape than recorded",
                    manifest.RESTORE,
                )
            read.append((stored, tensor))
        while block := stream.read(1 << 20):
            check.update(block)
    _compare(file, check)
    return read
