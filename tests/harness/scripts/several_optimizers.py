"""Two optimizers in one backward pass, with a SyncBatchNorm inside; then two that take turns, as in a GAN."""

from __future__ import annotations

import os

import torch
from torch import nn

import elastic

STEPS = 4


def made(network: nn.Module, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    network.to(device)
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.05), named_parameters=network.named_parameters()
    )
    return network, optimizer


def main() -> None:
    elastic.init()
    rank, cuda = elastic.rank(), os.environ["DEVICE"] == "cuda"
    if cuda:
        torch.cuda.set_device(elastic.local_rank())
    device = torch.device("cuda", elastic.local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    below, for_below = made(nn.Sequential(nn.Linear(6, 8), elastic.SyncBatchNorm(8)), device)
    above, for_above = made(nn.Sequential(nn.ReLU(), nn.Linear(8, 6)), device)
    critic, for_critic = made(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), device)
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        real = torch.randn(5, 6).to(device)
        for_below.zero_grad(), for_above.zero_grad()
        (above(below(real)) - real).square().mean().backward()
        for_below.step(), for_above.step()

        for_critic.zero_grad()
        (critic(above(below(real)).detach()).mean() - critic(real).mean()).backward()
        for_critic.step()

        for_below.zero_grad(), for_above.zero_grad()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        (-critic(above(below(real))).mean()).backward()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        for_below.step(), for_above.step()
    networks = (below, above, critic)
    flat = torch.cat([p.detach().cpu().reshape(-1) for n in networks for p in n.parameters()])
    everybody = elastic.allgather(flat[None], name="all")
    assert everybody.eq(everybody[0]).all(), "the ranks' parameters differ"
    print(f"sum {flat.double().sum():.4f} {flat.double().square().sum():.4f}", flush=True)


if __name__ == "__main__":
    main()
