"""Reduce-scatters and all-gathers of torch.distributed on each worker's GPU, on its default stream and on another."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int32, torch.int16, torch.complex64)
PREMULTIPLIED = ReduceOp.PREMUL_SUM(0.5)
FACTORS: dict[Any, float | None] = {ReduceOp.SUM: 1.0, ReduceOp.AVG: None, PREMULTIPLIED: 0.5}


def check(rank: int, size: int, dtype: torch.dtype) -> None:
    """Small whole numbers, of which all sums and halves are exact, but for an average of three."""
    rows = torch.arange(4 * size, device="cuda").view(size, 4)
    for op, factor in FACTORS.items():
        if op == PREMULTIPLIED and dtype not in FLOATS:
            continue
        mine = (rows * (rank + 1)).to(dtype)
        part = torch.empty(4, dtype=dtype, device="cuda")
        distributed.reduce_scatter_single(part, mine, op)
        wanted = rows[rank].to(torch.float64) * (size * (size + 1) / 2)
        wanted = wanted / size if factor is None else wanted * factor
        if not (dtype.is_floating_point or dtype.is_complex):
            wanted = wanted.trunc()
        found = (part.real if dtype.is_complex else part).to(torch.float64)
        torch.testing.assert_close(
            found, wanted, rtol=1e-2 if dtype in FLOATS[:2] else 1e-6, atol=0
        )
        if dtype in FLOATS or dtype.is_complex:
            check_together(rank, size, dtype, op, 1 / size if factor is None else factor)
    whole = torch.empty(2 * size, dtype=dtype, device="cuda")
    distributed.all_gather_single(whole, torch.full((2,), rank + 1, dtype=dtype, device="cuda"))
    ranks = torch.arange(1, size + 1).repeat_interleave(2)
    torch.testing.assert_close(whole.cpu(), ranks.to(dtype))


def check_together(rank: int, size: int, dtype: torch.dtype, op: Any, factor: float) -> None:
    """Several tensors in one call, each of which NCCL launches as one."""
    group = distributed.group.WORLD
    assert group is not None
    scatter_options, reduce_options = (
        distributed.ReduceScatterOptions(),
        distributed.AllreduceOptions(),
    )
    scatter_options.reduceOp = reduce_options.reduceOp = op
    total = size * (size + 1) / 2 * factor
    outputs = [torch.empty(count, dtype=dtype, device="cuda") for count in (2, 3)]
    inputs = [each.new_full((size * len(each),), rank + 1) for each in outputs]
    scatter = group.reduce_scatter_tensor_coalesced(outputs, inputs, scatter_options)
    scatter.wait()
    reduced = [each.new_full((len(each),), rank + 1) for each in outputs]
    group.allreduce_coalesced(reduced, reduce_options).wait()
    for each in (*outputs, *reduced):
        wanted = torch.full((len(each),), total, dtype=torch.float64)
        found = (each.real if dtype.is_complex else each).to(torch.float64).cpu()
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)
    gathered = [each.new_empty(size * len(each)) for each in outputs]
    mine = [each.new_full((len(each),), rank + 1) for each in outputs]
    group.allgather_into_tensor_coalesced(gathered, mine).wait()
    for each in gathered:
        ranks = torch.arange(1, size + 1).repeat_interleave(len(each) // size)
        torch.testing.assert_close(each.cpu(), ranks.to(dtype))


def main() -> None:
    distributed.init_process_group()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for dtype in DTYPES:
        check(rank, size, dtype)
        with torch.cuda.stream(torch.cuda.Stream()):
            check(rank, size, dtype)
    print(f"rank {rank} found all right")


if __name__ == "__main__":
    main()
