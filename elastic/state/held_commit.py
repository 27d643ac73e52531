"""A commit that is held still while the next ones are made: what a checkpoint is written from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.state.handlers.part import Part
from elastic.state.snapshots.snapshot import Snapshot, SnapshotBuffers


@dataclass(frozen=True)
class HeldRows:
    """This rank's rows of a sharded tensor, from row ``begin`` on. ``whole``: a meta tensor like the whole one.

    ``plain``, ``sizes`` and ``on_host``: see `live_shards.RowSpec`.
    """

    whole: torch.Tensor
    begin: int
    rows: torch.Tensor
    plain: bool
    sizes: tuple[int, ...] | None = None
    on_host: bool = False


@dataclass
class HeldPart:
    """The committed structure and tensors of one part of a state. Tensors are on the CPU, and nobody writes to them.

    ``sharded``: the tensors of which each rank holds some rows; ``tensors`` are all others.
    """

    part: Part
    snapshot: Snapshot
    bank: SnapshotBuffers
    structure: Any
    own: Any
    tensors: dict[str, torch.Tensor]
    sharded: dict[str, HeldRows] = field(default_factory=dict)

    @classmethod
    def of(cls, part: Part) -> HeldPart:
        snapshot = part.snapshot
        bank = snapshot.hold()
        structure, own = bank.extra
        return cls(part, snapshot, bank, structure, own, bank.buffers())

    def described(self) -> Any:
        """As the value's ``state_dict()``, of the commit; of sharded tensors without content."""
        whole = {key: each.whole for key, each in self.sharded.items()}
        return self.part.described(self.structure, self.own, self.tensors | whole)


@dataclass
class HeldCommit:
    """One commit. ``random``: the states of this rank's generators, if they are part of the state. ``release_shard``:
    this rank's rows may be overwritten.
    """

    layout: str
    values: dict[str, Any]
    parts: dict[str, HeldPart] = field(default_factory=dict)
    random: dict[str, Any] | None = None
    release_shard: Callable[[], None] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds rows of it."""
        return self.release_shard is not None

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
        if self.release_shard is not None:
            self.release_shard()
