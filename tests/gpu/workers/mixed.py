"""Two optimizers, SyncBatchNorm in forward and backward, named collectives between them, and ranks that run out of data
one after the other and join.
"""

import os
import time

import torch

import horovod.torch as hvd
from gpu.workers.notes import note, own_gpu

STEPS = int(os.environ["STEPS"])
SECONDS = 35.0  # ranks that share a GPU are slow: they stop then

hvd.init()
device, rank, size = own_gpu(hvd.local_rank()), hvd.rank(), hvd.size()
torch.manual_seed(0)
front = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3), hvd.SyncBatchNorm(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3)
).to(device)
back = torch.nn.Sequential(
    hvd.SyncBatchNorm(16), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 12 * 12, 10)
).to(device)
optimizers = [
    hvd.DistributedOptimizer(
        torch.optim.SGD(front.parameters(), lr=0.01),
        [(f"front.{name}", each) for name, each in front.named_parameters()],
    ),
    hvd.DistributedOptimizer(
        torch.optim.Adam(back.parameters(), lr=1e-3),
        [(f"back.{name}", each) for name, each in back.named_parameters()],
    ),
]
for part in (front, back):
    hvd.broadcast_parameters(part.state_dict(), root_rank=0)
began = time.monotonic()
for step in range(STEPS):
    for optimizer in optimizers:
        optimizer.zero_grad()
    images = torch.randn(4, 3, 16, 16, device=device)
    loss = back(front(images)).logsumexp(1).mean()
    shown = hvd.allreduce_async(loss.detach(), name="loss")
    loss.backward()
    counted = hvd.allreduce(torch.tensor([4.0 + rank]), op=hvd.Sum, name="counted on the CPU")
    for optimizer in optimizers:
        optimizer.step()
    hvd.synchronize(shown)
    if step % 20 == 0:
        late = torch.tensor(int(time.monotonic() - began > SECONDS))
        if hvd.allreduce(late, op=hvd.Max, name="late"):
            break
steps = step + 1
seconds = time.monotonic() - began
same = [
    hvd.allgather(parameter.detach().reshape(1, -1), name=f"same {number}")
    for number, parameter in enumerate([*front.parameters(), *back.parameters()])
]
assert all(each.eq(each[:1]).all() for each in same), "the ranks' parameters differ"
note("trained", steps=steps, ms=seconds / steps * 1e3)

# Uneven data: rank r has r steps more, of what may go on without the others.
tail = torch.nn.Linear(32, 4).to(device)
descent = torch.optim.SGD(tail.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(
    descent, [(f"tail.{n}", p) for n, p in tail.named_parameters()]
)
for _ in range(20 * (rank + 1)):
    optimizer.zero_grad()
    tail(torch.ones(2, 32, device=device)).sum().backward()
    optimizer.step()
    total = hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum, name="named")
    assert 1 <= total[0].item() <= size
last = hvd.join()
assert last == size - 1, last
note("done", last=last)
