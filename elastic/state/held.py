"""A commit that is held still while the next ones are made: what a checkpoint is written from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.state.handlers.part import Part
from elastic.state.snapshots.snapshot import Bank, Snapshot


@dataclass
class HeldPart:
    """The committed structure and tensors of one part of a state. Tensors are on the CPU, and nobody writes to them."""

    part: Part
    snapshot: Snapshot
    bank: Bank
    structure: Any
    own: Any
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, part: Part) -> HeldPart:
        snapshot = part.snapshot
        bank = snapshot.hold()
        structure, own = bank.extra
        return cls(part, snapshot, bank, structure, own, bank.buffers())

    def described(self) -> Any:
        """As the value's ``state_dict()``, of the commit."""
        return self.part.described(self.structure, self.own, self.tensors)


@dataclass
class Held:
    """One commit. ``random``: the states of this rank's generators, if they are part of the state."""

    layout: str
    values: dict[str, Any]
    parts: dict[str, HeldPart] = field(default_factory=dict)
    random: dict[str, Any] | None = None

    def complete(self) -> None:
        """Waits for copies from a GPU. Raises DeviceLost."""
        for part in self.parts.values():
            if part.bank.transit is not None:
                part.bank.transit.wait()

    def referred(self) -> dict[str, object]:
        """Objects that values may point to without owning them, by name."""
        return {name: each.part.value for name, each in self.parts.items()}

    def release(self) -> None:
        """The copies may be overwritten. From any thread."""
        for part in self.parts.values():
            part.snapshot.release()
