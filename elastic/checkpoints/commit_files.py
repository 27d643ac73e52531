"""Writing of a commit: each rank writes its share, then one rank writes the index and the manifest.

All functions block, so call them in a thread.
"""

from __future__ import annotations

import functools
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from elastic.checkpoints import catalog
from elastic.checkpoints.contents import Contents, Path, StateItem, contents, dotted, shares
from elastic.checkpoints.files import manifest, row_ranges, tensor_file
from elastic.checkpoints.files.checksummed_file import Alive, CheckedFile
from elastic.checkpoints.files.manifest import (
    CommitName,
    Manifest,
    Share,
    StoredFile,
    StoredRows,
    StoredTensor,
    UnreadableCommit,
)
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.plain_data import NotPlain
from elastic.checkpoints.tensors_as_plain_data import to_plain
from elastic.failpoints import failpoint
from elastic.optimizer.gradients.not_finite import finite
from elastic.state.handlers.held_commit import HeldCommit
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.handlers.python_values import ATOMS, dumps
from elastic.state.snapshots.digest import digest


def write_share(
    storage: Storage, name: CommitName, held: HeldCommit, rank: int, size: int, alive: Alive
) -> None:
    """Write this rank's tensors, and then their list, which marks this rank's share as complete.

    Raises:
        OSError: the storage failed.
        DeviceLost: the accelerator failed.
        Exception: raised by ``alive`` to cancel the write.
    """
    held.complete()
    items = contents(held).items
    of_rows = [item for item in items if item.rows is not None and item.rows.rows.numel()]
    tensors: list[StoredTensor] = []
    files: dict[str, StoredFile] = {}
    # Sharded rows are written to a separate file, because a rank reads all replicated tensors, but only its own rows.
    for number, mine in enumerate((shares(items, size)[rank], of_rows)):
        if not mine:
            continue
        file = f"__{rank}_{2 * number}.distcp"
        with storage.writing(f"{name}/{file}", alive) as out:
            for item in mine:
                tensors.append(_write(item, file, out))
                failpoint("durable-file")
        files[file] = out.stored()
    generators = None if held.random is None else to_plain(held.random)
    odd = sorted(not_finite(held)) if held.is_sharded else []
    share = Share(manifest.FORMAT, rank, size, files, tensors, generators, odd)
    failpoint("durable-share")
    storage.write(f"{name}/share-{rank}.json", manifest.encoded(share))


def _write(item: StateItem, file: str, out: CheckedFile) -> StoredTensor:
    offset = out.count
    if item.rows is None:
        tensor_file.write(item.tensor, out)
        rows = None
    else:
        held = item.rows
        tensor, begin = held.rows, held.begin
        step = row_ranges.rows_of_piece(tensor.nbytes // len(tensor))
        data, sums = tensor_file.write_rows(tensor, out, step)
        sizes = None if held.sizes is None else list(held.sizes)
        end = begin + len(tensor)
        rows = StoredRows(begin, end, data, step, sums, held.plain, sizes, held.on_host)
    dtype = str(item.tensor.dtype).removeprefix("torch.")
    return StoredTensor(
        item.part,
        item.key,
        list(item.paths[0]),
        dtype,
        list(item.tensor.shape),
        file,
        offset,
        out.count - offset,
        rows,
    )


def replica_digests(held: HeldCommit) -> dict[str, int]:
    """Return, for each part of the state, the digest of its replicated tensors.

    Raises:
        DeviceLost: the accelerator failed.
    """
    held.complete()
    alike: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for item in contents(held).items:
        if not item.by_rank0 and item.rows is None:
            alike.setdefault(item.part, []).append((item.key, item.tensor))
    return {part: digest(tensors) for part, tensors in alike.items()}


def not_finite(held: HeldCommit) -> set[str]:
    """Return the names of the parameters that contain an infinity or NaN.

    Only this rank's rows of sharded parameters are examined. Raises DeviceLost if the accelerator failed.
    """
    held.complete()
    found = set()
    for item in contents(held).items:
        part = held.parts[item.part]
        parameters = part.part.equal_everywhere(part.structure)
        tensor = item.tensor if item.rows is None else item.rows.rows
        if parameters and item.key in parameters and not finite(tensor):
            found.add(f"{item.part}.{item.key}")
    return found


def seal(
    storage: Storage,
    name: CommitName,
    held: HeldCommit,
    size: int,
    alive: Alive,
    look: Callable[[list[Share]], None] = lambda shares: None,
) -> Manifest:
    """Complete a checkpoint by writing its index and manifest, after all shares were written.

    ``look`` is called with all shares first, and may raise an exception to reject them.

    Raises:
        OSError: the storage failed.
        UnreadableCommit: a share is missing or corrupted, or the shares are not the complete state.
    """
    found = [_share(storage, name, rank, size) for rank in range(size)]
    look(found)
    made = contents(held)
    files = {file: stored for share in found for file, stored in share.files.items()}
    tensors = [tensor for share in found for tensor in share.tensors]
    row_ranges.check_ranges(tensors)
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
        group_sizes={
            name: [len(parameters) for parameters in part.own]
            for name, part in held.parts.items()
            if isinstance(part.part, OptimizerStateHandler)
        },
    )
    trouble = manifest.missing(whole, storage.sizes(str(name)))
    if trouble:
        raise UnreadableCommit(
            trouble, f"Check that all hosts mount the same folder at {storage.url}"
        )
    alive()
    failpoint("durable-manifest")
    storage.write(f"{name}/{manifest.MANIFEST}", manifest.encoded(whole))
    failpoint("durable-sealed")
    return catalog.read(storage, name)


def _share(storage: Storage, name: CommitName, rank: int, size: int) -> Share:
    file = f"{name}/share-{rank}.json"
    try:
        share = manifest.decode_share(storage.read(file))
    except FileNotFoundError:
        raise UnreadableCommit(
            f"rank {rank} reported that it wrote {file}, but the file is missing",
            f"Check that all hosts mount the same folder at {storage.url}",
        ) from None
    if (share.rank, share.size) != (rank, size):
        raise UnreadableCommit(
            f"{file} was written in an earlier world",
            f"Check that all hosts mount the same folder at {storage.url}",
        )
    return share


def _saved(value: Any, what: str) -> bytes:
    return _saved_atom(value) if type(value) in ATOMS else _saved_object(value, what)


@functools.lru_cache(10_000, typed=True)
def _saved_atom(value: Any) -> bytes:
    return _saved_object(value, "")


def _saved_object(value: Any, what: str) -> bytes:
    """Serialize a value in the way that torch.distributed.checkpoint expects.

    A value that cannot be pickled is replaced by its repr.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception:
        stream = io.BytesIO()
        torch.save(f"{what} can't be pickled: {value!r}"[:1000], stream)
    return stream.getvalue()


def _python(held: HeldCommit) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str], Any]]:
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
    """Return the content of the file ``.metadata`` of torch.distributed.checkpoint.

    Creating the content is slow with thousands of tensors. It rarely changes between checkpoints, so the last result is
    cached.
    """
    global _last_index
    names = [([dotted(p) for p in each.paths], each.tensor.stride()) for each in made.items]
    places = [(dotted(path), place) for path, place in objects.items()]
    lie = [
        (t.part, t.key, t.path, t.dtype, t.shape, t.file, t.offset, t.length, _begin(t))
        for t in tensors
    ]
    what = msgspec.msgpack.encode((names, lie, places))
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
    stored: dict[tuple[str, str], list[StoredTensor]] = {}
    for each in tensors:
        stored.setdefault((each.part, each.key), []).append(each)
    metadata.storage_data = {
        each.index: dcp._StorageInfo(*where[each.index.fqn])
        for each in planner.plan.items
        if each.index.fqn in where
    }
    for item in made.items:
        ranges = sorted(stored.get((item.part, item.key), []), key=_begin)
        for path in item.paths:
            known = metadata.state_dict_metadata[dotted(path)]
            assert isinstance(known, TensorStorageMetadata)
            known.chunks = [
                ChunkStorageMetadata(_offsets(each), torch.Size(each.stored_shape))
                for each in ranges
            ]
            for number, each in enumerate(ranges):
                index = MetadataIndex(dotted(path), _offsets(each), number)
                place = dcp._StorageInfo(each.file, each.offset, each.length)
                metadata.storage_data[index] = place
    metadata.planner_data = paths
    metadata.storage_meta = StorageMeta()
    metadata.version = getattr(dcp, "CURRENT_DCP_VERSION", None)
    return pickle.dumps(metadata)


def _begin(tensor: StoredTensor) -> int:
    return 0 if tensor.rows is None else tensor.rows.begin


def _offsets(tensor: StoredTensor) -> torch.Size:
    return torch.Size([_begin(tensor), *[0] * (len(tensor.shape) - 1)][: len(tensor.shape)])
