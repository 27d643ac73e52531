"""Description of an optimizer's gradient reduction, as lines of text. This module does not communicate.

The lines are part of a state's layout, which the driver compares before a worker joins. A worker that would reduce
differently is rejected with a message that shows the difference, and the world is not interrupted. ``requires_grad`` is
not included, since it may change while a job runs and is part of the state.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic.exact.shards import Shards
from elastic.optimizer.gradients import gradient_reducer
from elastic.optimizer.gradients.gradient_options import Options


@dataclass(frozen=True)
class OptimizerArguments:
    """Arguments with which `elastic.optimizer.distributed_optimizer.DistributedOptimizer` was called.

    Later, ``passes`` can be changed on all ranks together.
    """

    options: Options
    passes: int
    sparse_as_dense: bool
    # whether all ranks of the world take part; a process set may differ between ranks
    whole_world: bool
    fusion_bytes: int | None  # size of fusion buffers in bytes, or None for the default
    shards: Shards | None = None
    zero: int = 0


def lines(
    name: str,
    made: OptimizerArguments,
    parameters: Iterable[torch.Tensor],
    names: Mapping[torch.Tensor, str],
) -> list[str]:
    """Return the description, with lines such as ``optimizer.parameter.3 layer.bias float32 [20] strides [1]``."""
    if not made.whole_world:
        return [f"{name}.process_set some of the ranks"]
    named = [(names.get(parameter, "without a name"), parameter) for parameter in parameters]
    found = [
        "process_set all ranks",
        f"backward_passes_per_step {made.passes}",
        f"sparse_as_dense {bool(made.sparse_as_dense)}",
        *([f"zero {made.zero}"] if made.zero else []),
        *([] if made.shards is None else made.shards.layout),
        *made.options.lines(named, made.fusion_bytes),
    ]
    return [f"{name}.{line}" for line in found]


def outside_state(handled: Collection[object]) -> str:
    """Return the lines of all optimizers of this process, except those in ``handled``.

    The lines have the same order in all processes.
    """
    if not _outside(handled):
        return ""
    gc.collect()  # Collect garbage first, so that unreachable optimizers are not counted.
    texts = sorted(each.gradient_layout("") for each in _outside(handled))
    alone = len(texts) == 1
    return "\n".join(
        f"DistributedOptimizer{'' if alone else f'.{number}'}{line}"
        for number, text in enumerate(texts)
        for line in text
    )


def _outside(handled: Collection[object]) -> list[Any]:
    known = set(map(id, handled))
    found: list[Any] = [reducer.optimizer for reducer in gradient_reducer.reducers()]
    return [
        each
        for each in found
        if each is not None and id(each) not in known and each.gradients_made.whole_world
    ]
