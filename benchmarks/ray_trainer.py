"""The Ray Train job that `ray_train.py` compares with hvd-elastic, with the same model, the same steps, and the same
output.

    ray_trainer.py FOLDER WORKERS STEP_S

Each worker appends ``time attempt size rank step`` to ``FOLDER/PID.steps``. After a failure all workers are restarted
from the last checkpoint. It ends once ``FOLDER/stop`` exists.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

CHECKPOINT_STEPS = 10


def train(config: dict[str, Any]) -> None:
    import gc
    import os
    import tempfile
    import time

    gc.disable()  # makes the import of torch faster, as in our job
    import torch

    gc.freeze()
    gc.enable()
    from torch import distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    plain = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    step, attempt = 0, 1
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "state.pt"))
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, attempt = saved["step"], saved["attempt"] + 1
    model = torch.nn.parallel.DistributedDataParallel(plain)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(f"{config['folder']}/{os.getpid()}.steps", flags)
    while True:
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        time.sleep(config["step_s"])
        optimizer.step()
        step += 1
        words = [attempt, size, rank, step]
        os.write(log, " ".join(map(str, [time.monotonic(), *words])).encode() + b"\n")
        stop = torch.tensor([float(os.path.exists(f"{config['folder']}/stop"))])
        distributed.all_reduce(stop)
        if stop.item():
            return
        if step % CHECKPOINT_STEPS == 0:
            with tempfile.TemporaryDirectory() as folder:
                kept = None
                if rank == 0:
                    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                    numbers = {"step": step, "attempt": attempt}
                    torch.save(state | numbers, os.path.join(folder, "state.pt"))
                    kept = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=kept)


def main() -> None:
    folder, workers, step_s = sys.argv[1:]
    ray.init()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "step_s": float(step_s)},
        scaling_config=ScalingConfig(
            num_workers=int(workers), resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
        ),
        run_config=RunConfig(
            storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=-1)
        ),
    )
    print(f"result {trainer.fit().metrics}", flush=True)


if __name__ == "__main__":
    main()
