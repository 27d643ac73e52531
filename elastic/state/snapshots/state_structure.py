"""Cache of the locations of a model's tensors, by name.

Collecting the tensors means walking through all modules and building names, which is too slow for a commit after every
step. `StateStructure` caches the locations and checks at each commit that they are still valid: the same modules with
tensors under the same keys, shared in the same way. It refers only to modules, so replaced tensors are found as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch


@dataclass
class ModelTensors:
    """Tensors of a model by name. Shared modules and parameters appear once, under their first name."""

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    # buffers that are in the state dict
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    # buffers registered with persistent=False
    transient: dict[str, torch.Tensor] = field(default_factory=dict)
    # names of buffers registered with the value None
    absent: list[str] = field(default_factory=list)
    # names of the buffers in the state dict, including None buffers
    persistent: list[str] = field(default_factory=list)
    # first name of each tied parameter, keyed by its other names
    aliases: dict[str, str] = field(default_factory=dict)
    owners: dict[str, tuple[torch.nn.Module, str]] = field(default_factory=dict)
    extra: dict[str, torch.nn.Module] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.parameters.items()
        yield from self.buffers.items()
        yield from self.transient.items()


def tensors_and_structure(model: torch.nn.Module) -> ModelTensors:
    found = ModelTensors()
    first: dict[int, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = prefix + key
            if id(parameter) in first:
                found.aliases[name] = first[id(parameter)]
                continue
            first[id(parameter)] = name
            found.parameters[name] = parameter
        unsaved = _unsaved(module)
        for key, buffer in module._buffers.items():
            name = prefix + key
            found.owners[name] = module, key
            if key not in unsaved:
                found.persistent.append(name)
            if buffer is None:
                found.absent.append(name)
            else:
                (found.transient if key in unsaved else found.buffers)[name] = buffer
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            found.extra[path] = module
    return found


_registries_of = attrgetter("_modules", "_parameters", "_buffers")


def plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is strided. Sparse and quantized tensors are copied as objects."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_mkldnn


class StateStructure:
    """Cached locations of a model's tensors. `tensors` returns the current tensors until the model is rebuilt."""

    def __init__(self, model: torch.nn.Module, anatomy: ModelTensors) -> None:
        self.extra = anatomy.extra
        named = dict(model.named_modules())
        self.modules = list(named.values())
        self._paths = list(named)
        self._with_buffers = [module for module in self.modules if module._buffers]
        # Modules that override these methods, such as scripted ones, are queried each time.
        self._lasting = all(
            type(module).named_modules is torch.nn.Module.named_modules for module in self.modules
        ) and all(
            type(registry) is dict for module in self.modules for registry in _registries_of(module)
        )
        self._traits: list[Any] = []
        self._places: list[tuple[str, int]] = []
        if self._lasting:
            self._traits, registered = self._look()
            place = {id(value): number for number, value in enumerate(registered)}
            self._places = [(name, place[id(tensor)]) for name, tensor in anatomy.tensors()]

    def tensors(self) -> dict[str, torch.Tensor] | None:
        """Return all tensors of the model by name, as in `ModelTensors.tensors`, or None if the model was rebuilt."""
        if not self._lasting:
            return None
        traits, registered = self._look()
        if traits != self._traits:
            return None
        return {name: registered[number] for name, number in self._places}

    def evaluating(self) -> tuple[str, ...]:
        """Return the paths of the modules that are not in training mode."""
        return tuple(
            path
            for path, module in zip(self._paths, self.modules, strict=True)
            if not getattr(module, "training", True)  # frozen scripted modules lack this attribute
        )

    def _look(self) -> tuple[list[Any], list[Any]]:
        """Return the traits of the model on which the cached locations depend, and all registered objects.

        The traits contain the IDs (``id()``) of the objects. If the ID of a deleted tensor is reused for a new one, the
        locations remain valid, because they depend only on the order of the IDs. Modules are referenced, so their IDs
        cannot be reused.
        """
        registries = list(chain.from_iterable(map(_registries_of, self.modules)))
        registered = list(chain.from_iterable(map(dict.values, registries)))
        traits = [
            list(map(len, registries)),
            list(chain.from_iterable(registries)),
            list(map(id, registered)),
            list(map(type, self.modules)),
            [frozenset(_unsaved(module)) for module in self._with_buffers],
        ]
        return traits, registered


def _unsaved(module: torch.nn.Module) -> Any:
    return getattr(module, "_non_persistent_buffers_set", ())
