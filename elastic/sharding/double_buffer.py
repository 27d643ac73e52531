"""State of a rank's two snapshot buffers, to which commits are written alternately. Pure: no I/O, no clock.

    begin --> WRITING --copied--> OWN --mirrored--> MIRRORED --sealed--> the base of the next commit
                 (on any of these: discard)

A commit is sealed once all ranks have copied and mirrored it. The buffer with the newest sealed commit, the base, is
not overwritten until another commit is sealed. Whenever a rank is lost, all other ranks therefore hold at least the
base.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from elastic.sharding.shard_inventory import CommitId, HeldShard, Inventory


class BufferState(enum.IntEnum):
    """Progress of the commit in a buffer."""

    WRITING = 0  # no shard is complete
    OWN = 1  # this rank's shard is complete
    MIRRORED = 2  # copies of other ranks' shards are complete as well


@dataclass
class BufferRecord:
    """Contents of one snapshot buffer: this rank's ``shard``, and ``copies`` of other ranks' shards."""

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
    """The two snapshot buffers of one rank.

    Attributes:
        base: index of the buffer that must not be overwritten, or None until a commit is sealed.
        newest_sealed: newest commit known to be sealed, even if a later world has restored another one. None for the
            initial state (generation 0), which each rank commits alone.
    """

    banks: list[BufferRecord | None] = field(default_factory=lambda: [None, None])
    base: int | None = None
    writing: int | None = None
    newest_sealed: CommitId | None = None

    def begin(self, record: BufferRecord) -> int:
        """Begin a commit. Return the index of the buffer to write it to."""
        bank = self._free()
        self.banks[bank] = record
        self.writing = bank
        return bank

    def _free(self) -> int:
        return 0 if self.base is None else 1 - self.base

    def copied(self) -> None:
        """Record that this rank's shard was copied to the buffer."""
        self.written().state = BufferState.OWN

    def mirrored(self) -> None:
        """Record that the copies of other ranks' shards are complete in the buffer."""
        self.written().state = BufferState.MIRRORED

    def sealed(self) -> None:
        """Record that all ranks have copied and mirrored the commit, so that the other buffer can be overwritten."""
        record = self.written()
        assert record.state is BufferState.MIRRORED, "sealed before it is mirrored"
        self.base, self.writing = self.writing, None
        self.newest_sealed = record.commit if record.commit.generation else None

    def discard(self) -> None:
        """Discard the commit in progress, because its copy is invalid on some rank.

        This method must be called on all ranks.
        """
        assert self.writing is not None, "no commit was begun"
        self.banks[self.writing], self.writing = None, None

    def inventory(self) -> Inventory:
        """Return the complete shards in both buffers, which this rank can send to other ranks."""
        return tuple(each for bank in self.banks if bank is not None for each in bank.held())

    def adopt(self, commit: CommitId) -> int | None:
        """Restore a commit: make the buffer that contains it the base, and return the buffer's index.

        Return None if no buffer contains a complete shard of this commit.
        """
        self.writing = None
        self.base = next(
            (n for n, b in enumerate(self.banks) if b and b.commit == commit and b.held()), None
        )
        return self.base

    def forget(self) -> None:
        """Discard the contents of both buffers."""
        self.banks, self.base, self.writing = [None, None], None, None
        self.newest_sealed = None

    def written(self) -> BufferRecord:
        """Return the record of the commit in progress."""
        assert self.writing is not None, "no commit was begun"
        record = self.banks[self.writing]
        assert record is not None
        return record
