"""Commit whose copies are kept unchanged during later commits, so that a checkpoint can be written from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.state.handlers.part import Part
from elastic.state.snapshots.snapshot import Snapshot, SnapshotBuffers


@dataclass(frozen=True)
class HeldRows:
    """This rank's rows of a sharded tensor, from row ``begin`` on.

    ``plain``, ``sizes`` and ``on_host``: see `live_shards.RowSpec`.

    Args:
        whole: the complete tensor on the meta device.
    """

    whole: torch.Tensor
    begin: int
    rows: torch.Tensor
    plain: bool
    sizes: tuple[int, ...] | None = None
    on_host: bool = False


@dataclass
class HeldPart:
    """Committed structure and tensors of one part of a state. Tensors are on the CPU and must not be modified.

    Args:
        sharded: tensors whose rows are divided among the ranks.
        tensors: all other tensors.
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
        """Return the commit in the form of the value's ``state_dict()``. Sharded tensors are on the meta device."""
        whole = {key: each.whole for key, each in self.sharded.items()}
        return self.part.described(self.structure, self.own, self.tensors | whole)


@dataclass(frozen=True)
class CommitCopy:
    """Copy of a commit in separate memory.

    ``banks`` contains the copies by the name of the part. ``random`` is the same as in `HeldCommit`.
    """

    values: dict[str, Any]
    banks: dict[str, SnapshotBuffers]
    random: dict[str, Any] | None


@dataclass
class HeldCommit:
    """Commit that is kept unchanged until it is released.

    Args:
        random: the states of this rank's generators, if they are part of the state.
        release_shard: allows this rank's rows to be overwritten.
    """

    layout: str
    values: dict[str, Any]
    parts: dict[str, HeldPart] = field(default_factory=dict)
    random: dict[str, Any] | None = None
    release_shard: Callable[[], None] | None = None

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds only some rows of the value."""
        return self.release_shard is not None

    def complete(self) -> None:
        """Wait for copies from a GPU.

        Raises:
            DeviceLost: the copies did not complete.
        """
        for part in self.parts.values():
            if part.bank.transit is not None:
                part.bank.transit.wait()

    def referred(self) -> dict[str, object]:
        """Return the objects, by name, that values may refer to without copying them."""
        return {name: each.part.value for name, each in self.parts.items()}

    def release(self) -> None:
        """Allow the copies to be overwritten. Thread-safe."""
        for part in self.parts.values():
            part.snapshot.release()
        if self.release_shard is not None:
            self.release_shard()
