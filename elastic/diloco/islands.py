"""Islands of a world: groups of ranks that average gradients in every step, and synchronize with DiLoCo.

Pure: no I/O, no clock.

A rank belongs to the island of its host, which does not change during the lifetime of its process. Ranks are reassigned
in each world, so the islands are computed from the island names that the ranks exchange. The lowest rank of an island
leads it: if the leader is lost, another rank leads in the next world. An island that has lost all its ranks is removed.
A new island starts with the outer parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Islands:
    """Islands of a world, as seen by one of its ranks.

    Args:
        names: name of the island of each rank.
        rank: this rank.
    """

    names: tuple[str, ...]
    rank: int

    @staticmethod
    @functools.lru_cache(maxsize=1)  # cached, because each step calls this
    def apart(size: int, rank: int) -> Islands:
        """Return a layout in which every rank is an island."""
        return Islands(tuple(map(str, range(size))), rank)

    @property
    def name(self) -> str:
        """Name of this rank's island."""
        return self.names[self.rank]

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of this island in ascending order."""
        return tuple(rank for rank, name in enumerate(self.names) if name == self.name)

    @property
    def leader(self) -> int:
        """Rank that represents this island in the exchange between islands."""
        return self.members[0]

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader of its island."""
        return self.leader == self.rank

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each island, in the order of `leaders`."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(self.names):
            found.setdefault(name, []).append(rank)
        return tuple(map(tuple, found.values()))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Leaders of all islands in ascending order."""
        first: dict[str, int] = {}
        for rank, name in enumerate(self.names):
            first.setdefault(name, rank)
        return tuple(first.values())

    def source(self, changes: Sequence[int], took: Sequence[bool] = ()) -> int | None:
        """Return the rank of this island whose inner parameters the other members receive, or None if all are equal.

        Args:
            changes: for each rank of the world, the number of changes of its inner parameters.
            took: for each rank, whether it has received several merges at once, which rounds differently from separate
                merges. Default: False for all ranks.
        """
        differs = any(took[rank] for rank in self.members if took) and len(self.members) > 1

        def age(rank: int) -> tuple[int, bool, int]:
            return changes[rank], not (took and took[rank]), -rank

        newest = max(self.members, key=age)
        same = all(changes[rank] == changes[newest] for rank in self.members)
        return None if same and not differs else newest
