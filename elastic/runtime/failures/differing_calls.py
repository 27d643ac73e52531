"""What each rank of a group called, where that was not the same: each tells the others. Acts, but for `sentence`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elastic.errors import CollectiveFailed, Differing
from elastic.rendezvous.store import Store

TELL_S = 2.0  # for all to say what they have called; they wait in one collective already


class Called(msgspec.Struct, frozen=True, array_like=True):
    """One rank's call. ``line``: of the script, ``train.py:12``; empty where none is known."""

    rank: int
    name: str
    line: str


def of_all(store: Store | None, group: Differing, mine: Called) -> list[Called]:
    """Those of all ranks of the group, by rank; this one's alone where the others do not answer in time."""
    if store is None or not group.key:
        return [mine]
    try:
        told = store.exchange(
            f"{group.key}/calls", group.rank, group.size, msgspec.msgpack.encode(mine), TELL_S
        )
        return [msgspec.msgpack.decode(each, type=Called) for each in told]
    except (CollectiveFailed, msgspec.MsgspecError):
        return [mine]


def sentence(calls: Sequence[Called]) -> str:
    """``rank 0: allreduce at train.py:3; ranks 1, 2: broadcast at train.py:5``."""
    by_call: dict[tuple[str, str], list[int]] = {}
    for each in calls:
        by_call.setdefault((each.name, each.line), []).append(each.rank)
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}: {name}{f' at {line}' if line else ''}"
        for (name, line), ranks in by_call.items()
    ]
    what = "ranks called different collectives"
    if len({name for name, _ in by_call}) == 1:
        what += ", or one with other sizes, dtypes, reductions or roots"
    return f"{what}: {'; '.join(parts)}; all ranks must make the same calls, in the same order"


def _listed(ranks: Sequence[int]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
