"""Says what decides how an optimizer's gradients travel, line by line, before anybody reduces anything.

The lines are part of a state's layout, which the driver compares before it lets a newcomer in: one that would reduce
other things than the world ends there, told what differs, and nobody is disturbed. ``requires_grad`` is in none of
them: it may change while a job runs, and travels with the state. Talks to nobody.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic import gradients
from elastic.collectives.interface import Op
from elastic.compression import Compression
from elastic.gradient_buckets import Compressor, gradient_strides


@dataclass(frozen=True)
class Made:
    """What `elastic.optimizer.DistributedOptimizer` was given. ``passes`` may have been changed since, on all ranks."""

    op: Op
    predivide_factor: float
    compression: Compressor
    passes: int
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    sparse_as_dense: bool
    whole_world: bool  # else a process set, and which one may depend on the rank
    fusion_bytes: tuple[int, int]


def lines(
    name: str,
    made: Made,
    parameters: Iterable[torch.Tensor],
    names: Mapping[torch.Tensor, str],
) -> list[str]:
    """``optimizer.compression fp16``, ``optimizer.parameter.3 layer.bias float32 [20] strides [1]``."""
    if not made.whole_world:
        return [f"{name}.process_set some of the ranks"]
    parameters = list(parameters)
    found = [
        f"{name}.op {made.op.name}",
        f"{name}.gradient_predivide_factor {float(made.predivide_factor)}",
        f"{name}.compression {compression_name(made.compression)}",
        f"{name}.backward_passes_per_step {made.passes}",
        f"{name}.sparse_as_dense {bool(made.sparse_as_dense)}",
        f"{name}.process_set all ranks",
        f"{name}.groups {_groups(made, parameters)}",
        f"{name}.fusion_bytes {list(made.fusion_bytes)}",
    ]
    for number, parameter in enumerate(parameters):
        described = describe(names.get(parameter, "without a name"), parameter)
        found.append(f"{name}.parameter.{number} {described}")
    return found


def describe(name: str, parameter: torch.Tensor) -> str:
    """``layer.weight float32 [10, 20] strides [20, 1]``: the memory format is in the strides."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{name} {dtype} {list(parameter.shape)} strides {list(gradient_strides(parameter))}"


def compression_name(compression: Compressor) -> str:
    """As scripts write it."""
    for name in ("none", "fp16", "bf16"):
        if compression is getattr(Compression, name):
            return name
    kind = compression if isinstance(compression, type) else type(compression)
    return kind.__qualname__


def beside(handled: Collection[object]) -> str:
    """The lines of this process's optimizers that are not in ``handled``, in an order that names no process."""
    outside = [each for each in _optimizers() if not any(each is known for known in handled)]
    if not outside:
        return ""
    del outside
    gc.collect()  # one that is gone must not count on a process whose collector has yet to run
    texts = sorted(
        each.gradient_layout("DistributedOptimizer")
        for each in _optimizers()
        if not any(each is known for known in handled) and each.gradients_made.whole_world
    )
    if len(texts) > 1:
        texts = [
            [
                line.replace("DistributedOptimizer.", f"DistributedOptimizer.{number}.", 1)
                for line in text
            ]
            for number, text in enumerate(texts)
        ]
    return "\n".join(line for text in texts for line in text)


def _optimizers() -> list[Any]:
    found = [reducer.optimizer for reducer in gradients.reducers]
    return [each for each in found if each is not None]


def _groups(made: Made, parameters: Sequence[torch.Tensor]) -> str:
    if not made.groups or isinstance(made.groups, int):
        return str(made.groups or 0)
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    return str([[number_of.get(id(each), -1) for each in group] for group in made.groups])
