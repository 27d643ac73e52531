"""Names of torch's process groups that are equal on all ranks of an elastic job.

torch numbers groups per process and includes their count in the names of other groups. A worker that has just joined
has created fewer groups than other workers, but ranks connect by these names. A group created under ``elastic.run`` is
therefore named by the generation and its number within it. Groups created before ``elastic.run`` keep torch's numbers,
since every worker creates them once.
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
    """Names of the groups of one process. Pure: no I/O, no clock."""

    def __init__(self) -> None:
        self.generation = 0  # generation of the world under elastic.run, or 0 before elastic.run
        self._made: dict[str, int] = {}  # number of groups in this generation, by key
        self.before: list[
            tuple[int, ...]
        ] = []  # ranks of partial groups that were created before elastic.run

    def enter(self, generation: int) -> None:
        self.generation = generation
        self._made.clear()

    def next(self, key: str = "") -> str:
        """Return the next name of a group.

        Groups that all ranks create have names such as ``3.0`` and ``3.1``. Groups that only their members create have
        names such as ``3.KEY.0``.
        """
        number = self._made.get(key, 0)
        self._made[key] = number + 1
        return ".".join(filter(None, (str(self.generation), key, str(number))))


names = GroupNames()


def replace() -> None:
    """Patch torch.distributed to use these names. Idempotent."""
    _torch._process_group_name = name


def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
    """Replacement of torch's function that names a group.

    With ``use_hashed_name``, only members create the group, and its name is derived from its ranks.
    """
    rt = lifecycle.active()
    if rt is None or not rt.elastic:
        return _theirs(ranks, use_hashed_name)
    if not names.generation:
        if 0 < len(ranks) < rt.place.size:
            names.before.append(tuple(ranks))
        return _theirs(ranks, use_hashed_name)
    listed = "_".join(map(str, ranks)).encode() if use_hashed_name else b""
    key = hashlib.sha1(listed, usedforsecurity=False).hexdigest() if listed else ""
    return names.next(key)
