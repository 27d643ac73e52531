"""Train from a stream of Ray Data that is redistributed when workers join or leave. Every row counts once per epoch.

    python examples/ray_data.py                                          # starts a local Ray
    RAY_ADDRESS=auto python examples/ray_data.py --workers 8 --min-workers 2     # on a node of a cluster

An actor, the *feed*, runs the stream and numbers its blocks. The rows are sent directly from the node on which they
were created to the worker that trains on them. In a step with N workers, rank r takes block ``position + r``, and
``position`` is part of the committed state. Therefore only the blocks of a lost worker are distributed again, to the
next world.

Guarantee: in the history of commits, each row of an epoch is trained on exactly once, regardless of failures of workers
and their nodes. Steps that a failure undoes were never committed, and are repeated. If the feed itself is lost, Ray
restarts it, and it repeats the epoch's stream from the beginning up to the workers' position. The guarantee then holds
if the stream returns the same blocks again. This requires `preserve_order` (set below), a fixed number of blocks to
read (by default, Ray derives it from the number of CPUs), seeds for shuffles, and functions that depend only on their
rows.

Ray recreates blocks that are lost with a node. The feed ends with its caller. Ray Data needs one CPU in addition to the
workers' CPUs.
"""

from __future__ import annotations

import argparse
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import ray
import ray.data
from ray.data.block import BlockAccessor

import elastic.ray

Position = tuple[int, int]  # epoch, and the number of its blocks that were trained on


class Epoch:
    """The stream of one epoch, which only moves forward, and the blocks that may be requested again."""

    def __init__(self, dataset: ray.data.Dataset) -> None:
        self._stream: Iterator[Any] = (
            block for bundle in dataset.iter_internal_ref_bundles() for block in bundle.block_refs
        )
        self._next = 0
        self._kept: dict[int, Any] = {}
        self.first = 0
        self.blocks: int | None = None  # set at its end

    def block(self, number: int) -> Any | None:
        """Return a reference; None after the end."""
        while self._next <= number and self.blocks is None:
            block = next(self._stream, None)
            if block is None:
                self.blocks = self._next
            else:
                self._kept[self._next] = block
                self._next += 1
        return self._kept.get(number)

    def forget(self, before: int) -> None:
        for number in range(self.first, min(before, self._next)):
            del self._kept[number]
        self.first = max(self.first, min(before, self._next))


class Feed:
    """An actor. ``dataset`` creates the stream of an epoch; ``rows`` is the maximum number of rows in a block."""

    def __init__(self, dataset: Callable[[int], ray.data.Dataset], rows: int) -> None:
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        self._dataset = dataset
        self._rows = rows
        self._lock = threading.Lock()
        self._epochs: dict[int, Epoch] = {}
        self._lengths: dict[int, int] = {}

    def block(self, epoch: int, number: int, safe: Position) -> list[Any]:
        """Return a reference to a block, or nothing after the end. No worker returns to a position before ``safe``."""
        with self._lock:
            self._forget(*safe)
            if number >= self._lengths.get(epoch, number + 1):
                return []
            stream = self._epochs.get(epoch)
            if stream is None or number < stream.first:
                dataset = self._dataset(epoch).repartition(target_num_rows_per_block=self._rows)
                self._epochs[epoch] = stream = Epoch(dataset)
            block = stream.block(number)
            if stream.blocks is not None:
                self._lengths[epoch] = stream.blocks
            return [] if block is None else [block]

    def _forget(self, epoch: int, number: int) -> None:
        for over in [each for each in self._epochs if each < epoch]:
            del self._epochs[over]
        if epoch in self._epochs:
            self._epochs[epoch].forget(number)


def dataset_of(epoch: int, rows: int) -> ray.data.Dataset:
    """Create points with a target value. Each epoch has a different order of blocks. A real dataset would read
    files."""
    import numpy as np

    def points(batch: dict[str, Any]) -> dict[str, Any]:
        number = batch["id"]
        x = np.stack([np.sin(number * k) for k in (1.0, 2.0, 3.0, 5.0)], axis=1)
        return {"id": number, "x": x, "y": x @ np.array([1.0, -2.0, 0.5, 3.0])}

    made = ray.data.range(rows, override_num_blocks=8)
    return made.randomize_block_order(seed=epoch).map_batches(points)


def train(config: dict[str, Any]) -> dict[str, float]:
    """Train on one worker."""
    import torch

    import elastic

    elastic.init()
    # To Ray, a worker is a separate program, which joins the cluster on which it runs.
    ray.init(namespace=os.environ["RAY_NAMESPACE"], log_to_driver=False)
    feed = ray.get_actor(config["feed"])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2),
        named_parameters=model.named_parameters(),
        op=elastic.Sum,
    )

    @elastic.run
    def loop(state: elastic.TorchState) -> dict[str, float]:
        requested: dict[
            Position, Any
        ] = {}  # one block ahead; the numbers are valid only in this world

        def ask(number: int) -> Any:
            at = (state.epoch, number)
            return requested.pop(at, None) or feed.block.remote(*at, state.safe)

        while state.epoch < config["epochs"]:
            answer = ask(state.position + elastic.rank())
            following = state.position + elastic.size() + elastic.rank()
            requested[state.epoch, following] = ask(following)
            block = ray.get(answer)
            ids, x, y = columns(ray.get(block[0]) if block else None)

            optimizer.zero_grad()
            loss = (model(x).squeeze(1) - y).square().sum()
            loss.backward()
            optimizer.synchronize()
            # Blocks differ in size, and some ranks may have none at the end, so the mean is over the rows of this step.
            mine = torch.tensor([len(ids), int(ids.sum()), not block])
            rows, numbers, without = elastic.allreduce(mine, name="rows", op=elastic.Sum).tolist()
            if rows:
                for parameter in model.parameters():
                    parameter.grad /= rows
                with optimizer.skip_synchronize():
                    optimizer.step()

            # A failure may return to the previous commit, which has this position.
            state.safe = (state.epoch, state.position)
            state.position += elastic.size()
            state.rows += rows
            state.numbers += numbers
            if without:
                if elastic.rank() == 0:
                    told = {"epoch": state.epoch, "rows": state.rows, "numbers": state.numbers}
                    elastic.report(told)
                state.epoch += 1
                state.position = state.rows = state.numbers = 0
            elif elastic.rank() == 0:
                elastic.report({"position": state.position, "workers": elastic.size()})
            state.commit()
        return {"error": (model.weight - torch.tensor([1.0, -2.0, 0.5, 3.0])).abs().max().item()}

    return loop(
        elastic.TorchState(model, optimizer, epoch=0, position=0, safe=(0, 0), rows=0, numbers=0)
    )


def columns(block: Any | None) -> tuple[Any, Any, Any]:
    """Convert a block to tensors, which are empty if there is no block."""
    import torch

    if block is None:
        nothing = torch.zeros(0, dtype=torch.float64)
        return torch.zeros(0, dtype=torch.int64), nothing.reshape(0, 4), nothing
    named = BlockAccessor.for_block(block).to_numpy()
    return tuple(torch.tensor(named[name]) for name in ("id", "x", "y"))  # type: ignore[return-value]


def show(report: elastic.ray.Report) -> None:
    metrics = report.metrics
    if "epoch" in metrics:
        print(
            f"epoch {metrics['epoch']}: {metrics['rows']} rows, sum {metrics['numbers']}",
            flush=True,
        )
    elif metrics["position"] % 10 < metrics["workers"]:
        print(f"block {metrics['position']:4}  {metrics['workers']} workers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=100, help="rows per worker and step")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": args.workers + 1}
    ray.init(**here)

    def dataset(epoch: int) -> ray.data.Dataset:
        return dataset_of(epoch, args.rows)

    name = f"feed-{uuid.uuid4().hex[:8]}"
    # Held here so that the actor ends with this program. Several workers call it concurrently.
    feed: Any = (
        ray.remote(Feed)
        .options(name=name, num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=64)
        .remote(dataset, args.batch_size)
    )
    ray.get(feed.__ray_ready__.remote())
    result = elastic.ray.run(
        train,
        {"feed": name, "epochs": args.epochs},
        num_workers=args.workers,
        min_workers=args.min_workers,
        max_workers=args.workers,
        on_report=show,
    )
    print(f"{len(result.values)} workers, error {result.values[0]['error']:.6f}")


if __name__ == "__main__":
    main()
