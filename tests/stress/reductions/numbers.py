"""Inputs of the ranks of a round, and the expected results, exact to the last bit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from elastic.collectives.interface import Op
from stress.reductions.plan import DTYPES, MOST_BYTES, Call, Kind

_COMBINE: dict[Op, Callable[[Any, Any], Any]] = {
    Op.SUM: operator.add,
    Op.PRODUCT: operator.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}
_SPREAD = 1 << 17  # elements between the offsets of calls and ranks

ELEMENT_BYTES = {name: getattr(torch, name).itemsize for name in DTYPES}


class Numbers:
    """Random numbers of every dtype, enough for any call. Made once, before the worker processes are forked."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._of: dict[str, torch.Tensor] = {}
        for name, size in ELEMENT_BYTES.items():
            dtype = getattr(torch, name)
            count = MOST_BYTES // size + _SPREAD
            if dtype.is_floating_point:
                made = torch.randn(count, generator=generator).to(dtype)
            else:
                limits = torch.iinfo(dtype)
                made = torch.randint(limits.min, limits.max, (count,), generator=generator)
            self._of[name] = made.to(dtype)

    def put_in(self, call: Call, rank: int) -> torch.Tensor:
        """Return a rank's input as a view; for an alltoall with one part per rank."""
        begin = (call.at + rank * 7919) % _SPREAD
        size = len(call.inside)
        elements = call.elements * (size if call.kind is Kind.SCATTER else 1)
        return self._of[call.dtype][begin : begin + elements]

    def come_out(self, call: Call, rank: int) -> torch.Tensor:
        """Return the expected result on this rank."""
        ranks = range(len(call.inside))
        inputs = [self.put_in(call, each) for each in ranks]
        if call.kind is Kind.BROADCAST:
            return inputs[call.root]
        if call.kind is Kind.GATHER:
            return torch.cat(inputs)
        if call.kind is Kind.SCATTER:
            return torch.cat([torch.tensor_split(each, len(ranks))[rank] for each in inputs])
        return reduced(inputs, Op[call.op], call.scale, call.divisor)


def reduced(inputs: list[torch.Tensor], op: Op, scale: float, divisor: int) -> torch.Tensor:
    """Reduce in the order of the ranks; halves are combined in float32 and rounded once."""
    dtype = inputs[0].dtype
    if dtype in (torch.float16, torch.bfloat16):
        inputs = [each.float() for each in inputs]
    result = functools.reduce(_COMBINE[op], inputs)
    return (result * scale / divisor if dtype.is_floating_point else result).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, except for the kind of NaN."""
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
