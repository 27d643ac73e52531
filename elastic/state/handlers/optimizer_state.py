"""Handler of optimizers: options of the parameter groups, and entries of each parameter.

Entries are created and removed during training. A restore removes entries that were created after the commit, and a
joining worker allocates the entries that it lacks. The optimizer is never stepped to create them: with weight decay, a
step changes weights even if gradients are zero. Options are sent even if there are no entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.state.handlers.part import Part
from elastic.state.handlers.python_values import Index
from elastic.state.handlers.tensor_spec import Destination, TensorSpec
from elastic.state.snapshots import change_detection
from elastic.state.snapshots.snapshot import dense
from elastic.state.snapshots.state_structure import plain

Groups = list[list[torch.Tensor]]


@dataclass
class Entries:
    """Structure of an optimizer's per-parameter entries: the names of the tensors, and where to find them."""

    # by tensor name: parameter number, key of the entry, device type
    origins: Index = field(default_factory=Index)
    # numbers of parameters with entries, even if the dict is empty
    owners: Index = field(default_factory=Index)
    # entries that are not plain tensors, by parameter number
    values: dict[int, Any] = field(default_factory=dict)
    # Entries whose key is not a parameter. Entries of former parameters are omitted: other workers have no name for
    # them.
    loose: dict[Any, Any] = field(default_factory=dict)
    # result of `traits_of`; None if there are Python values, so that the structure must be read at each commit
    traits: Any = None
    devices: list[torch.device] = field(default_factory=list)

    def tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
        """Return the current tensors by name, or None if entries have changed and the structure must be read again."""
        if self.traits is None or traits_of(optimizer) != self.traits:
            return None
        found: list[Any] = []
        for entries in optimizer.state.values():
            found += entries.values()
        if not all(isinstance(each, torch.Tensor) and plain(each) for each in found):
            return None
        if [each.device for each in found] != self.devices:
            return None
        tensors = [each if each.is_contiguous() else dense(each) for each in found]
        return dict(zip(self.origins, tensors, strict=True))


def traits_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return a value that changes if the parameters, their positions or the keys of their entries change."""
    parameters = [id(each) for group in optimizer.param_groups for each in group["params"]]
    return parameters, [
        (id(owner), *entries) if isinstance(entries, dict) else None
        for owner, entries in optimizer.state.items()
    ]


def entries_of(optimizer: torch.optim.Optimizer) -> tuple[Entries, dict[str, torch.Tensor]]:
    """Split an optimizer's state into a structure without tensors, and the live tensors by name."""
    found = Entries()
    tensors: dict[str, torch.Tensor] = {}
    numbers = {
        id(each): number
        for number, each in enumerate(
            each for group in optimizer.param_groups for each in group["params"]
        )
    }
    lasting = True
    state: dict[Any, Any] = optimizer.state
    for owner, entries in state.items():
        number = numbers.get(id(owner))
        if number is None:
            lasting = False
            if not isinstance(owner, torch.Tensor):
                found.loose[owner] = entries
        elif not isinstance(entries, dict):
            found.values[number] = entries
        else:
            found.owners[number] = True
            for key, entry in entries.items():
                if isinstance(entry, torch.Tensor) and plain(entry) and not entry.is_meta:
                    name = f"{number}.{key}"
                    tensors[name] = dense(entry)
                    found.origins[name] = number, key, entry.device.type
                    found.devices.append(entry.device)
                else:
                    found.values.setdefault(number, {})[key] = entry
    if lasting and not found.values and len(tensors) == len(found.devices):
        found.traits = traits_of(optimizer)
    return found, tensors


def _entries_alike(options: dict[str, Any]) -> int:
    """Estimate how many parameter-sized entries an optimizer of torch creates per parameter in its first step.

    The estimate only serves to allocate memory in advance.
    """
    if "betas" in options:
        return 3 if options.get("amsgrad") else 2
    momentum = options.get("momentum", 0)
    return int(isinstance(momentum, float | int) and momentum > 0) + ("alpha" in options)


def described(structure: Any, sizes: Sequence[int], tensors: dict[str, torch.Tensor]) -> Any:
    """Return an optimizer's commit in the form of its ``state_dict()``.

    Args:
        structure: structure that `OptimizerStateHandler.pack` has returned.
        sizes: number of parameters in each group.
        tensors: entries by name, such as ``3.exp_avg``. They may include other ranks' entries, which the structure
            lacks.
    """
    if "dict" in structure:
        return structure["dict"]
    state: dict[int, Any] = {number: {} for number in structure["owners"]}
    state.update({n: {**v} if isinstance(v, dict) else v for n, v in structure["values"].items()})
    for name, (number, key, _) in structure["origins"].items():
        state[number][key] = tensors[name]
    for name, entry in tensors.items():
        if name not in structure["origins"]:
            owner, _, key = name.partition(".")
            state.setdefault(int(owner), {})[key] = entry
    groups, first = [], 0
    for options, size in zip(structure["options"], sizes, strict=True):
        groups.append({**options, "params": list(range(first, first + size))})
        first += size
    return {"state": state, "param_groups": groups}


class OptimizerStateHandler(Part):
    """Handler of a ``torch.optim.Optimizer``. Restoring clears the gradients of all its parameters.

    If the class overrides ``state_dict()``, it may have additional state, so its own methods save and load it.
    """

    value: torch.optim.Optimizer

    def _adopt_value(self) -> None:
        change_detection.watch_optimizers()
        self._entries, _ = entries_of(self.value)
        self._by_dict = type(self.value).state_dict is not torch.optim.Optimizer.state_dict

    def layout(self) -> list[str]:
        sizes = [len(group["params"]) for group in self.value.param_groups]
        # a DistributedOptimizer has this attribute
        of_gradients = getattr(self.value, "gradient_layout", None)
        reduced = [] if of_gradients is None else of_gradients(self.name)
        return [f"{self.name} {type(self.value).__name__} groups {sizes}", *reduced]

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        if self._by_dict:
            return {"dict": self.value.state_dict()}, {}
        tensors = self._entries.tensors(self.value)
        if tensors is None:
            self._entries, tensors = entries_of(self.value)
        entries = self._entries
        structure = {
            "options": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.value.param_groups
            ],
            "owners": entries.owners,
            "values": entries.values,
            "origins": entries.origins,
            "loose": entries.loose,
            "passes": getattr(self.value, "backward_passes_per_step", None),
        }
        return structure, tensors

    def described(self, structure: Any, own: Groups, tensors: dict[str, torch.Tensor]) -> Any:
        return described(structure, [len(group) for group in own], tensors)

    def own(self) -> Groups:
        return [list(group["params"]) for group in self.value.param_groups]

    def before_restore(self, own: Groups) -> None:
        """Restore the committed parameter groups, with the parameters that they had."""
        groups = self.value.param_groups
        self._clear_gradients()  # clear also the gradients of groups that the restore removes
        del groups[len(own) :]
        groups.extend({} for _ in range(len(own) - len(groups)))
        for group, parameters in zip(groups, own, strict=True):
            group["params"] = list(parameters)

    def destinations(
        self, structure: Any, specs: dict[str, TensorSpec], *, restoring: bool
    ) -> dict[str, torch.Tensor | Destination]:
        where: dict[str, torch.Tensor | Destination] = dict.fromkeys(specs, Destination.NEW)
        parameters = list(self._parameters())
        for name, spec in specs.items():
            number, key, _ = structure["origins"][name]
            entries = self.value.state.get(parameters[number])
            entry = entries.get(key) if isinstance(entries, dict) else None
            if isinstance(entry, torch.Tensor) and plain(entry) and spec.fits(dense(entry)):
                where[name] = dense(entry)
        return where

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        if self._by_dict:
            self.value.state.clear()
            self.value.load_state_dict(structure["dict"])
        else:
            self._place_options(structure["options"])
            self._place_entries(structure, fresh)
        value: Any = self.value
        passes = structure.get("passes")
        if passes is not None and passes != getattr(value, "backward_passes_per_step", passes):
            value.set_backward_passes_per_step(passes)
        self.abandon_step()

    def abandon_step(self) -> None:
        """Discard the gradients of an unfinished step."""
        self._clear_gradients()
        reset_passes = getattr(self.value, "_reset_passes", None)
        if reset_passes is not None:
            reset_passes()

    def _place_options(self, options: list[dict[str, Any]]) -> None:
        for group, wanted in zip(self.value.param_groups, options, strict=True):
            for key in [key for key in group if key != "params" and key not in wanted]:
                del group[key]
            for key, value in wanted.items():
                present = group.get(key)
                if (
                    isinstance(present, torch.Tensor)
                    and isinstance(value, torch.Tensor)
                    and present.shape == value.shape
                ):
                    # Write in place, because a captured or compiled step reads this tensor.
                    present.copy_(value)
                else:
                    group[key] = value

    def _place_entries(self, structure: Any, fresh: dict[str, torch.Tensor]) -> None:
        state, parameters = self.value.state, list(self._parameters())
        wanted: dict[int, set[Any]] = {}
        for number, key, _ in structure["origins"].values():
            wanted.setdefault(number, set()).add(key)
        numbers = {id(each): number for number, each in enumerate(parameters)}
        for owner in list(state):
            if numbers.get(id(owner)) not in structure["owners"]:
                del state[owner]
        for number in structure["owners"]:
            entries = state.setdefault(parameters[number], {})
            for key in [key for key in entries if key not in wanted.get(number, ())]:
                del entries[key]
        for number, kept in structure["values"].items():
            if number in structure["owners"]:
                state[parameters[number]].update(kept)
            else:
                state[parameters[number]] = kept  # the entry of this parameter is not a dict
        for name, tensor in fresh.items():
            number, key, device_type = structure["origins"][name]
            owner = parameters[number]
            # Adam's step counter may be in host memory even if the parameter is on a GPU.
            state[owner][key] = tensor if device_type == "cpu" else tensor.to(owner.device)
        state.update(structure["loose"])

    def bytes_to_come(self) -> int:
        if self.value.state:
            return 0
        return sum(
            _entries_alike(group) * each.nbytes
            for group in self.value.param_groups
            for each in group["params"]
            if each.requires_grad and each.device.type == "cpu"
        )

    def bytes_of_gradients(self) -> int:
        # a DistributedOptimizer has this attribute
        of_gradients = getattr(self.value, "gradient_bytes", None)
        return 0 if of_gradients is None else of_gradients()

    def committed(self) -> dict[str, torch.Tensor]:
        """Return the committed tensors. Their names contain parameter names if the optimizer stores these."""
        named = getattr(self.value, "parameter_name", None)
        if named is None:
            return super().committed()
        names = [named(each) for each in self._parameters()]
        found = {}
        for name, tensor in super().committed().items():
            number, _, key = name.partition(".")
            found[f"{names[int(number)]}.{key}"] = tensor
        return found

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.value.param_groups:
            yield from group["params"]

    def _clear_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None
