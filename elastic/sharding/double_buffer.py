"""Decides which of a rank's two banks is written, and which shards in them are whole. Pure.

    begin --> WRITING --copied--> OWN --mirrored--> MIRRORED --sealed--> the base of the next commit

A commit is sealed once all ranks have it copied and mirrored. The bank of the newest sealed commit, the base, is not
written until another is sealed: whenever a rank is lost, all the others have that one at least.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from elastic.sharding.shard_inventory import CommitId, HeldShard, Inventory


class BufferState(enum.IntEnum):
    """What of a bank is whole."""

    WRITING = 0  # nothing
    OWN = 1  # this rank's shard
    MIRRORED = 2  # the copies of other ranks' shards too


@dataclass
class BufferRecord:
    """What is in one bank. ``shard`` is this rank's; ``copies`` are those of which it keeps a copy."""

    commit: CommitId
    shards: int
    shard: int
    copies: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    state: BufferState = BufferState.WRITING

    def held(self) -> Inventory:
        own = [self.shard] if self.state >= BufferState.OWN else []
        mirrored = self.state >= BufferState.MIRRORED
        copies = self.copies if mirrored else ()
        return tuple(
            HeldShard(self.commit, self.shards, shard, shard == self.shard, self.hosts, mirrored)
            for shard in (*own, *copies)
        )


@dataclass
class DoubleBuffer:
    """Of one rank. ``base``: the bank that must not be written, None as long as nothing is sealed."""

    banks: list[BufferRecord | None] = field(default_factory=lambda: [None, None])
    base: int | None = None
    writing: int | None = None

    def begin(self, record: BufferRecord) -> int:
        """A commit begins. Returns the bank that it is written to."""
        bank = self._free()
        self.banks[bank] = record
        self.writing = bank
        return bank

    def _free(self) -> int:
        return 0 if self.base is None else 1 - self.base

    def copied(self) -> None:
        """This rank's shard is in the bank."""
        self.written().state = BufferState.OWN

    def mirrored(self) -> None:
        """The copies of other ranks' shards are in the bank."""
        self.written().state = BufferState.MIRRORED

    def sealed(self) -> None:
        """All ranks have copied and mirrored: the other bank is free."""
        assert self.written().state is BufferState.MIRRORED, "sealed before it is mirrored"
        self.base, self.writing = self.writing, None

    def inventory(self) -> Inventory:
        """What this rank can give to others."""
        return tuple(each for bank in self.banks if bank is not None for each in bank.held())

    def adopt(self, commit: CommitId) -> int | None:
        """All go back to this commit. Returns the bank that has a shard of it, which is the base from here on."""
        self.writing = None
        self.base = next(
            (n for n, b in enumerate(self.banks) if b and b.commit == commit and b.held()), None
        )
        return self.base

    def forget(self) -> None:
        """Nothing in the banks counts any more."""
        self.banks, self.base, self.writing = [None, None], None, None

    def written(self) -> BufferRecord:
        """Of the commit that was begun."""
        assert self.writing is not None, "no commit was begun"
        record = self.banks[self.writing]
        assert record is not None
        return record
