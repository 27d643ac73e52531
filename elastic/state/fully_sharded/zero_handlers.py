"""Handlers of optimizers whose state entries are divided among the ranks (ZeRO-1).

Options are the same on all ranks. Each entry of a ZeroRedundancyOptimizer belongs to one rank and is committed and sent
as a whole. In a DistributedOptimizer with ``zero=1``, each rank has some elements of every entry.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from elastic.collectives.dtensor import is_dtensor
from elastic.errors import Invalid
from elastic.runtime import lifecycle
from elastic.sharding import zero
from elastic.sharding.row_layout import rows_of
from elastic.sharding.shard_division import Division
from elastic.sharding.zero_partition import Partition, PartitionedTensor
from elastic.state.fully_sharded.sharded_handlers import LiveShard, RowSpec, ShardedOptimizerHandler
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.handlers.python_values import Index
from elastic.state.snapshots.state_structure import plain


@dataclass(frozen=True, kw_only=True)
class EntrySpec(RowSpec):
    """Specification of an entry that one rank holds entirely, for the parameter ``number``.

    Its rows are its elements.
    """

    partition: Partition
    number: int

    def tensor(self, name: str) -> PartitionedTensor:
        return PartitionedTensor(
            name, self.shape[0], self.row_bytes, partition=self.partition, number=self.number
        )


class ZeroOptimizerHandler(OptimizerStateHandler):
    """Handler of a ``ZeroRedundancyOptimizer``."""

    value: Any
    everywhere = False

    @property
    def position(self) -> tuple[int, int]:
        return self._position

    def _adopt_value(self) -> None:
        super()._adopt_value()
        self._by_dict = False
        self._position = self.value.rank, self.value.world_size
        self._partition = zero.partition_of(self.value)

    def layout(self) -> list[str]:
        kind = type(self.value.optim).__name__
        return [f"{line} of {kind}" for line in super().layout()]

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        structure = {
            "options": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.value.param_groups
            ],
            "owners": Index(),
            "values": {},
            "origins": Index(),
            "loose": {},
        }
        return structure, {}

    def bytes_to_come(self) -> int:
        return 0  # The resharding allocates the memory for received entries.

    def live_shards(self) -> dict[str, LiveShard]:
        optimizer = self.value
        partition = zero.partition_of(optimizer)
        if partition == self._partition:
            # Keep the optimizer object, because it has cached the owners of the parameters.
            partition = self._partition
        self._partition = partition
        if not zero.steps_shard(optimizer, partition, *self.position):
            raise Invalid(
                f"{self.what} lacks parameters that were assigned to this rank, because parameters were added or"
                " replaced after this world began: call add_param_group() before elastic.run"
            )
        found = {}
        for number, parameter in enumerate(zero.parameters(optimizer)):
            for key, entry in optimizer.optim.state.get(parameter, {}).items():
                if not _can_be_sent(key, entry):
                    raise Invalid(
                        f"{self.what} keeps {key!r}, which is not a dense tensor on one device, so it can't be"
                        " redistributed when the world changes: use an optimizer such as SGD, Adam or AdamW"
                    )
                spec = EntrySpec(
                    (entry.numel(),),
                    entry.dtype,
                    plain=True,
                    sizes=tuple(entry.shape),
                    on_host=entry.device.type == "cpu",
                    partition=partition,
                    number=number,
                )
                found[f"{number}.{key}"] = LiveShard(entry.detach().reshape(-1), spec)
        return found

    def device_of(self, key: str) -> torch.device:
        return torch.device("cpu")  # `place_shards` moves entries to the device of their parameter.

    def recognized(self, key: str, spec: RowSpec) -> RowSpec:
        number, known = int(key.partition(".")[0]), dataclasses.asdict(spec)
        return EntrySpec(**known, partition=zero.partition_of(self.value), number=number)

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        """Make the optimizer step this rank's shard in another world."""
        zero.repartition(self.value, division.order, division.rank)
        self._position = division.shard, division.shards
        return {}

    def place_shards(self, found: dict[str, tuple[RowSpec, torch.Tensor]]) -> None:
        """Replace all entries of the optimizer with the given entries of this rank's parameters, keyed by name."""
        state, parameters = self.value.optim.state, zero.parameters(self.value)
        shard, shards = self.position
        state.clear()
        with torch.no_grad():
            for name, (spec, local) in found.items():
                assert isinstance(spec, EntrySpec) and spec.sizes is not None
                if spec.partition.owners(shards)[spec.number] != shard:
                    continue
                parameter, entry = parameters[spec.number], local.view(spec.sizes)
                if not spec.on_host:
                    entry = entry.to(parameter.device)
                if entry.shape == parameter.shape and not parameter.is_contiguous():
                    entry = torch.empty_like(parameter, dtype=entry.dtype).copy_(entry)
                state[parameter][name.partition(".")[2]] = entry

    def abandon_pass(self) -> None:
        self.abandon_step()


class DividedOptimizerHandler(ShardedOptimizerHandler):
    """Handler of a ``DistributedOptimizer`` with ``zero=1``."""

    value: Any

    @property
    def position(self) -> tuple[int, int]:
        return self._position

    def _adopt_value(self) -> None:
        self.forget_specs()
        OptimizerStateHandler._adopt_value(self)
        self._by_dict = False
        rt = lifecycle.active()
        order = self.value.zero_order
        self._position = order.index(0 if rt is None else rt.place.rank), len(order)

    def is_divided(self, parameter: torch.Tensor) -> bool:
        return True

    def _describe(
        self, tensors: dict[str, torch.Tensor], parameters: list[torch.Tensor]
    ) -> dict[str, RowSpec]:
        found = {}
        for name, entry in tensors.items():
            number, _, key = name.partition(".")
            parameter = parameters[int(number)]
            elements = parameter.numel()
            if entry.shape == (len(rows_of(elements, *self.position)),):
                sizes = tuple(parameter.shape)
                found[name] = RowSpec((elements,), entry.dtype, plain=True, sizes=sizes)
            elif entry.dim():
                raise Invalid(
                    f"{self.what} keeps {key} of shape {list(entry.shape)} for"
                    f" {self.value.parameter_name(parameter)} with {elements} elements, but only elementwise"
                    " entries and scalars can be redistributed when the world changes: use an optimizer such as"
                    " SGD, Adam or AdamW"
                )
        return found

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        """Make the optimizer step this rank's shard in another world."""
        self.value.divide(division.order)
        self._position = division.shard, division.shards
        return {}


def _can_be_sent(key: object, entry: object) -> bool:
    return (
        isinstance(key, str)
        and isinstance(entry, torch.Tensor)
        and not is_dtensor(entry)
        and plain(entry)
        and not entry.is_meta
    )
