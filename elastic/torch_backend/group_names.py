"""Names of torch's process groups that all ranks of an elastic job agree on. Acts.

torch numbers groups per process, and mixes how many there are into the names of others. A worker that has just joined
has made fewer than those that were here before it. Ranks meet under these names, so a group that is made under
``elastic.run`` is named by the generation, and by its number among those that were made in it. What is made earlier is
numbered by torch: every worker runs those lines once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d

from elastic.runtime import lifecycle

_torch: Any = distributed_c10d
_theirs: Any = _torch._process_group_name


class GroupNames:
    """Of one process. Pure."""

    def __init__(self) -> None:
        self.generation = 0  # that has entered elastic.run; 0 before
        self._made: dict[str, int] = {}  # in this generation, by key
        self.before: list[
            tuple[int, ...]
        ] = []  # ranks of groups of some ranks that were made before elastic.run

    def enter(self, generation: int) -> None:
        self.generation = generation
        self._made.clear()

    def next(self, key: str = "") -> str:
        """``3.0``, ``3.1``, ... of groups that all ranks make; ``3.KEY.0`` of those that only their members make."""
        number = self._made.get(key, 0)
        self._made[key] = number + 1
        return ".".join(filter(None, (str(self.generation), key, str(number))))


names = GroupNames()


def replace() -> None:
    """In torch.distributed. Idempotent."""
    _torch._process_group_name = name


def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
    """As torch's. ``use_hashed_name``: only the members make this group, and its ranks tell it from others."""
    rt = lifecycle.active()
    if rt is None or not rt.elastic:
        return _theirs(ranks, use_hashed_name)
    if not names.generation:
        if 0 < len(ranks) < rt.place.size:
            names.before.append(tuple(ranks))
        return _theirs(ranks, use_hashed_name)
    listed = "_".join(map(str, ranks)).encode() if use_hashed_name else b""
    key = hashlib.sha1(listed, usedforsecurity=False).hexdigest() if listed else ""
    return _torch.GroupName(names.next(key))
