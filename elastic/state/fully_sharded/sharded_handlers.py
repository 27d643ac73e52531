"""Handlers of the parts of a state that are sharded by rows.

Values that all ranks share (buffers, parameters that are not sharded, step counters, options) are committed and sent
like those of any other state. `sharded_commits` handles the sharded tensors, for which the handlers provide this rank's
rows by name.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from elastic.collectives.dtensor import is_dtensor
from elastic.errors import Fixed, Invalid, NotElastic
from elastic.sharding import fsdp2
from elastic.sharding.row_layout import ShardedTensor
from elastic.sharding.shard_division import Division
from elastic.state.handlers.model_state import ModelStateHandler
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.snapshots.state_structure import StateStructure, tensors_and_structure


@dataclass(frozen=True)
class RowSpec:
    """Specification of a tensor that is sharded by rows.

    Args:
        shape: shape of the whole tensor. Its first dimension is divided.
        dtype: dtype of the tensor.
        plain: whether the optimizer stores this rank's rows as a plain tensor instead of a DTensor.
        sizes: if rows are the elements of a flattened tensor, the shape of that tensor.
        on_host: whether the tensor is in host memory even if its parameter is on a GPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    plain: bool = False
    sizes: tuple[int, ...] | None = None
    on_host: bool = False

    @property
    def row_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape[1:]:
            size *= length
        return size

    def tensor(self, name: str) -> ShardedTensor:
        """Return the description of this tensor that `elastic.sharding` uses."""
        return ShardedTensor(name, self.shape[0] if self.shape else 1, self.row_bytes)

    def local(self, rows: int, device: torch.device) -> torch.Tensor:
        return torch.empty((rows, *self.shape[1:]), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class LiveShard:
    """Live tensor with this rank's rows, which the script trains."""

    local: torch.Tensor
    spec: RowSpec


class Sharded(Protocol):
    """Interface of a sharded model or optimizer in a state, used by `ShardedCommits`.

    ``RowSpec.tensor`` determines which rows of a tensor each shard contains.
    """

    name: str
    everywhere: bool  # whether all ranks have tensors of the same names, each with different rows

    @property
    def position(self) -> tuple[int, int] | None:
        """Return this rank's shard and the current number of shards, or None if both are those of the trained model."""

    def live_shards(self) -> dict[str, LiveShard]:
        """Return the live tensors with this rank's rows, by name."""

    def device_of(self, key: str) -> torch.device:
        """Return the device on which to receive this rank's rows of a tensor that does not exist yet."""

    def recognized(self, key: str, spec: RowSpec) -> RowSpec:
        """Return the description of a tensor from a checkpoint, in the form that this part uses."""

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        """Adopt this rank's shard in another world.

        Returns the tensors for the rows of the new shard, by name. They are uninitialized. `place_shards` sets the rows
        of other tensors.
        """

    def place_shards(self, found: dict[str, tuple[RowSpec, torch.Tensor]]) -> None:
        """Set this rank's rows, by name, after they have been received."""

    def abandon_pass(self) -> None:
        """Discard the gathered parameters and gradients of an interrupted forward or backward pass."""


class FullyShardedHandler(ModelStateHandler):
    """Handler of a model to which ``fully_shard`` was applied."""

    everywhere = True

    @property
    def position(self) -> tuple[int, int]:
        shards, shard = fsdp2.shards_of(fsdp2.mesh_of(self.model))
        return shard, shards

    def _adopt_value(self) -> None:
        self._groups = fsdp2.groups(self.model)
        self._sharded = fsdp2.sharded_params(self.model)
        self._row_specs: dict[str, RowSpec] = {}
        super()._adopt_value()
        self._followed = self._parameters()
        self._structure = StateStructure(self.model, tensors_and_structure(self.model))

    def _parameters(self) -> dict[str, torch.Tensor]:
        fsdp2.reshard(self._groups)
        return dict(self.model.named_parameters(remove_duplicate=False))

    def check_parameters(self) -> None:
        """Check that the model still has the parameters that it had when the state was created.

        Raises:
            NotElastic: a parameter was replaced, added or removed.
        """
        fsdp2.reshard(self._groups)
        if self._structure.tensors() is not None:
            return  # the modules and their parameters are the same
        present, before = self._parameters(), self._followed
        for name in {**before, **present}:
            if present.get(name) is not before.get(name):
                raise NotElastic(
                    f"{self.what} replaced or removed the parameter {name} after the state was created, so the"
                    " parameter can't be resharded: change modules and apply fully_shard before you create the"
                    " optimizer and the state",
                    Fixed.PARAMETERS,
                )

    def live(self) -> tuple[Any, dict[str, torch.Tensor]]:
        fsdp2.reshard(self._groups)
        structure, tensors = super().live()
        return structure, {n: t for n, t in tensors.items() if not is_dtensor(t)}

    def seems_unchanged(self) -> bool:
        return False  # too few values are replicated for detecting changes to pay off

    def layout(self) -> list[str]:
        return [f"{self.name} is sharded by rows", *super().layout()]

    def live_shards(self) -> dict[str, LiveShard]:
        found = {}
        for name, param in self._sharded.items():
            local, spec = local_of(param.sharded_param), self._row_specs.get(name)
            if spec is None or spec.dtype != local.dtype:
                # the shape of the whole parameter
                spec = RowSpec(tuple(param.sharded_param.shape), local.dtype)
                self._row_specs[name] = spec
            found[name] = LiveShard(local, spec)
        return found

    def device_of(self, key: str) -> torch.device:
        return local_of(self._sharded[key].sharded_param).device

    def recognized(self, key: str, spec: RowSpec) -> RowSpec:
        return spec

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        """Move the parameters to another mesh.

        All ranks must call this method.

        This is necessary even if the ranks have not changed: groups of some of the ranks, such as those of a mesh of
        replicas, end with their world, and a world that failed early may have left another mesh on some ranks only.
        """
        model, size = self.model, len(division.order)
        if not (division.unchanged and fsdp2.is_over_all(model, size, division.shard)):
            like = fsdp2.mesh_of(model)
            if division.replicated:
                mesh = fsdp2.make_hybrid_mesh(like, division.order, division.shards)
            else:
                mesh = fsdp2.make_mesh(like, division.order)
            fsdp2.remesh(model, mesh)
        return {name: each.local for name, each in self.live_shards().items()}

    def place_shards(self, found: dict[str, tuple[RowSpec, torch.Tensor]]) -> None:
        """Do nothing, because the rows were received directly into the parameters."""

    def abandon_pass(self) -> None:
        fsdp2.abandon(self.model)
        self.restore_nothing()


class ShardedOptimizerHandler(OptimizerStateHandler):
    """Handler of an optimizer of sharded parameters.

    Entries with the parameter's shape are sharded like the parameter.
    """

    everywhere = True
    _specs: dict[str, RowSpec]
    _seen: list[torch.Tensor]  # parameters and entries that `_specs` describes

    @property
    def position(self) -> tuple[int, int] | None:
        return None

    def _adopt_value(self) -> None:
        self.forget_specs()
        super()._adopt_value()
        if type(self.value).state_dict is not torch.optim.Optimizer.state_dict:
            raise NotElastic(
                f"{self.what} is a {type(self.value).__name__} that overrides state_dict(), so its state can't"
                " be resharded: use an optimizer that does not override state_dict()",
                Fixed.OPTIMIZER,
            )

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        structure, tensors = super().pack()
        self._check_values(structure["values"])
        sharded = self._row_specs(tensors)
        return structure, {name: each for name, each in tensors.items() if name not in sharded}

    def _check_values(self, values: dict[int, Any]) -> None:
        """Raise Invalid if an entry other than a tensor, such as a list, contains tensors that need resharding."""
        parameters = list(self.parameters()) if values else []
        for number, entries in values.items():
            for key, entry in entries.items() if self.is_divided(parameters[number]) else ():
                if any(
                    isinstance(each, torch.Tensor) and each.dim() for each in tree_leaves(entry)
                ):
                    raise Invalid(
                        f"{self.what} keeps tensors within {key!r}, which is a {type(entry).__name__}, but only tensors"
                        " and scalars can be resharded: use an optimizer such as SGD, Adam or AdamW"
                    )

    def is_divided(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank holds only a part of the parameter's entries."""
        return is_dtensor(parameter)

    def bytes_to_come(self) -> int:
        return 0  # The resharding allocates the memory for received rows.

    def live_shards(self) -> dict[str, LiveShard]:
        _, tensors = super().pack()
        return {
            name: LiveShard(tensors[name] if spec.plain else local_of(tensors[name]), spec)
            for name, spec in self._row_specs(tensors).items()
        }

    def _row_specs(self, tensors: dict[str, torch.Tensor]) -> dict[str, RowSpec]:
        parameters = list(self.parameters())
        seen = [*parameters, *tensors.values()]
        if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._specs, self._seen = self._describe(tensors, parameters), seen
        return self._specs

    def _describe(
        self, tensors: dict[str, torch.Tensor], parameters: list[torch.Tensor]
    ) -> dict[str, RowSpec]:
        found = {}
        for name, entry in tensors.items():
            number, _, key = name.partition(".")
            parameter = parameters[int(number)]
            if not self.is_divided(parameter):
                continue
            alike = is_dtensor(entry)
            if alike and entry.shape == parameter.shape and fsdp2.by_rows(entry):
                found[name] = RowSpec(tuple(entry.shape), entry.dtype)
            elif not alike and entry.shape == local_of(parameter).shape:
                found[name] = RowSpec(tuple(parameter.shape), entry.dtype, plain=True)
            elif alike or entry.dim():
                raise Invalid(
                    f"{self.what} keeps {key} of shape {list(entry.shape)} for a fully sharded parameter of"
                    f" shape {list(parameter.shape)}, but only entries of the parameter's shape and scalars can"
                    " be resharded: use an optimizer such as SGD, Adam or AdamW"
                )
        return found

    def device_of(self, key: str) -> torch.device:
        # Models of a state may be on different devices, for example with CPUOffloadPolicy.
        parameter = self._parameter(int(key.partition(".")[0]))
        return local_of(parameter).device if is_dtensor(parameter) else parameter.device

    def _parameter(self, number: int) -> torch.Tensor:
        for group in self.value.param_groups:
            parameters: list[torch.Tensor] = group["params"]
            if number < len(parameters):
                return parameters[number]
            number -= len(parameters)
        raise IndexError(
            f"{self.what} has no parameter {number} in its param_groups: do not remove parameters after"
            " the state was created"
        )

    def recognized(self, key: str, spec: RowSpec) -> RowSpec:
        return spec

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        return {}

    def place_shards(self, found: dict[str, tuple[RowSpec, torch.Tensor]]) -> None:
        self.forget_specs()
        parameters = list(self.parameters())
        for name, (spec, local) in found.items():
            number, _, key = name.partition(".")
            parameter = parameters[int(number)]
            entries = self.value.state[parameter]
            present = entries.get(key)
            entries[key] = (
                local.to(parameter.device)
                if spec.plain
                else fsdp2.as_sharded(local, parameter, present)
            )

    def forget_specs(self) -> None:
        """At the next commit, describe the entries again, even if their objects have not changed."""
        self._specs, self._seen = {}, []

    def parameters(self) -> Iterator[torch.Tensor]:
        for group in self.value.param_groups:
            yield from group["params"]

    def abandon_pass(self) -> None:
        self.abandon_step()


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's rows of a DTensor."""
    local: torch.Tensor = tensor._local_tensor
    return local


def trains_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter of the optimizer is a DTensor."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return any(map(is_dtensor, parameters))
