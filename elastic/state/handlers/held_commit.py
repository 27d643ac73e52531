"""Commit that stays unchanged while later commits are made, so that a checkpoint can be written from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.state.handlers.part import Part
from elastic.state.snapshots.snapshot import Snapshot, SnapshotBuffers


@dataclass(frozen=True)
class HeldRows:
    """This rank's rows of a sharded tensor, starting at row ``begin``.

    ``plain``, ``sizes`` and ``on_host``: see `sharded_handlers.RowSpec`.

    Args:
        whole: complete tensor, on the meta device.
    """

    whole: torch.Tensor
    begin: int
    rows: torch.Tensor
    plain: bool
    sizes: tuple[int, ...] | None = None
    on_host: bool = False


@dataclass
class HeldPart:
    """Committed structure and tensors of one part of a state. The tensors are on the CPU and must not be modified.

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
        """Return the commit in the form of the value's ``state_dict()``, with sharded tensors on the meta device."""
        whole = {key: each.whole for key, each in self.sharded.items()}
        return self.part.described(self.structure, self.own, self.tensors | whole)


@dataclass(frozen=True)
class CommitCopy:
    """Copy of a commit in separate memory.

    ``banks`` contains the copies, keyed by part name. For ``random``, see `HeldCommit`.
    """

    values: dict[str, Any]
    banks: dict[str, SnapshotBuffers]
    random: dict[str, Any] | None


@dataclass
class HeldCommit:
    """Commit that is kept unchanged until it is released.

    Args:
        random: states of this rank's random generators, if they are part of the state.
        release_shard: function that allows this rank's rows to be overwritten.
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
        """Wait until copies from a GPU are complete.

        Raises:
            DeviceLost: the copies did not complete.
        """
        for part in self.parts.values():
            if part.bank.transit is not None:
                part.bank.transit.wait()

    def referred(self) -> dict[str, object]:
        """Return the objects that values may refer to without copying them, by name."""
        return {name: each.part.value for name, each in self.parts.items()}

    def release(self) -> None:
        """Allow the copies to be overwritten. Thread-safe."""
        for part in self.parts.values():
            part.snapshot.release()
        if self.release_shard is not None:
            self.release_shard()
