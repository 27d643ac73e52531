"""Error messages that describe how the optimizers of two ranks differ.

All ranks of the group take part, with or without an optimizer, and receive the same description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from elastic.collectives import raise_together
from elastic.collectives.interface import Collectives, Op
from elastic.context import Context
from elastic.errors import CollectiveFailed, StateMismatch
from elastic.optimizer.gradients.joined_rank import share_bytes

_NOBODY = -(1 << 31)


class PlanDifference(NamedTuple):
    """Descriptions of the optimizers of two ranks, as lines of text.

    ``first`` is the lowest rank with data. ``other`` is the lowest rank whose lines differ from those of ``first``, or
    None.
    """

    first: int
    other: int | None
    lines: list[str]
    other_lines: list[str]


def find(
    group: Collectives, device: torch.device, first: int | None, own: Sequence[str] | None
) -> PlanDifference:
    """Find a rank whose optimizer differs from that of the lowest rank with data.

    All ranks must call this function.

    Args:
        group: the ranks to compare.
        device: device of the group.
        first: lowest rank with data, or None.
        own: lines that describe this rank's optimizer; None on a rank that has joined.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    assert first is not None
    lines = _share(group, device, first, own)
    differs = own is not None and list(own) != lines
    lowest = torch.tensor([-group.rank if differs else _NOBODY], dtype=torch.int64, device=device)
    group.allreduce(lowest, Op.MAX).wait()
    other = None if int(lowest) == _NOBODY else -int(lowest)
    other_lines = lines if other is None else _share(group, device, other, own)
    # Wait until all ranks have the result: callers then raise an error and leave the group.
    raise_together.wait_for_all(group)
    return PlanDifference(first, other, lines, other_lines)


def words(found: PlanDifference) -> str:
    """Describe the first difference, as in ``compression is fp16 on rank 1, none on rank 0``."""
    values, others = [dict(map(_named, each)) for each in (found.lines, found.other_lines)]
    for name in [*values, *others]:
        value, other = values.get(name), others.get(name)
        if value != other:
            shown = [
                f"{'missing' if each is None else each} on rank {rank}"
                for each, rank in ((other, found.other), (value, found.first))
            ]
            return f"{name.replace('.', ' ')} is {shown[0]}, {shown[1]}"
    return (
        "they step different optimizers at the same time, or some of them replaced parameters and others did not:"
        " step the same optimizers in the same order, and change parameters in the same step, on every rank"
    )


def refuse(
    world: Context, members: tuple[int, ...] | None, own: Sequence[str], found: PlanDifference
) -> NoReturn:
    """Raise the error for a difference between two ranks' optimizers.

    Args:
        world: the current world.
        members: ranks that average, or None for all.
        own: lines that describe this rank's optimizer.
        found: the difference.

    Raises:
        StateMismatch: this rank cannot continue.
        CollectiveFailed: this rank continues, in a world without the newly joined ranks whose optimizers differ.
    """
    rank = world.place.rank
    if members is not None and found.other is not None:
        found = found._replace(first=members[found.first], other=members[found.other])
    message = f"the ranks' optimizers differ: {words(found)}"
    place = world.world
    holders = 0 if place is None or not world.elastic else place.holders
    joining = found.other is not None and found.first < holders <= found.other
    if joining and list(own) == found.lines:
        raise CollectiveFailed(
            f"{message}. Workers that differ from rank {found.first} leave: pass"
            " DistributedOptimizer the same parameters and options on every rank"
        )
    raise StateMismatch(
        f"{message} (this is rank {rank}): pass DistributedOptimizer the same parameters and options on every rank"
    )


def _named(line: str) -> tuple[str, str]:
    name, _, value = line.partition(" ")
    return name, value


def _share(
    group: Collectives, device: torch.device, root: int, own: Sequence[str] | None
) -> list[str]:
    return share_bytes(group, device, root, "\n".join(own or ()).encode()).decode().split("\n")
