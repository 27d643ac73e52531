"""Train a small network with DiLoCo: workers average the change of their parameters every 20 steps.

    elasticrun -np 3 --min-np 1 examples/diloco_elastic.py

Kill a worker while it runs: the other workers keep their own steps, and its replacement starts from the outer
parameters.
"""

import torch

import elastic

STEPS, EVERY = 400, 20


def target(points: torch.Tensor) -> torch.Tensor:
    return points.sin().sum(1, keepdim=True)


elastic.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
inner_optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
diloco = elastic.DiLoCo(
    model, inner_optimizer, every=EVERY, fragments=2, delay=3, dtype=torch.bfloat16
)
data = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(1))
loader = elastic.data.DataLoader(data, batch_size=16, shuffle=True)


@elastic.run
def train(state: elastic.TorchState) -> None:
    while state.step < STEPS:
        for points in loader:
            inner_optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(points), target(points))
            loss.backward()
            inner_optimizer.step()
            diloco.step()
            state.step += 1
            if state.step % 100 == 0 and elastic.rank() == 0:
                print(
                    f"step {state.step} round {diloco.round} workers {elastic.size()} loss {loss.item():.4f}"
                    f" sent {diloco.bytes_sent / diloco.own_steps:.0f} bytes a step",
                    flush=True,
                )
            state.commit()
            if state.step >= STEPS:
                break


train(elastic.TorchState(diloco=diloco, loader=loader, step=0))
