"""Broadcast parameters, optimizer state and Python objects from one rank to all.

Tensors are packed into a few large broadcasts. Objects are pickled, which is safe because all senders are workers of
this job. All functions are collective: every rank of ``process_set`` (default: every rank) must call them.
``root_rank`` is always a world rank. Before any transfer, the ranks compare the names, shapes and dtypes of their
tensors. If these differ, every rank raises an error and no tensor is changed.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic.api.ops import allgather, allreduce, broadcast_
from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.negotiation.process_sets import ProcessSet, global_process_set, resolve
from elastic.negotiation.submission import is_root, start_broadcast, synchronize
from elastic.pickling import pickled

_CPU = torch.device("cpu")
# maximum number of bytes packed into one broadcast; larger tensors are sent separately
_CHUNK_BYTES = 64 << 20

Parameters = (
    Mapping[str, torch.Tensor | None]
    | Iterable[tuple[str, torch.Tensor | None]]
    | list[torch.nn.Parameter]
)


def broadcast_parameters(
    params: Parameters, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors in place with those of rank ``root_rank``, in packed broadcasts of up to 64 MiB.

    Args:
        params: a ``state_dict()``, (name, tensor) pairs as from ``named_parameters()``, or a list of tensors of any
            shapes and dtypes. Names, shapes and dtypes are the same on every rank. Entries that are None are skipped.
        root_rank: rank in the world, also if ``process_set`` is given.
        process_set: only its ranks call this function and take part.

    Raises:
        ValueError: names, shapes or dtypes differ between ranks. Raised on every rank, before any tensor is changed.
        Invalid: (a ValueError) ``params`` is a module instead of its ``state_dict()``.
        TypeError: an entry is not a tensor. Use `broadcast_object` for such entries.
        PeerLost: a worker was lost.

    Example::

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if isinstance(params, torch.nn.Module):
        raise Invalid("broadcast_parameters got a module: pass model.state_dict()")
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    if isinstance(params, list):  # Parameters in a list have no names.
        pairs = [
            (str(index), each) if isinstance(each, torch.Tensor) else each
            for index, each in enumerate(pairs)
        ]
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "broadcast_parameters got neither a state_dict() nor (name, tensor) pairs: pass"
                " model.named_parameters()"
            )
        if not (pair[1] is None or isinstance(pair[1], torch.Tensor)):
            raise TypeError(
                f"{pair[0]} is a {type(pair[1]).__name__}, not a tensor: send it with broadcast_object"
            )
    tensors = [(name, tensor) for name, tensor in pairs if tensor is not None]
    _compare("parameters", [_describe(name, tensor) for name, tensor in tensors], process_set)
    _broadcast_packed([tensor for _, tensor in tensors], root_rank, process_set)


def broadcast_copies(
    tensors: Iterable[torch.Tensor], root_rank: int, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return new tensors with the values of rank ``root_rank``, for frameworks that set variables by value.

    Raises the same errors as `broadcast_parameters`.
    """
    copies = [tensor.clone() for tensor in tensors]
    named = [(str(number), tensor) for number, tensor in enumerate(copies)]
    broadcast_parameters(iter(named), root_rank, process_set)
    return copies


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the options and the state of an optimizer from rank ``root_rank`` to all ranks, without running a step.

    State entries that this rank lacks are allocated, and entries that the root lacks are dropped. Existing tensors are
    overwritten in place. If the root's optimizer has no state yet, parameters without a gradient get a zero gradient,
    as with Horovod.

    Args:
        optimizer: any torch optimizer except LBFGS, or a `DistributedOptimizer`, over the same parameters on every
            rank.
        root_rank: rank in the world, also if ``process_set`` is given.
        model: ignored; accepted for compatibility with Horovod.
        process_set: only its ranks call this function and take part.

    Raises:
        ValueError: the optimizer is LBFGS, or was created with ``zero=1`` and has stepped. Raised on every rank if the
            parameters differ in number, shape or dtype.
        TypeError: ``optimizer`` is not a torch optimizer.
        PeerLost: a worker was lost.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"a {type(optimizer).__name__} is not a torch.optim.Optimizer: pass a torch optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "the state of LBFGS can't be broadcast: create the optimizer after broadcast_parameters, with the same"
            " options on all ranks"
        )
    if optimizer.state and hasattr(optimizer, "zero_order"):
        raise ValueError(
            "an optimizer with zero=1 can't be broadcast after its first step, because each rank holds a different"
            " part of its state: pass it to elastic.TorchState, or broadcast it before its first step"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lengths = [str(len(group["params"])) for group in optimizer.param_groups]
    described = [_describe("", parameter) for parameter in parameters]
    _compare("optimizers", lengths + described, process_set)
    # SparseAdam rejects dense gradients.
    if not optimizer.state and not isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    here = is_root(root_rank, _CPU, resolve(process_set))
    outline = broadcast_object(
        _outline(optimizer, parameters) if here else None, root_rank, "optimizer state", process_set
    )
    if not here:
        _adopt(optimizer, parameters, outline)
    _broadcast_packed(
        [
            optimizer.state[parameter][key]
            for parameter, entries in zip(parameters, outline.entries, strict=True)
            for key, entry in entries.items()
            if isinstance(entry, _TensorOutline)
        ],
        root_rank,
        process_set,
    )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcast a Python object from one rank to all.

    Args:
        obj: any picklable object; ignored on ranks other than ``root_rank``. Objects that the script defines are
            pickled by name, all other objects with cloudpickle.
        root_rank: rank in the world, also if ``process_set`` is given.
        name, process_set: see the module docstring of `elastic.api.ops`.

    Returns:
        ``obj`` itself on ``root_rank``, and a copy of it on all other ranks.

    Raises:
        PeerLost: a worker was lost.
        Exception: ``obj`` cannot be pickled. Raised on ``root_rank``.

    Example::

        epoch = hvd.broadcast_object(epoch, root_rank=0)
    """
    members = resolve(process_set)

    def broadcast_from_root(tensor: torch.Tensor, suffix: str) -> None:
        child = _child(name, suffix)
        synchronize(
            start_broadcast(tensor, root_rank, child, members=members, in_place=True, soon=True)
        )

    here = is_root(root_rank, _CPU, members)
    blob = pickled(obj) if here else bytearray()
    length = torch.tensor(len(blob), dtype=torch.int64, device=_CPU)
    broadcast_from_root(length, "length")
    if not here:
        blob = bytearray(int(length))
    broadcast_from_root(torch.frombuffer(blob, dtype=torch.uint8), "content")
    return obj if here else pickle.loads(blob)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather a Python object from each rank on every rank.

    Args:
        obj: any picklable object, pickled as in `broadcast_object`. Its size may differ between ranks.
        name, process_set: see the module docstring of `elastic.api.ops`.

    Returns:
        A list of copies, in rank order.

    Raises:
        PeerLost: a worker was lost.
        Exception: ``obj`` cannot be pickled.
    """
    blob = torch.frombuffer(pickled(obj), dtype=torch.uint8)
    length = torch.tensor([len(blob)], dtype=torch.int64, device=_CPU)
    lengths = allgather(length, _child(name, "length"), process_set).tolist()
    blobs = torch.split(allgather(blob, _child(name, "content"), process_set), lengths)
    objects = []
    for received in blobs:
        copy = bytearray(len(received))
        torch.frombuffer(copy, dtype=torch.uint8).copy_(received)
        objects.append(pickle.loads(copy))
    return objects


# ---- optimizer state ---------------------------------------------------------------------------


class _TensorOutline:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"

    def matches(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and tuple(value.shape) == self.shape
            and value.dtype == self.dtype
        )


class _Outline:
    """Options of an optimizer, and shapes and dtypes of its state, indexed by group and parameter position."""

    def __init__(self, options: list[dict[str, Any]], entries: list[dict[str, Any]]) -> None:
        self.options = options
        self.entries = entries


def _outline(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> _Outline:
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    entries = [
        {
            key: _TensorOutline(value) if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in parameters
    ]
    return _Outline(options, entries)


def _adopt(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], outline: _Outline
) -> None:
    for group, options in zip(optimizer.param_groups, outline.options, strict=True):
        for key in group.keys() - options.keys() - {"params"}:
            del group[key]
        for key, value in options.items():
            held = group.get(key)
            if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
                # The learning rate may be stored as a tensor, for captured graphs.
                held.copy_(value)
            else:
                group[key] = value
    for parameter, entries in zip(parameters, outline.entries, strict=True):
        held_entries = optimizer.state.get(parameter, {})
        adopted = {}
        for key, entry in entries.items():
            if not isinstance(entry, _TensorOutline):
                adopted[key] = entry
            elif entry.matches(held_entries.get(key)):
                adopted[key] = held_entries[key]
            else:
                # Step counters stay on the CPU; moments are stored on the parameter's device.
                device = torch.device("cpu") if entry.on_cpu else parameter.device
                adopted[key] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if adopted:
            optimizer.state[parameter] = adopted
        else:
            optimizer.state.pop(parameter, None)


# ---- transfer ----------------------------------------------------------------------------------


def _broadcast_packed(tensors: list[torch.Tensor], root_rank: int, process_set: ProcessSet) -> None:
    """Overwrite tensors in place with those of the root rank, packing several tensors into each broadcast.

    Shapes and dtypes are the same on all ranks.
    """
    chunk: list[torch.Tensor] = []
    chunk_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if chunk and (chunk_bytes + size > _CHUNK_BYTES or tensor.device != chunk[0].device):
            _broadcast_chunk(chunk, root_rank, process_set)
            chunk, chunk_bytes = [], 0
        chunk.append(tensor)
        chunk_bytes += size
    if chunk:
        _broadcast_chunk(chunk, root_rank, process_set)


def _broadcast_chunk(tensors: list[torch.Tensor], root_rank: int, process_set: ProcessSet) -> None:
    if len(tensors) == 1:
        broadcast_(tensors[0], root_rank, process_set=process_set)
        return
    packed = torch.cat([_bytes(tensor) for tensor in tensors])
    broadcast_(packed, root_rank, process_set=process_set)
    if is_root(root_rank, packed.device, resolve(process_set)):
        return
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for tensor, part in zip(tensors, torch.split(packed, sizes), strict=True):
        # Copied, because `view` requires storage that is aligned for the new dtype.
        received = part.clone().view(tensor.dtype).view(tensor.shape)
        tensor.detach().copy_(received)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _describe(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}"


def _compare(what: str, lines: list[str], process_set: ProcessSet) -> None:
    """Raise ValueError on every rank if ``lines`` differ between ranks.

    All ranks must call this function.
    """
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
    own = torch.tensor([digest, -digest], dtype=torch.int64, device=_CPU)
    greatest, least = allreduce(own, op=Op.MAX, process_set=process_set).tolist()
    if greatest != -least:
        raise ValueError(
            f"{what} differ between ranks in number, name, shape or dtype: build the same model on every rank"
        )


def _child(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
