"""Writes a commit: each rank its share, then one of them the index and the manifest. Blocks: call it in a thread."""

from __future__ import annotations

import functools
import io
import pickle
import time
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from elastic.checkpoints import catalog, manifest
from elastic.checkpoints.contents import Contents, Path, contents, dotted, shares
from elastic.checkpoints.files import tensor_file
from elastic.checkpoints.files.checked import Alive
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.manifest import (
    Manifest,
    Name,
    NotReadable,
    Share,
    StoredFile,
    StoredTensor,
)
from elastic.checkpoints.plain_data import NotPlain
from elastic.checkpoints.values import to_plain
from elastic.failpoints import failpoint
from elastic.optimizer.gradients.not_finite import finite
from elastic.state.handlers.python_values import ATOMS, dumps
from elastic.state.held import Held
from elastic.state.snapshots.digest import digest


def write_share(
    storage: Storage, name: Name, held: Held, rank: int, size: int, alive: Alive
) -> None:
    """This rank's tensors, and the word that they are complete. Raises OSError, DeviceLost, and what ``alive`` does."""
    held.complete()
    mine = shares(contents(held).items, size)[rank]
    file = f"__{rank}_0.distcp"
    tensors: list[StoredTensor] = []
    files: dict[str, StoredFile] = {}
    if mine:
        with storage.writing(f"{name}/{file}", alive) as out:
            for item in mine:
                offset = out.count
                tensor_file.write(item.tensor, out)
                failpoint("durable-file")
                path = list(item.paths[0])
                tensor = item.tensor
                dtype = str(tensor.dtype).removeprefix("torch.")
                where = (file, offset, out.count - offset)
                tensors.append(
                    StoredTensor(item.part, item.key, path, dtype, list(tensor.shape), *where)
                )
        files[file] = out.stored()
    generators = None if held.random is None else to_plain(held.random)
    share = Share(manifest.FORMAT, rank, size, files, tensors, generators)
    failpoint("durable-share")
    storage.write(f"{name}/share-{rank}.json", manifest.encoded(share))


def replica_digests(held: Held) -> dict[str, int]:
    """Of the tensors of each part that all ranks hold alike. Raises DeviceLost."""
    held.complete()
    alike: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for item in contents(held).items:
        if not item.by_rank0:
            alike.setdefault(item.part, []).append((item.key, item.tensor))
    return {part: digest(tensors) for part, tensors in alike.items()}


def not_finite(held: Held) -> set[str]:
    """The parameters that have an infinity in them, or no number. Raises DeviceLost."""
    held.complete()
    found = set()
    for item in contents(held).items:
        part = held.parts[item.part]
        parameters = part.part.equal_everywhere(part.structure)
        if parameters and item.key in parameters and not finite(item.tensor):
            found.add(f"{item.part}.{item.key}")
    return found


def seal(storage: Storage, name: Name, held: Held, size: int, alive: Alive) -> Manifest:
    """All shares are written: writes what makes them a checkpoint. Raises OSError, NotReadable where a share is not
    there, or is not what its rank has written.
    """
    found = [_share(storage, name, rank, size) for rank in range(size)]
    made = contents(held)
    files = {file: stored for share in found for file, stored in share.files.items()}
    tensors = [tensor for share in found for tensor in share.tensors]
    objects = "__0_1.distcp"
    places: dict[Path, tuple[int, int]] = {}
    with storage.writing(f"{name}/{objects}", alive) as out:
        for path, value in made.objects.items():
            offset = out.count
            out.write(_saved(value, dotted(path)))
            places[path] = (offset, out.count - offset)
    files[objects] = out.stored()
    index = _index(made, tensors, {path: (objects, *where) for path, where in places.items()})
    files[manifest.METADATA] = storage.write(f"{name}/{manifest.METADATA}", index)
    plain, pickled = _python(held)
    if pickled:
        content = dumps(pickled, "the state", held.referred())
        files[manifest.PICKLED] = storage.write(f"{name}/{manifest.PICKLED}", content)
    whole = Manifest(
        format=manifest.FORMAT,
        name=name,
        size=size,
        written_at=time.time(),
        torch_version=str(torch.__version__),
        layout=held.layout,
        values=plain["values"],
        structures=plain["structures"],
        pickled=[f"{kind}.{key}" for kind, key in pickled],
        tensors=tensors,
        files=files,
        generators=[share.generators for share in found],
    )
    trouble = manifest.missing(whole, storage.sizes(str(name)))
    if trouble:
        raise NotReadable(f"{trouble}; is {storage.url} one folder that all hosts share?")
    alive()
    failpoint("durable-manifest")
    storage.write(f"{name}/{manifest.MANIFEST}", manifest.encoded(whole))
    failpoint("durable-sealed")
    return catalog.read(storage, name)


def _share(storage: Storage, name: Name, rank: int, size: int) -> Share:
    file = f"{name}/share-{rank}.json"
    try:
        share = manifest.decode_share(storage.read(file))
    except FileNotFoundError:
        raise NotReadable(
            f"{file} is not there, although rank {rank} has written it: is {storage.url} one folder that all hosts"
            " share?"
        ) from None
    if (share.rank, share.size) != (rank, size):
        raise NotReadable(f"{file} is that of another world")
    return share


def _saved(value: Any, what: str) -> bytes:
    return _saved_atom(value) if type(value) in ATOMS else _saved_object(value, what)


@functools.lru_cache(10_000, typed=True)
def _saved_atom(value: Any) -> bytes:
    return _saved_object(value, "")


def _saved_object(value: Any, what: str) -> bytes:
    """As torch.distributed.checkpoint expects it. What can't be pickled becomes its text."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception:
        stream = io.BytesIO()
        torch.save(f"{what} can't be pickled: {value!r}"[:1000], stream)
    return stream.getvalue()


def _python(held: Held) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str], Any]]:
    """Plain data by kind and name, and what is none."""
    plain: dict[str, dict[str, Any]] = {"values": {}, "structures": {}}
    pickled: dict[tuple[str, str], Any] = {}
    found = [("values", name, value) for name, value in held.values.items()]
    found += [("structures", name, part.structure) for name, part in held.parts.items()]
    for kind, name, value in found:
        try:
            plain[kind][name] = to_plain(value)
        except NotPlain:
            pickled[kind, name] = value
    return plain, pickled


_last_index: tuple[Any, bytes] = None, b""


def _index(
    made: Contents, tensors: list[StoredTensor], objects: dict[Path, tuple[str, int, int]]
) -> bytes:
    """What torch.distributed.checkpoint keeps in ``.metadata``. Making it takes long where there are thousands of
    tensors, and it is nearly always that of the checkpoint before.
    """
    global _last_index
    names = [([dotted(p) for p in each.paths], each.tensor.stride()) for each in made.items]
    places = [(dotted(path), place) for path, place in objects.items()]
    what = msgspec.msgpack.encode((names, tensors, places))
    if _last_index[0] != what:
        _last_index = what, _new_index(made, tensors, objects)
    return _last_index[1]


def _new_index(
    made: Contents, tensors: list[StoredTensor], objects: dict[Path, tuple[str, int, int]]
) -> bytes:
    flat, paths = made.flat()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(flat, is_coordinator=True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    where = {dotted(path): place for path, place in objects.items()}
    stored = {(each.part, each.key): (each.file, each.offset, each.length) for each in tensors}
    for item in made.items:
        where.update({dotted(path): stored[item.part, item.key] for path in item.paths})
    metadata.planner_data = paths
    metadata.storage_data = {
        each.index: dcp._StorageInfo(*where[each.index.fqn]) for each in planner.plan.items
    }
    metadata.storage_meta = StorageMeta()
    metadata.version = getattr(dcp, "CURRENT_DCP_VERSION", None)
    return pickle.dumps(metadata)
