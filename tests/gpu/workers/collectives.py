"""Every collective with every operation and dtype, on tensors of this rank's GPU. Then the speed of a sum."""

import time

import torch

import horovod.torch as hvd
from gpu.workers.notes import SMALL, note, own_gpu

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

hvd.init()
device, rank, size = own_gpu(hvd.local_rank()), hvd.rank(), hvd.size()
note("began", rank=rank, size=size, device=str(device))
began = time.monotonic()
hvd.allreduce(torch.ones(1, device=device), name="first")
note("first", seconds=time.monotonic() - began)

combinations = 0
for dtype in (*FLOATS, *WHOLE):
    mine = torch.full((1001,), rank + 1, device=device).to(dtype)
    small = torch.full((1001,), 2 if rank < 3 else 1, device=device).to(dtype)
    wanted = {
        hvd.Sum: size * (size + 1) // 2,
        hvd.Min: 1,
        hvd.Max: size,
        hvd.Product: 2 ** min(size, 3),
    }
    for op, value in wanted.items():
        got = hvd.allreduce(small if op == hvd.Product else mine, op=op, name=f"{dtype} {op}")
        assert got.dtype == dtype and got.is_cuda and got.eq(value).all(), (dtype, op, got[:4])
        combinations += 1
    if dtype in FLOATS:
        got = hvd.allreduce(mine, op=hvd.Average, name=f"{dtype} average")
        assert got.float().sub((size + 1) / 2).abs().max() < 0.01, (dtype, got[:4])
    for root in range(size):
        got = hvd.broadcast(mine, root, name=f"{dtype} from {root}")
        assert got.eq(root + 1).all(), (dtype, root, got[:4])
    got = hvd.allgather(mine[: rank + 1], name=f"{dtype} gathered")
    assert got.tolist() == [r + 1 for r in range(size) for _ in range(r + 1)], (dtype, got)
    sent = mine[:1].repeat(size)
    got, counts = hvd.alltoall(sent, torch.ones(size, dtype=torch.int32), name=f"{dtype} to all")
    assert got.tolist() == [r + 1 for r in range(size)], (dtype, got)
    got = hvd.reducescatter(mine[:1].repeat(3 * size), op=hvd.Sum, name=f"{dtype} scattered")
    assert got.shape == (3,) and got.eq(wanted[hvd.Sum]).all(), (dtype, got)
    combinations += 4
flags = torch.tensor([rank == 0], device=device)
assert hvd.broadcast(flags, 0, name="flags").item() is True
grouped = hvd.grouped_allreduce([torch.ones(n, device=device) for n in (1, 7, 4096)], op=hvd.Sum)
assert all(each.eq(size).all() for each in grouped)
hvd.barrier()
note("collectives", combinations=combinations)

for megabytes in (0.001, 0.1) if SMALL else (0.001, 1, 100):
    tensor = torch.ones(int(megabytes * 250_000), device=device)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.monotonic()
        hvd.allreduce_(tensor, op=hvd.Max, name=f"timed {megabytes}")
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    note("timed", megabytes=megabytes, ms=sorted(times)[len(times) // 2] * 1e3)
hvd.shutdown()
note("done", rank=rank)
