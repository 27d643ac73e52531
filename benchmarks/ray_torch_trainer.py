"""The caller of Ray Train's side of `ray_train`: the same model, steps and log, a checkpoint every ten steps.

ray_torch_trainer.py FOLDER WORKERS STEP_S EVERY
"""

from __future__ import annotations

import sys
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    import os
    import tempfile
    import time

    import ray.train
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt")
        model.load_state_dict(saved["model"])
        first = saved["step"]
    parallel = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    attempt = int(time.monotonic() * 1e3)  # grows with each start of the group
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(f"{config['folder']}/{os.getpid()}.steps", flags)
    step = first
    while True:
        optimizer.zero_grad()
        parallel(torch.ones(4, 64)).square().mean().backward()
        time.sleep(config["step_s"])
        optimizer.step()
        step += 1
        words = [attempt, size, rank, step]
        os.write(log, " ".join(map(str, [time.monotonic(), *words])).encode() + b"\n")
        stop = torch.tensor([float(os.path.exists(f"{config['folder']}/stop"))])
        distributed.all_reduce(stop)
        if stop.item():
            return
        if step % config["every"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            saved_here = None
            if rank == 0:
                torch.save({"model": model.state_dict(), "step": step}, f"{folder}/state.pt")
                saved_here = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=saved_here)


def main() -> None:
    folder, workers, step_s, every = sys.argv[1:]
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "step_s": float(step_s), "every": int(every)},
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig(
            name="beside",
            storage_path=f"{folder}/storage",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
