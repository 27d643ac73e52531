"""Training loop of ``fsdp.py`` and ``zero.py``. At the end every worker writes a record to ``out/WORKER.json``.

STEPS  how many.   FULL  every so many steps, wait for all workers.   WORKERS  how many that are (default: 4).
SLOW  seconds of pause after each step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic
from elastic.failpoints import set_step


def losses(training: Any, steps: int) -> list[float]:
    """Return the losses of a training that runs undisturbed in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other on a busy machine
    found = [float(training.step(step)) for step in range(steps)]
    torch.set_num_threads(threads)
    return found


def state_of(training: Any, **more: Any) -> elastic.TorchState:
    """Return the state of a training on this rank, with further values."""
    optimizers = {f"optimizer{number}": each for number, each in enumerate(training.optimizers)}
    return elastic.TorchState(
        model=training.model, schedule=training.schedule, step=0, **optimizers, **more
    )


def count_step(training: Any, state: elastic.TorchState) -> None:
    getattr(training.model, "module", training.model).steps += 1
    state.step += 1


def run(training: Any, **more: Any) -> dict[str, Any]:
    """Train to the end under ``elastic.run``, and return the record of this worker."""
    steps, full = int(os.environ["STEPS"]), int(os.environ.get("FULL", "0"))
    workers = int(os.environ.get("WORKERS", "4"))
    model = training.model
    ids = _ids(training)
    state = state_of(training, losses={}, sizes={}, meshes={}, **more)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while state.step < steps:
            rank, size = dist.get_rank(), dist.get_world_size()
            if full and state.step % full == 0 and size < workers:
                time.sleep(0.02)
                state.check_host_updates()
                dist.barrier()
                continue
            set_step(state.step)
            # Not after the step, which may leave gathered parameters behind.
            mesh = getattr(next(model.parameters()), "device_mesh", None)
            loss = training.step(state.step, rank, size)
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            state.losses[state.step] = float(loss)
            state.sizes[state.step] = size
            state.meshes[state.step] = None if mesh is None else list(mesh.shape)
            count_step(training, state)
            state.commit()
            if state.step == 10:
                print("at step 10", flush=True)
            time.sleep(float(os.environ.get("SLOW", "0")))

    train(state)
    return {
        "losses": [state.losses[step] for step in range(steps)],
        "sizes": [state.sizes[step] for step in range(steps)],
        "meshes": [state.meshes[step] for step in range(steps)],
        "same": ids == _ids(training),
        "counted": float(getattr(model, "module", model).steps),
        "digest": float(sum(_whole(each).double().sum() for each in model.parameters())),
    }


def write(found: dict[str, Any]) -> None:
    worker = f"{os.uname().nodename}.{os.environ['LOCAL_RANK']}.{os.getpid()}"
    Path("out").mkdir(exist_ok=True)
    Path("out", f"{worker}.json").write_text(json.dumps(found))


def _ids(training: Any) -> list[int]:
    model = training.model
    return [id(each) for each in (model, *training.optimizers, *model.parameters())]


def _whole(parameter: Any) -> torch.Tensor:
    whole: torch.Tensor = getattr(parameter, "full_tensor", lambda: parameter)()
    return whole.detach()
