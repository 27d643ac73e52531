"""Handler of `elastic.DiLoCo`: shared values are sent to other workers, and local values are only committed.

The job's shared values are the outer parameters, the entries of the outer optimizer, the position and the number of
merges. A worker's local values are the model, the inner optimizer and the quantization residuals. A joining worker
starts with the outer parameters as its inner ones, and with the sender's buffers and options of the inner optimizer. It
receives no entries of the inner optimizer, which would be at least as large as the model and belong to another worker's
parameters. If the worker's island is already training, the worker receives the island's inner state before its first
step. A worker that has taken a step receives nothing here: `DiLoCo.reconcile` makes the shared values equal.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic.diloco.diloco import DiLoCo
from elastic.errors import StateMismatch
from elastic.state.handlers.data_parallel import rebuild_reducer
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.handlers.part import Part
from elastic.state.handlers.tensor_spec import Destination, TensorSpec

OUTER, ENTRY, OTHER = "outer.", "entry.", "model."


class DiLoCoStateHandler(Part):
    """Handler of a `DiLoCo` or `LocalSGD`. Checkpoints contain the job's shared values, and rank 0's buffers."""

    value: DiLoCo

    def _adopt_value(self) -> None:
        self.value.name_in_state = self.name
        self._outer_entries = OptimizerStateHandler(self.value.outer_optimizer)

    def layout(self) -> list[str]:
        value, rounds = self.value, self.value.rounds.schedule
        lines = [
            f"{self.name} {type(value).__name__} every {rounds.every} fragments {rounds.fragments} delay"
            f" {rounds.delay} mix {value.mix} dtype {value.dtype}"
            + ("" if value.replica is None else " islands")
            + ("" if value.grace_s is None else f" grace {value.grace_s} quorum {value.quorum}"),
            f"{self.name} outer {type(value.outer_optimizer).__name__}",
        ]
        for name, each in zip(value.names, value.outer, strict=True):
            dtype = str(each.dtype).removeprefix("torch.")
            lines.append(f"{self.name}.{name} {dtype} {list(each.shape)}")
        return lines

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        value = self.value
        outer_structure, entries = self._outer_entries.pack()
        inner = value.inner_optimizer
        groups = [] if inner is None else inner.param_groups
        tensors = {
            OUTER + name: each.detach() for name, each in zip(value.names, value.outer, strict=True)
        }
        tensors |= {ENTRY + name: each for name, each in entries.items()}
        tensors |= {OTHER + name: each for name, each in value.others().items()}
        structure = {
            **value.rounds.shared(),
            "outer": outer_structure,
            "inner_options": [
                {key: each for key, each in group.items() if key != "params"} for group in groups
            ],
        }
        return structure, tensors

    def versions(self) -> dict[str, int]:
        return dict.fromkeys(self.pack()[1], 0) if self.value.own_steps else {}

    def own(self) -> Any:
        return self.value.own_state()

    def destinations(
        self, structure: Any, specs: dict[str, TensorSpec], *, restoring: bool
    ) -> dict[str, torch.Tensor | Destination]:
        value = self.value
        if value.own_steps and not restoring:
            return dict.fromkeys(specs, Destination.NOWHERE)
        entries = {name[len(ENTRY) :]: s for name, s in specs.items() if name.startswith(ENTRY)}
        placed = self._outer_entries.destinations(structure["outer"], entries, restoring=restoring)
        live = {OUTER + n: each.detach() for n, each in zip(value.names, value.outer, strict=True)}
        live |= {OTHER + name: each for name, each in value.others().items()}
        where: dict[str, torch.Tensor | Destination] = {}
        for name in specs:
            if name.startswith(ENTRY):
                where[name] = placed[name[len(ENTRY) :]]
            elif name in live and specs[name].fits(live[name]):
                where[name] = live[name]
            else:
                raise StateMismatch(
                    f"{self.what} has no tensor {name} of shape {list(specs[name].shape)}, which the commit contains:"
                    " use the same model and optimizers on all workers"
                )
        return where

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        value = self.value
        if value.own_steps and not restoring:
            value.lacks_merges = value.merged != list(structure["merged"])
            value.clear_gradients()
            return
        entries = {n[len(ENTRY) :]: each for n, each in fresh.items() if n.startswith(ENTRY)}
        self._outer_entries.place(structure["outer"], entries, own, restoring=restoring)
        value.take_shared(structure)
        if restoring and own is not None:
            value.take_own_state(own)
        else:
            with torch.no_grad():
                for inner, outer in zip(value.inner, value.outer, strict=True):
                    inner.copy_(outer)
            if value.inner_optimizer is not None:
                value.inner_optimizer.state.clear()
                groups = value.inner_optimizer.param_groups
                for group, options in zip(groups, structure["inner_options"], strict=True):
                    group.update(options)
        value.clear_gradients()

    def reset(self) -> None:
        if self.value.replica is not None:
            rebuild_reducer(self.value.replica)

    def restore_nothing(self) -> None:
        self.value.clear_gradients()

    def equal_everywhere(self, structure: Any) -> set[str] | None:
        return {OUTER + name for name in self.value.names}

    def digested(self) -> dict[str, torch.Tensor]:
        buffers = self.snapshot.bank.buffers()
        return {name: each for name, each in buffers.items() if name.startswith(OUTER)}
