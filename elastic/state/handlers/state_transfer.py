"""Transfer of a complete state from one rank to the other ranks of a group: a header, then the bytes of the tensors.

Only broadcasts are used, in an order that depends only on the header, so all ranks make the same calls. A receiver that
cannot use the state still receives the whole state and raises its error afterwards, so other ranks are not disturbed.
Large tensors are sent directly from live tensor to live tensor. Small ones are packed together. Tensors on the root's
GPU are sent between GPUs if every rank has its own GPU, and otherwise through host memory.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from elastic.collectives import object_exchange, own_gpu
from elastic.collectives.interface import Collectives, Op, Work
from elastic.collectives.store_group import DistantGroup
from elastic.errors import Interrupted, Invalid, StateMismatch
from elastic.failpoints import failpoint
from elastic.state.handlers.python_values import dumps, loads
from elastic.state.handlers.tensor_spec import Destination, TensorSpec
from elastic.state.snapshots import change_detection, preallocated_memory
from elastic.state.snapshots.snapshot import as_bytes

PACK = 4 << 20  # bytes per packed chunk; only tensors of at most a quarter of this size are packed
# Maximum bytes per broadcast. Larger tensors are split, because not all backends support counts above 2**31.
PIECE = 64 << 20
WINDOW = 4  # maximum number of broadcasts in flight
ALIGNMENT = 16  # bytes; allows a packed tensor of any dtype to be viewed in place
DIFFERENCES = 5  # maximum number of differing lines that an error shows per layout

Key = tuple[str, str]  # names of the part and of the tensor


CopyGroup = Collectives | DistantGroup
GroupOn = Callable[[torch.device], Collectives]
# A group, the device it sends from and receives on, and the tensors to send over it.
Road = tuple[CopyGroup, torch.device, dict[Key, TensorSpec]]

CPU = torch.device("cpu")


class TransferData(Protocol):
    """Interface of a part of the state to transfer. See `elastic.state.handlers.part.Part`."""

    value: Any

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]: ...

    def versions(self) -> dict[str, int]: ...

    def destinations(
        self, structure: Any, specs: dict[str, TensorSpec], *, restoring: bool
    ) -> dict[str, torch.Tensor | Destination]: ...

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None: ...


def transfer(
    group: CopyGroup,
    root: int,
    parts: Mapping[str, TransferData],
    values: dict[str, Any],
    layout: str,
    group_on: GroupOn | None = None,
    *,
    keeps: bool = False,
    before_decoding: Callable[[], object] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Send the state of rank ``root`` to all other ranks of the group.

    All ranks must call this function.

    Args:
        group: the group for tensors on the CPU.
        root: the sending rank.
        parts: the parts of the state, by name.
        values: the Python values of the state; used on the root only.
        layout: lines that describe the state's structure and must be equal on all ranks.
        group_on: function that creates a group of the same ranks on a GPU; called on every rank.
        keeps: whether to skip tensors that all receivers already hold; see `Part.versions`. Used on the root only.
        before_decoding: called on each rank once it has received the header, before the values are decoded. It may
            raise CollectiveFailed, and use the group.

    Returns:
        The number of bytes copied, and the root's ``values``.

    Raises:
        StateMismatch: the layout of this receiver differs, or the receiver cannot decode the values. Raised after the
            whole state has been received.
        CollectiveFailed: a rank was lost.
        Invalid: a value can't be pickled. Raised on the root.
    """
    if group.size == 1:
        return 0, values
    if group.rank == root:
        return _send(group, root, parts, values, layout, group_on, keeps, before_decoding), values
    return _receive(group, root, parts, layout, group_on, before_decoding)


def _send(
    group: CopyGroup,
    root: int,
    parts: Mapping[str, TransferData],
    values: dict[str, Any],
    layout: str,
    group_on: GroupOn | None,
    keeps: bool,
    before_decoding: Callable[[], object] | None,
) -> int:
    header, tensors, specs, versions = _packed_state(parts, values, layout, keeps=keeps)
    _, replies = object_exchange.broadcast_with_replies(group, header, root, b"")
    if before_decoding is not None:
        before_decoding()
    specs = _lacking(group, specs, versions, versions, replies)
    failpoint("state-copy")
    moved, _ = _travel(_roads(group, specs, tensors, group_on), root, tensors)
    return len(header) + moved


def _packed_state(
    parts: Mapping[str, TransferData], values: dict[str, Any], layout: str, *, keeps: bool
) -> tuple[bytes, dict[Key, torch.Tensor | Destination], dict[Key, TensorSpec], dict[Key, int]]:
    """Return the header of the state, its tensors with their specs, and the root's versions of them."""
    structures: dict[str, Any] = {}
    tensors: dict[Key, torch.Tensor | Destination] = {}
    specs: dict[Key, TensorSpec] = {}
    for name, part in parts.items():
        structures[name], mine = part.pack()
        for key, tensor in mine.items():
            tensors[name, key] = tensor
            specs[name, key] = TensorSpec.of(tensor)
    content = _pickled(values, structures, _referred(parts))
    versions = _versions(parts) if keeps else {}
    header = pickle.dumps((layout, specs, content, versions), protocol=pickle.HIGHEST_PROTOCOL)
    return header, tensors, specs, versions


def first_broadcast(
    parts: Mapping[str, TransferData], values: dict[str, Any], layout: str
) -> tuple[bytes, bytes]:
    """Return what `transfer` broadcasts first with ``keeps`` if this rank is the root, and its reply otherwise.

    Raises:
        Invalid: a value can't be pickled.
    """
    header, *_ = _packed_state(parts, values, layout, keeps=True)
    return header, _encoded(_versions(parts))


def _receive(
    group: CopyGroup,
    root: int,
    parts: Mapping[str, TransferData],
    layout: str,
    group_on: GroupOn | None,
    before_decoding: Callable[[], object] | None,
) -> tuple[int, dict[str, Any]]:
    versions = _versions(parts)
    header, replies = object_exchange.broadcast_with_replies(group, b"", root, _encoded(versions))
    if before_decoding is not None:
        before_decoding()
    theirs, specs, content, roots = pickle.loads(header)
    try:
        if theirs != layout:
            raise StateMismatch(f"{difference(theirs, layout)}: run the same script on all workers")
        values, structures = _unpickled(content, _referred(parts))
        where = _destinations(parts, structures, specs)
    except Interrupted:
        raise
    except Exception:
        # Receive everything before raising an error, because the broadcasts need all ranks.
        specs = _lacking(group, specs, roots, roots, replies)
        nowhere: dict[Key, torch.Tensor | Destination] = dict.fromkeys(specs, Destination.NOWHERE)
        _travel(_roads(group, specs, nowhere, None), root, nowhere)
        raise
    specs = _lacking(group, specs, roots, versions, replies)
    # Record a change, because the broadcasts write to tensors without incrementing their ``_version``.
    change_detection.notice()
    failpoint("state-copy")
    moved, fresh = _travel(_roads(group, specs, where, group_on), root, where)
    with torch.no_grad():
        for name, part in parts.items():
            mine = {key: tensor for (of, key), tensor in fresh.items() if of == name}
            part.place(structures[name], mine, None, restoring=False)
    return len(header) + moved, values


def _versions(parts: Mapping[str, TransferData]) -> dict[Key, int]:
    found = {name: part.versions() for name, part in parts.items()}
    return {(name, key): each for name, of in found.items() for key, each in of.items()}


def _encoded(versions: dict[Key, int]) -> bytes:
    return zlib.compress(json.dumps([[*key, each] for key, each in versions.items()]).encode())


def _decoded(reply: bytes) -> dict[Key, int]:
    return {(name, key): each for name, key, each in json.loads(zlib.decompress(reply))}


def _lacking(
    group: CopyGroup,
    specs: dict[Key, TensorSpec],
    roots: dict[Key, int],
    mine: dict[Key, int],
    replies: list[bytes] | None,
) -> dict[Key, TensorSpec]:
    """Return the specs of the tensors that at least one rank does not hold in the root's version.

    All ranks must call this function.

    Args:
        group: group of the root and the receivers.
        specs: the specs of all tensors of the state.
        roots: the root's versions. If it is empty, all tensors are sent.
        mine: the versions that this rank holds.
        replies: the versions that the receivers hold, or None if the ranks have not sent them.
    """
    if not roots:
        return specs
    if replies is None:
        flags = [key not in roots or mine.get(key) != roots[key] for key in specs]
        lacks = object_exchange.any_of(group, flags)
        return {key: spec for (key, spec), any_ in zip(specs.items(), lacks, strict=True) if any_}
    held = [*map(_decoded, replies)]
    kept = {key for key, version in roots.items() if all(each.get(key) == version for each in held)}
    return {key: spec for key, spec in specs.items() if key not in kept}


def _referred(parts: Mapping[str, TransferData]) -> dict[str, object]:
    return {name: part.value for name, part in parts.items()}


def _pickled(values: dict[str, Any], structures: Any, referred: dict[str, object]) -> bytes:
    try:
        return dumps((values, structures), "the state", referred)
    except Exception:
        for name, value in values.items():  # the error then names the value that failed
            dumps(value, f"state.{name}", referred)
        raise


def _unpickled(content: bytes, referred: dict[str, object]) -> tuple[dict[str, Any], Any]:
    try:
        values, structures = loads(content, referred)
    except Exception as error:
        raise StateMismatch(
            "cannot decode the Python state received from the other workers"
            f" ({type(error).__name__}: {error}): run the same script and package versions on all workers"
        ) from error
    return values, structures


def _destinations(
    parts: Mapping[str, TransferData], structures: Any, specs: dict[Key, TensorSpec]
) -> dict[Key, torch.Tensor | Destination]:
    if parts.keys() != structures.keys():
        raise StateMismatch(
            f"the state of the other workers contains {sorted(structures)}, but the state of this worker"
            f" contains {sorted(parts)}: run the same script on all workers"
        )
    where: dict[Key, torch.Tensor | Destination] = {}
    for name, part in parts.items():
        mine = {key: spec for (of, key), spec in specs.items() if of == name}
        placed = part.destinations(structures[name], mine, restoring=False)
        where.update({(name, key): place for key, place in placed.items()})
    return where


def difference(theirs: str, ours: str, they: str = "the world") -> str:
    """Describe the differences between two layouts for an error message."""
    there, here = theirs.splitlines(), ours.splitlines()
    only_there = [line for line in there if line not in set(here)][:DIFFERENCES]
    only_here = [line for line in here if line not in set(there)][:DIFFERENCES]
    found = []
    if only_here:
        found.append(f"this worker has {'; '.join(only_here)}")
    if only_there:
        found.append(f"{they} has {'; '.join(only_there)}")
    what = ", ".join(found) or "the same tensors are in another order"
    return f"this worker's state differs from that of {they}: {what}"


# ---- tensors -------------------------------------------------------------------------------------


def _roads(
    group: CopyGroup,
    specs: dict[Key, TensorSpec],
    where: dict[Key, torch.Tensor | Destination],
    group_on: GroupOn | None,
) -> list[Road]:
    """Choose, in agreement with all ranks, the groups over which to send the tensors.

    All ranks must call this function.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    on_gpu = {key: spec for key, spec in specs.items() if spec.device_type == "cuda"}
    if not on_gpu:
        return [(group, CPU, specs)]
    device = None if group_on is None else _gpu(where)
    gpus = torch.zeros(group.size, dtype=torch.int64, device="cpu")
    gpus[group.rank] = 0 if device is None else _number_of(device, group.rank)
    group.allreduce(gpus, Op.SUM).wait()
    # NCCL requires a separate GPU for each rank.
    if group_on is None or device is None or 0 in gpus or len(gpus.unique()) < group.size:
        return [(group, CPU, specs)]
    on_cpu = {key: spec for key, spec in specs.items() if key not in on_gpu}
    return [(group, CPU, on_cpu), (group_on(device), device, on_gpu)]


def _number_of(device: torch.device, rank: int) -> int:
    """Return a nonzero hash of the GPU's UUID, or of the rank if the UUID is unknown."""
    uuid = own_gpu.uuid(device).encode() or b"%d" % rank
    return int.from_bytes(hashlib.blake2b(uuid, digest_size=7).digest(), "big") + 1


def _gpu(where: dict[Key, torch.Tensor | Destination]) -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    tensors = [each for each in where.values() if isinstance(each, torch.Tensor)]
    devices = {each.device for each in tensors if each.is_cuda} or {own_gpu.device()}
    if len(devices) > 1:
        return None
    device = devices.pop()
    try:
        own_gpu.meet(device)
    except Invalid:  # this rank's collectives already use another GPU
        return None
    return device


def _travel(
    roads: list[Road], root: int, where: dict[Key, torch.Tensor | Destination]
) -> tuple[int, dict[Key, torch.Tensor]]:
    moved = 0
    fresh: dict[Key, torch.Tensor] = {}
    for group, device, specs in roads:
        fresh.update(_exchange(group, device, root, specs, where))
        moved += sum(spec.nbytes for spec in specs.values())
    return moved, fresh


def _exchange(
    group: CopyGroup,
    device: torch.device,
    root: int,
    specs: dict[Key, TensorSpec],
    where: dict[Key, torch.Tensor | Destination],
) -> dict[Key, torch.Tensor]:
    sending = group.rank == root
    fresh: dict[Key, torch.Tensor] = {}
    under_way: deque[tuple[Work, Callable[[], None]]] = deque()

    def submit(block: torch.Tensor, arrived: Callable[[], None]) -> None:
        under_way.append((group.broadcast(block, root), arrived))
        if len(under_way) >= WINDOW:
            finish_one()

    def finish_one() -> None:
        work, arrived = under_way.popleft()
        work.wait()
        if not sending:
            arrived()

    for keys in _packs(specs):
        if len(keys) == 1:
            key = keys[0]
            block, arrived = _block(specs[key], where[key], device, fresh, key, sending)
            for start in range(0, len(block), PIECE):
                last = start + PIECE >= len(block)
                submit(block[start : start + PIECE], arrived if last else _nothing)
        else:
            submit(*_packed(keys, specs, where, device, fresh, sending))
    while under_way:
        finish_one()
    return fresh


def _nothing() -> None:
    pass


def _packs(specs: dict[Key, TensorSpec]) -> Iterator[list[Key]]:
    """Yield the keys of the tensors of each broadcast. The grouping depends only on the specs, so ranks agree on it."""
    pack: list[Key] = []
    filled = 0
    for key, spec in specs.items():
        if spec.nbytes * 4 > PACK:
            yield [key]
        elif spec.nbytes:
            if filled + _aligned(spec) > PACK:
                yield pack
                pack, filled = [], 0
            pack.append(key)
            filled += _aligned(spec)
    if pack:
        yield pack


def _aligned(spec: TensorSpec) -> int:
    return -(-spec.nbytes // ALIGNMENT) * ALIGNMENT


def _block(
    spec: TensorSpec,
    where: torch.Tensor | Destination,
    device: torch.device,
    fresh: dict[Key, torch.Tensor],
    key: Key,
    sending: bool,
) -> tuple[torch.Tensor, Callable[[], None]]:
    if isinstance(where, torch.Tensor) and _direct(where, device):
        return as_bytes(where), _nothing
    if sending:
        assert isinstance(where, torch.Tensor)
        return as_bytes(where.to(device)), _nothing
    new = where is Destination.NEW and device.type == "cpu"
    staged = torch.empty(spec.shape, dtype=spec.dtype, device="meta" if new else device)
    if new:
        staged = preallocated_memory.empty_like(staged)
    return as_bytes(staged), lambda: _deliver(staged, where, fresh, key)


def _packed(
    keys: list[Key],
    specs: dict[Key, TensorSpec],
    where: dict[Key, torch.Tensor | Destination],
    device: torch.device,
    fresh: dict[Key, torch.Tensor],
    sending: bool,
) -> tuple[torch.Tensor, Callable[[], None]]:
    block = torch.zeros(sum(_aligned(specs[key]) for key in keys), dtype=torch.uint8, device=device)
    views: list[tuple[Key, torch.Tensor]] = []
    start = 0
    for key in keys:
        spec = specs[key]
        views.append((key, block[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)))
        start += _aligned(spec)
    if sending:
        for key, view in views:
            source = where[key]
            assert isinstance(source, torch.Tensor)
            view.copy_(source)

    def arrived() -> None:
        for key, view in views:
            # Clone a new small tensor, because a view would keep the whole packed block alive.
            _deliver(
                view.clone() if where[key] is Destination.NEW else view, where[key], fresh, key
            )

    return block, arrived


def _deliver(
    tensor: torch.Tensor,
    where: torch.Tensor | Destination,
    fresh: dict[Key, torch.Tensor],
    key: Key,
) -> None:
    if isinstance(where, torch.Tensor):
        with torch.no_grad():
            where.copy_(tensor)
    elif where is Destination.NEW:
        fresh[key] = tensor


def _direct(tensor: torch.Tensor, device: torch.device) -> bool:
    return (
        tensor.device == device
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
