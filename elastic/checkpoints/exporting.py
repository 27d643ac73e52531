"""Export of a checkpoint to a single file of unsharded tensors, which can be read without this package.

The export unpickles no values. Values that were stored by pickle, and values that ``torch.load`` refuses by default,
are omitted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from elastic.checkpoints.export_format import ExportFormat, format_of
from elastic.checkpoints.files.manifest import RESTORE, Manifest, UnreadableCommit
from elastic.checkpoints.files.row_ranges import check_ranges
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.plain_data import CorruptedData
from elastic.checkpoints.state_restoring import by_file, read_file
from elastic.checkpoints.tensors_as_plain_data import dtype_named, from_plain
from elastic.errors import Invalid
from elastic.state.handlers import model_state, optimizer_state

_OUTSIDE = "elastic"  # first key of tensors that are not in any state dict

Key = tuple[str, str]  # part of the state, and name of a tensor in this part


class SkippedValue(NamedTuple):
    """Value that was not exported, or was exported only partly.

    Args:
        but_tensors: whether only the tensors of the value were exported, without its other contents.
    """

    name: str
    but_tensors: bool = False


@dataclass
class ExportedState:
    """State dicts of models, and other values, keyed by their names in the state.

    Args:
        left_out: values that were omitted.
    """

    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    left_out: list[SkippedValue] = field(default_factory=list)


def export(storage: Storage, found: Manifest, file: str) -> list[SkippedValue]:
    """Write a checkpoint to a file, atomically. Return the values that were omitted.

    If the name ends in ``.safetensors``, the file contains only the tensors of the models, named as in their state
    dicts. With several models, the names are prefixed with the model's name in the state. With a suffix of
    ``torch.save``, the file contains ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 10,
    ...}``.

    Raises:
        Invalid: the suffix is not supported, the package safetensors is missing, or the checkpoint has no model.
        UnreadableCommit: the checkpoint is corrupted.
        OSError: reading or writing failed.
    """
    save = _safetensors() if format_of(file) is ExportFormat.SAFETENSORS else None
    state = whole_state(storage, found)
    partial = f"{file}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        if save is None:
            torch.save(state.models | state.others, partial)
        else:
            save(_named(state.models), partial, metadata={"format": "pt"})
        os.replace(partial, file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        if isinstance(error, OSError | Invalid) or not isinstance(error, Exception):
            raise
        # torch and safetensors raise exceptions of their own types if the disk is full, not OSError.
        raise OSError(
            f"{file} can't be written ({type(error).__name__}: {error}): check that the disk has enough free space"
        ) from error
    return state.left_out


def _safetensors() -> Callable[..., None]:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise Invalid(
            "the safetensors package is not installed, so no .safetensors file can be written: run pip install"
            " safetensors, or use a file name such as state.pt"
        ) from error
    save: Callable[..., None] = save_file
    return save


def _named(models: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the models' tensors by name. Tensors that share memory are copied, because safetensors rejects them."""
    found: dict[str, torch.Tensor] = {}
    used: set[int] = set()
    for part, model in models.items():
        for key, value in model.items():
            if isinstance(value, torch.Tensor):
                tensor = value.contiguous()
                name = f"{part}.{key}" if len(models) > 1 else key
                found[name] = tensor.clone() if tensor.data_ptr() in used else tensor
                used.add(tensor.data_ptr())
    if not found:
        raise Invalid(
            "the checkpoint contains no model, so no .safetensors file can be written: use a file name such as"
            " state.pt"
        )
    return found


def whole_state(storage: Storage, found: Manifest) -> ExportedState:
    """Read the whole state from a checkpoint. The checksums of all files are verified.

    Raises:
        UnreadableCommit: the checkpoint is corrupted, or lacks the sizes of an optimizer's groups.
        OSError: reading failed.
    """
    tensors = _whole_tensors(storage, found)
    made = ExportedState()
    for each in found.pickled:
        kind, _, name = each.partition(".")
        kept = kind == "structures" and any(part == name for part, _ in tensors)
        made.left_out.append(SkippedValue(name, kept))
    for name, text in found.values.items():
        _take(made, name, functools.partial(_decoded, text))
    parts = {each.part for each in found.tensors}
    for name in [*found.structures, *sorted(parts - found.structures.keys())]:
        mine = {key: tensor for (part, key), tensor in tensors.items() if part == name}
        structure = _decoded(found.structures[name]) if name in found.structures else None
        _take_part(made, found, name, structure, mine)
    return made


def _take(made: ExportedState, name: str, value: Callable[[], Any]) -> None:
    try:
        made.others[name] = _portable(value())
    except _NotPortable:
        made.left_out.append(SkippedValue(name))


def _take_part(
    made: ExportedState,
    found: Manifest,
    name: str,
    structure: Any,
    tensors: dict[str, torch.Tensor],
) -> None:
    kinds = structure.keys() if isinstance(structure, dict) else set()
    if {"names", "opaque"} <= kinds:
        described = model_state.described(structure, tensors)
        made.models[name] = {}
        for key, value in described.items():
            try:
                made.models[name][key] = _portable(value)
            except _NotPortable:
                made.left_out.append(SkippedValue(f"{name}.{key}"))
    elif {"origins", "options"} <= kinds:
        if name not in found.group_sizes:
            raise UnreadableCommit(
                f"the manifest lacks the parameter groups of optimizer {name}", RESTORE
            )
        sizes = found.group_sizes[name]
        _take(made, name, lambda: _portable(optimizer_state.described(structure, sizes, tensors)))
    elif tensors:  # Unknown kind or pickled values: export the tensors only.
        described = _by_path(found, name, tensors)
        flat = all(isinstance(each, torch.Tensor) for each in described.values())
        (made.models if flat else made.others)[name] = described
    elif name in found.structures:
        known = structure.get("dict", structure) if kinds == {"dict"} else structure
        _take(made, name, lambda: known)


def _by_path(found: Manifest, part: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for each in found.tensors:
        if each.part == part and each.path[0] != _OUTSIDE:
            *above, last = each.path[1:]
            inside = made
            for key in above:
                inside = inside.setdefault(str(key), {})
            inside[str(last)] = tensors[each.key]
    return made


def _whole_tensors(storage: Storage, found: Manifest) -> dict[Key, torch.Tensor]:
    check_ranges(found.tensors)
    whole: dict[Key, torch.Tensor] = {}
    for file, tensors in by_file(found.tensors).items():
        for stored, tensor in read_file(storage, found, file, tensors):
            key = stored.part, stored.key
            if stored.rows is None:
                whole[key] = tensor
                continue
            if key not in whole:
                whole[key] = torch.empty(
                    stored.shape, dtype=dtype_named(stored.dtype), device="cpu"
                )
            whole[key][stored.rows.begin : stored.rows.end] = tensor
    for stored in found.tensors:
        if stored.rows is not None and stored.rows.sizes is not None:
            key = stored.part, stored.key
            whole[key] = whole[key].view(stored.rows.sizes)
    return whole


def _decoded(text: Any) -> Any:
    try:
        return from_plain(text)
    except CorruptedData as error:
        raise UnreadableCommit(f"the manifest is corrupted: {error}", RESTORE) from error


class _NotPortable(Exception):
    """Error raised for a value that ``torch.load`` does not load by default."""


_ATOMS = (
    int, float, complex, str, bool, bytes, type(None), torch.Tensor, torch.dtype, torch.device, torch.Size,
)  # fmt: skip


def _portable(value: Any) -> Any:
    """Convert a value to types that ``torch.load(..., weights_only=True)`` accepts.

    Raises:
        _NotPortable: the value has another type.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in (list, tuple, set):
        return kind(map(_portable, value))
    if kind in (OrderedDict, Counter):
        return kind({_portable(key): _portable(each) for key, each in value.items()})
    if isinstance(value, dict):  # `Index`, a subclass of dict, becomes a plain dict.
        return {_portable(key): _portable(each) for key, each in value.items()}
    raise _NotPortable
