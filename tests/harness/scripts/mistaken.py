"""Trains 30 steps with one mistake, ``CASE``, or without one where the case is one of RIGHT."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils import data as torch_data

import elastic
import horovod.torch as hvd

CASE = os.environ["CASE"]
STEPS = 30
WRONG = {
    "no commit": {"no-commit"},
    "commit on rank 0": {"commit-on-some-ranks"},
    "range": {"loop-restarts"},
    "plain optimizer": {"gradients-never-reduced"},
    "plain optimizer, loss reduced": {"only-the-loss-reduced"},
    "no model": {"model-not-in-state"},
    "no optimizer": {"optimizer-not-in-state"},
    "nothing": {"model-not-in-state", "optimizer-not-in-state"},
    "second model": {"model-not-in-state"},
    "second optimizer": {"optimizer-not-in-state"},
    "bare parameter": {"model-not-in-state"},
    "scheduler": {"scheduler-not-in-state"},
    "scaler": {"scaler-not-in-state"},
    "average": {"weight-average-not-in-state"},
    "torch loader": {"loader-without-position"},
    "shuffled torch loader": {"loader-without-position"},
    "torch loader in the state": {"loader-without-position"},
    "torch loader with workers": {"loader-without-position"},
    "DistributedSampler": {"loader-without-position"},
    "stream": {"loader-without-position"},
    "kept rank": {"rank-kept"},
    "ElasticSampler": {"loader-not-in-state"},
    "elastic loader": {"loader-not-in-state"},
}
RIGHT = [
    *("plain", "every 100th step", "once per epoch", "DDP", "two models", "everything"),
    *("ElasticSampler in the state", "elastic loader in the state", "evaluation loader"),
    *("no loader", "own place", "own state", "accumulation"),
    *("loss reduced too", "gradients reduced by hand", "fully sharded"),
]


class Rows(torch_data.IterableDataset[tuple[torch.Tensor]]):
    def __iter__(self):
        return iter([(torch.ones(4),)] * 1000)


class Kept(torch_data.Sampler[int]):
    def __init__(self) -> None:
        self.rank, self.num_replicas = hvd.rank(), hvd.size()

    def __iter__(self):
        return iter(range(self.rank, 1000, self.num_replicas))


class Own(hvd.elastic.TorchState):
    """Saves a model that is not part of the state."""

    def save(self) -> None:
        self.weights = {name: each.clone() for name, each in model.state_dict().items()}
        super().save()


hvd.init()
model = torch.nn.Linear(4, 1)
second = torch.nn.Linear(4, 1)
bare = torch.nn.Parameter(torch.zeros(1))
if CASE == "fully sharded":
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group()
    fully_shard(model)
trained = [*model.parameters()]
trained += [*second.parameters()] if CASE in ("second model", "two models") else []
trained += [bare] if CASE == "bare parameter" else []
optimizer: Any = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
network: torch.nn.Module = model
if CASE == "DDP":
    torch.distributed.init_process_group()
    network = DistributedDataParallel(model)
elif not CASE.startswith(("plain optimizer", "gradients reduced by hand", "fully sharded")):
    passes = 2 if CASE == "accumulation" else 1
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
other = torch.optim.SGD(second.parameters(), lr=0.01)
if CASE == "second optimizer":
    other = hvd.DistributedOptimizer(other, named_parameters=second.named_parameters())
scheduler = StepLR(optimizer, 10) if CASE in ("scheduler", "everything") else None
average = AveragedModel(model) if CASE in ("average", "everything") else None
scaler = torch.amp.GradScaler("cpu") if CASE in ("scaler", "everything") else None
samples = torch_data.TensorDataset(torch.ones(1000, 4))
placed: Any = torch_data.DistributedSampler(samples, num_replicas=hvd.size(), rank=hvd.rank())
sampler = hvd.elastic.ElasticSampler(samples)
loader: Any = {
    "torch loader": lambda: torch_data.DataLoader(samples, batch_size=4),
    "torch loader in the state": lambda: torch_data.DataLoader(samples, batch_size=4),
    "shuffled torch loader": lambda: torch_data.DataLoader(samples, batch_size=4, shuffle=True),
    "torch loader with workers": lambda: torch_data.DataLoader(samples, 4, num_workers=1),
    "own place": lambda: torch_data.DataLoader(samples, batch_size=4),
    "DistributedSampler": lambda: torch_data.DataLoader(samples, 4, sampler=placed),
    "stream": lambda: torch_data.DataLoader(Rows(), batch_size=4),
    "kept rank": lambda: torch_data.DataLoader(samples, batch_size=4, sampler=Kept()),
    "ElasticSampler": lambda: torch_data.DataLoader(samples, 4, sampler=sampler),
    "ElasticSampler in the state": lambda: torch_data.DataLoader(samples, 4, sampler=sampler),
    "elastic loader": lambda: elastic.data.DataLoader(samples, batch_size=4),
    "elastic loader in the state": lambda: elastic.data.DataLoader(samples, batch_size=4),
}.get(CASE, lambda: None)()
evaluation = torch_data.DataLoader(samples, batch_size=500)


def batches():
    while True:
        yield from loader if loader is not None else [(torch.ones(4, 4),)]


@hvd.elastic.run
def train(state):
    for (x,) in batches():
        optimizer.zero_grad()
        for part in x.chunk(2) if CASE == "accumulation" else [x]:
            loss = network(part).square().mean()
            if CASE in ("second model", "two models"):
                loss = loss + second(part).square().mean()
            if CASE == "bare parameter":
                loss = loss + bare.square().sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if CASE in ("plain optimizer, loss reduced", "loss reduced too"):
            hvd.allreduce(loss.detach(), name="loss")
        if CASE == "gradients reduced by hand":
            for parameter in model.parameters():
                assert parameter.grad is not None
                hvd.allreduce_(parameter.grad)
        if CASE == "fully sharded":
            with torch.no_grad():
                network(x)  # leaves the parameters gathered
        if scaler is None:
            optimizer.step()
        else:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        if CASE == "second optimizer":
            other.zero_grad()
            second(x).square().mean().backward()
            other.step()
        if scheduler is not None:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
        if CASE == "evaluation loader":
            for _ in evaluation:
                pass
        state.step += 1
        if CASE != "no commit":
            state.commit()
        if state.step >= STEPS:
            return


@hvd.elastic.run
def train_on_rank_0(state):
    for state.step in range(state.step, STEPS):  # noqa: B020
        optimizer.zero_grad()
        network(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        if hvd.rank() == 0:
            state.commit()


@hvd.elastic.run
def train_in_a_range(state):
    for _ in range(STEPS):
        optimizer.zero_grad()
        network(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        state.commit()


@hvd.elastic.run
def train_and_commit_later(state):
    while state.step < STEPS:
        optimizer.zero_grad()
        network(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        state.step += 1
        if CASE == "every 100th step" and state.step % 100 == 99:
            state.commit()
    state.commit()


members: dict[str, Any] = {"model": network, "optimizer": optimizer, "step": 0}
for name in {"no model": ["model"], "no optimizer": ["optimizer"]}.get(CASE, []):
    del members[name]
if CASE == "nothing":
    members = {"step": 0}
if CASE == "two models":
    members["second"] = second
if CASE == "second optimizer":
    members["second"] = second
if CASE == "everything":
    members |= {"scheduler": scheduler, "average": average, "scaler": scaler}
if CASE in ("elastic loader in the state", "torch loader in the state"):
    members["loader"] = loader
if CASE == "ElasticSampler in the state":
    members["sampler"] = sampler
if CASE == "own place":
    members["batch_index"] = 0
if CASE == "own state":
    del members["model"]
kind = Own if CASE == "own state" else hvd.elastic.TorchState
later = dict.fromkeys(("every 100th step", "once per epoch"), train_and_commit_later)
others = {"commit on rank 0": train_on_rank_0, "range": train_in_a_range}
{**others, **later}.get(CASE, train)(kind(**members))
