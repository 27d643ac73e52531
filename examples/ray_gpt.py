"""Train the small GPT on a Ray cluster, from a laptop to hundreds of spot nodes.

    python examples/ray_gpt.py                                             # starts a local Ray
    RAY_ADDRESS=auto python examples/ray_gpt.py --workers 8 --min-workers 2   # on a node of a cluster
    ray job submit --working-dir examples -- python ray_gpt.py --workers 8

Workers join and leave with the nodes. Kill a node, or drain it with `ray drain-node`, while the script runs: the other
workers continue from the last step.
"""

from __future__ import annotations

import argparse
from typing import Any

import cloudpickle

import elastic.ray
import gpt_model

cloudpickle.register_pickle_by_value(gpt_model)  # nodes need not have this file


def train(config: dict[str, Any]) -> float:
    """Train on one worker. Returns the loss of the last step in nats per byte."""
    import torch
    from torch.utils.data import DataLoader

    import elastic

    elastic.init()
    torch.manual_seed(0)
    model = gpt_model.GPT(layers=4, width=128, heads=4, context=128)
    optimizer = elastic.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    text, _ = gpt_model.standard_library(config["corpus_bytes"])
    windows = gpt_model.Windows(text, context=128)
    sampler = elastic.ElasticSampler(windows, shuffle=True)
    loader = DataLoader(windows, batch_size=config["batch_size"], sampler=sampler)

    @elastic.run
    def loop(state: elastic.TorchState) -> float:
        while True:
            for index, batch in enumerate(loader):
                optimizer.zero_grad()
                loss = model.loss(batch)
                loss.backward()
                optimizer.step()
                state.loss = elastic.allreduce(loss.detach(), name="loss").item()
                state.step += 1
                state.sampler.record_batch(index, config["batch_size"])
                if elastic.rank() == 0:
                    elastic.report(
                        {"step": state.step, "loss": state.loss, "workers": elastic.size()}
                    )
                state.commit()
                if state.step >= config["steps"]:
                    return float(state.loss)
            state.sampler.set_epoch(state.sampler.epoch + 1)

    return loop(elastic.TorchState(model, optimizer, sampler=sampler, step=0, loss=0.0))


def show(report: elastic.ray.Report) -> None:
    metrics = report.metrics
    if metrics["step"] == 1 or metrics["step"] % 10 == 0:
        print(
            f"step {metrics['step']:4}  loss {metrics['loss']:.3f}  {metrics['workers']} workers",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1, help="for each worker")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4, help="windows per worker and step")
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
    args = parser.parse_args()
    result = elastic.ray.run(
        train,
        {"steps": args.steps, "batch_size": args.batch_size, "corpus_bytes": args.corpus_bytes},
        num_workers=args.workers,
        min_workers=args.min_workers,
        max_workers=args.workers,
        resources_per_worker={"CPU": args.cpus},
        use_gpu=args.gpu,
        on_report=show,
    )
    print(f"{len(result.values)} workers, loss {result.values[0]:.3f} nats per byte")


if __name__ == "__main__":
    main()
