"""Handler of models: parameters, buffers and extra state.

This module accesses the modules directly, not through ``state_dict()``.

Commits, restores and transfers include:

- all parameters, including frozen ones, and their ``requires_grad``;
- all buffers;
- ``get_extra_state()``, and entries that an overridden ``state_dict()`` adds;
- the ``training`` mode of all modules: a peer may be lost during evaluation, and a joining worker starts in training
  mode.

Buffers registered with ``persistent=False`` are committed and restored, and sent to workers that have the same buffer
in the same shape. They are not part of the layout or of digests, because models may create them on first use. Meta
tensors have no values and are ignored. The shape of a buffer may change, as in observers. The shape of a parameter must
be equal on all workers.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from elastic.errors import Invalid, StateMismatch
from elastic.state.handlers.extra_entries import EXTRA, ExtraEntries
from elastic.state.handlers.part import Part
from elastic.state.handlers.python_values import Index
from elastic.state.handlers.tensor_spec import Destination, TensorSpec
from elastic.state.snapshots.snapshot import dense, same_bits
from elastic.state.snapshots.state_structure import (
    ModelTensors,
    StateStructure,
    plain,
    tensors_and_structure,
)


class ModelStateHandler(Part):
    """Handler of a ``torch.nn.Module``. Restoring clears the gradients of all its parameters."""

    value: torch.nn.Module

    @property
    def model(self) -> torch.nn.Module:
        """Return the module that contains the tensors."""
        return self.value

    def _adopt_value(self) -> None:
        for name, tensor in tensors_and_structure(self.model).tensors():
            if is_lazy(tensor):
                raise Invalid(
                    f"{self.full_name(name)} has no shape yet: run one forward pass before you pass the model to a"
                    " state"
                )
        self._gradients: list[tuple[int, int, int]] = []
        self._own_entries = ExtraEntries(self.model)
        self._dissect()

    def _dissect(self) -> ModelTensors:
        anatomy = tensors_and_structure(self.model)
        self._skeleton = StateStructure(self.model, anatomy)
        self._names = Index(
            parameters=list(anatomy.parameters),
            persistent=anatomy.persistent,
            absent=anatomy.absent,
            aliases=anatomy.aliases,
        )
        return anatomy

    def seems_unchanged(self) -> bool:
        """Return False if a gradient was replaced: a custom optimizer may have stepped after that backward pass."""
        gradients = [
            (id(each), each._version, each.data_ptr() if plain(each) else 0)
            for module in self._skeleton.modules
            for parameter in module._parameters.values()
            if parameter is not None
            and (each := parameter.grad) is not None
            and not each.is_inference()
        ]
        before, self._gradients = self._gradients, gradients
        return gradients == before

    def restore_nothing(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def layout(self) -> list[str]:
        anatomy = tensors_and_structure(self.model)
        lines = [
            f"{self.full_name(name)} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in anatomy.parameters.items()
        ]
        lines += [f"{self.full_name(name)} buffer" for name in anatomy.persistent]
        lines += [
            f"{self.full_name(name)} is {self.full_name(first)}"
            for name, first in anatomy.aliases.items()
        ]
        return lines

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        structure, tensors = self.live()
        return structure, {name: dense(tensor) for name, tensor in tensors.items()}

    def live(self) -> tuple[Any, dict[str, torch.Tensor]]:
        found = self._skeleton.tensors()
        if found is None:
            found = dict(self._dissect().tensors())
        tensors, opaque = {}, {}
        for name, tensor in found.items():
            if not plain(tensor):
                opaque[name] = tensor.detach().clone()
            elif not tensor.is_meta:
                tensors[name] = tensor if tensor.is_contiguous() else dense(tensor)
        extra = self._skeleton.extra
        structure = {
            "names": self._names,
            "frozen": tuple(
                name for name in self._names["parameters"] if not found[name].requires_grad
            ),
            "evaluating": self._skeleton.evaluating(),
            "opaque": Opaque(opaque),
            "extra": {path: module.get_extra_state() for path, module in extra.items()},
            "own": Opaque(self._own_entries.present()),
        }
        return structure, tensors

    def destinations(
        self, structure: Any, specs: dict[str, TensorSpec], *, restoring: bool
    ) -> dict[str, torch.Tensor | Destination]:
        anatomy = tensors_and_structure(self.model)
        live = dict(anatomy.tensors())
        persistent = {*structure["names"]["parameters"], *structure["names"]["persistent"]}
        gone = [
            name for name in specs if name not in live and name not in anatomy.absent
            and (restoring or name in persistent)
        ]  # fmt: skip
        if gone:
            raise StateMismatch(
                f"the commit contains {self.full_name(gone[0])}, but the model no longer has this tensor: call"
                " commit() after you change a model, or pass a new model to the state"
            )
        shared = self._newly_shared(live) if restoring else set()
        where: dict[str, torch.Tensor | Destination] = {}
        for name, spec in specs.items():
            tensor = live.get(name)
            if tensor is not None and name not in shared and plain(tensor):
                view = dense(tensor)
                if spec.fits(view) and not tensor.is_meta:
                    where[name] = view
                    continue
            transient = not restoring and name not in persistent
            where[name] = Destination.NOWHERE if transient else Destination.NEW
        return where

    def _newly_shared(self, live: dict[str, torch.Tensor]) -> set[str]:
        copies = self.snapshot.bank.copies
        tensors = {name: tensor for name, tensor in live.items() if plain(tensor)}
        storages = {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items()}
        users = Counter(storages.values())
        return {
            name
            for name, storage in storages.items()
            if users[storage] > 1
            and name in copies
            and not copies[name].same_storage(dense(tensors[name]))
        }

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        anatomy = tensors_and_structure(self.model)
        for name, tensor in {**fresh, **structure["opaque"].tensors}.items():
            if name in anatomy.parameters:
                parameter = anatomy.parameters[name]
                tensor = tensor.to(parameter.device)
                if plain(tensor) and tensor.shape != parameter.shape and not restoring:
                    tensor = tensor.expand(parameter.shape).contiguous()
                parameter.data = tensor
            elif name in anatomy.owners:
                module, key = anatomy.owners[name]
                live = module._buffers[key]
                module._buffers[key] = tensor.to(self._device() if live is None else live.device)
        for name in structure["names"]["absent"]:
            if name in anatomy.owners and (restoring or name in anatomy.persistent):
                module, key = anatomy.owners[name]
                if module._buffers[key] is not None:
                    module._buffers[key] = None
        for path, state in structure["extra"].items():
            if path in anatomy.extra:
                anatomy.extra[path].set_extra_state(state)
        self._own_entries.load(structure["own"].tensors)
        frozen = {*structure["frozen"]}
        for name in structure["names"]["parameters"]:
            live = anatomy.parameters.get(name)
            if live is not None and live.requires_grad == (name in frozen):
                live.requires_grad_(name not in frozen)
        evaluating = {*structure["evaluating"]}
        for path, module in self.model.named_modules():
            if getattr(module, "training", None) == (path in evaluating):
                module.training = path not in evaluating
        for parameter in anatomy.parameters.values():
            parameter.grad = None

    def described(self, structure: Any, own: Any, tensors: dict[str, torch.Tensor]) -> Any:
        return described(structure, tensors)

    def _device(self) -> torch.device:
        return next((each.device for each in self.model.parameters()), torch.device("cpu"))

    def equal_everywhere(self, structure: Any) -> set[str] | None:
        return set(structure["names"]["parameters"])

    def committed(self) -> dict[str, torch.Tensor]:
        return self.digested() | self.digested_buffers()

    def digested(self) -> dict[str, torch.Tensor]:
        return self._committed("parameters")

    def digested_buffers(self) -> dict[str, torch.Tensor]:
        return self._committed("persistent")

    def _committed(self, kind: str) -> dict[str, torch.Tensor]:
        bank = self.snapshot.bank
        buffers = bank.buffers()
        return {name: buffers[name] for name in bank.extra[0]["names"][kind] if name in buffers}

    def differing(self) -> list[str]:
        live = tensors_and_structure(self.model).parameters
        return [
            self.full_name(name)
            for name, buffer in self.digested().items()
            if name in live and not same_bits(dense(live[name]), buffer)
        ]

    def full_name(self, name: str) -> str:
        """Return the full name of a tensor of this model, as shown to the user."""
        return f"{self.name}.{name}" if self.name else name


def described(structure: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return a model's commit in the form of its ``state_dict()``.

    Args:
        structure: structure that `ModelStateHandler.live` has returned.
    """
    names = structure["names"]
    here = {**tensors, **structure["opaque"].tensors}
    found: dict[str, Any] = {
        n: here[n] for n in [*names["parameters"], *names["persistent"]] if n in here
    }
    found |= {alias: here[name] for alias, name in names["aliases"].items() if name in here}
    for path, extra in structure["extra"].items():
        found[f"{path}.{EXTRA}" if path else EXTRA] = extra
    for path, added in structure["own"].tensors.items():
        found |= {f"{path}.{key}" if path else key: value for key, value in added.items()}
    return found


class Opaque:
    """Wrapper for tensors without strides, and for values that contain such tensors.

    Copies of the wrapper clone the tensors, because some layouts do not support deepcopy.
    """

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> Opaque:
        return Opaque(tree_map(lambda each: _clone(each, memo), self.tensors))


def _clone(value: Any, memo: dict[int, Any]) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value, memo)
