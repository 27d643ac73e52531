"""Divide an embedding table between workers, which exchange looked-up rows with alltoall.

    horovodrun -np 4 python horovod_process_sets.py --steps 50

Even and odd ranks are two process sets, which train one model each, independently. Within a set, each worker has a part
of the table. The layers above the table are the same on all workers of a set, and an optimizer of the set trains them.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

import horovod.torch as hvd

parser = argparse.ArgumentParser(description="Horovod: process sets")
parser.add_argument("--rows", type=int, default=32, help="of the table that a worker owns")
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

hvd.init(process_sets="dynamic")
even_set = hvd.add_process_set(list(range(0, hvd.size(), 2)))
odd_set = hvd.add_process_set(list(range(1, hvd.size(), 2))) if hvd.size() > 1 else even_set
my_set = even_set if even_set.included() else odd_set
torch.manual_seed(my_set.process_set_id)
torch.set_num_threads(1)

workers, index = my_set.size(), my_set.rank()
first_of_set = my_set.ranks[0]
table = nn.Parameter(torch.randn(args.rows, args.width) * 0.1 + 0.01 * index)
head = nn.Linear(args.width, 1)
hvd_optimizer = hvd.DistributedOptimizer(
    optim.SGD(head.parameters(), lr=args.lr),
    named_parameters=head.named_parameters(),
    process_set=my_set,
)
for name, parameter in head.named_parameters():
    hvd.broadcast_(parameter.data, root_rank=first_of_set, name=name, process_set=my_set)
table_optimizer = optim.SGD([table], lr=args.lr * args.rows)


def look_up(ids):
    """Look up rows of the whole table for these ids, in their order; gradients are sent back."""
    owner = ids // args.rows
    order = torch.argsort(owner, stable=True)
    splits = torch.bincount(owner, minlength=workers).to(torch.int32)
    wanted, counts = hvd.alltoall(ids[order], splits=splits, name="ids", process_set=my_set)
    rows = table[wanted - index * args.rows]
    answers, _ = hvd.alltoall(rows, splits=counts, name="rows", process_set=my_set)
    return answers[torch.argsort(order)]


generator = torch.Generator().manual_seed(1000 + hvd.rank())
for step in range(args.steps):
    ids = torch.randint(workers * args.rows, (args.batch_size,), generator=generator)
    target = torch.sin(ids.float()).unsqueeze(1)
    hvd_optimizer.zero_grad()
    table_optimizer.zero_grad()
    loss = F.mse_loss(head(look_up(ids)), target)
    loss.backward()
    hvd_optimizer.step()
    table_optimizer.step()
    if step % 10 == 0 or step == args.steps - 1:
        mean = hvd.allreduce(loss.detach(), name="loss", process_set=my_set)
        if index == 0:
            print(f"set {my_set.process_set_id} step {step} loss {mean.item():.4f}", flush=True)

# All workers, of both sets.
everybody = hvd.allgather(torch.tensor([[hvd.rank(), my_set.process_set_id]]), name="sets")
if hvd.rank() == 0:
    print("rank and set:", everybody.tolist())
hvd.remove_process_set(odd_set)
if even_set is not odd_set:
    hvd.remove_process_set(even_set)
hvd.shutdown()
