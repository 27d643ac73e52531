"""Collective calls that differ between ranks, and their description in error messages. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

DISTINCT = 16  # maximum number of calls reported to the driver


class Called(msgspec.Struct, frozen=True, array_like=True):
    """One rank's call of a collective. Unknown fields are empty.

    Args:
        line: line of the script that made the call, such as ``train.py:12``.
        tensors: dtypes and shapes of the tensors, such as ``float32 [3]``.
    """

    rank: int
    name: str
    line: str = ""
    tensors: str = ""


Calls = Annotated[tuple[Called, ...], msgspec.Meta(max_length=DISTINCT)]


def distinct(calls: Iterable[Called]) -> tuple[Called, ...]:
    """Return one call for each distinct name, line and tensors: that of the lowest rank.

    At most `DISTINCT` calls are returned, the maximum in a message.
    """
    found = {(each.name, each.line, each.tensors): each for each in reversed([*calls])}
    return tuple(sorted(found.values(), key=lambda each: each.rank)[:DISTINCT])


def sentence(calls: Sequence[Called]) -> str:
    """Describe ranks' calls in a sentence, as in ``rank 0: allreduce at train.py:3; ranks 1, 2: broadcast``."""
    by_call: dict[tuple[str, str, str], list[int]] = {}
    for each in calls:
        by_call.setdefault((each.name, each.tensors, each.line), []).append(each.rank)
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}: {name}{f' of {tensors}' if tensors else ''}"
        f"{f' at {line}' if line else ''}"
        for (name, tensors, line), ranks in by_call.items()
    ]
    what = "ranks called different collectives"
    if len({name for name, *_ in by_call}) == 1:
        what += ", or passed different sizes, dtypes, reductions or roots"
    return f"{what}: {'; '.join(parts)}; all ranks must make the same calls, in the same order"


def message_sentence(calls: Sequence[Called]) -> str:
    """Describe sends and receives in a sentence, as in ``rank 0: send of float32 [5]; rank 1: recv``."""
    parts = "; ".join(f"rank {each.rank}: {each.name} of {each.tensors}" for each in calls)
    return f"a message does not fit its recv: {parts}; both tensors need the same dtype and number of elements"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
