"""The torch.distributed process group of Lightning's strategies, for Trainer and Fabric."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.utils import data as torch_data

import elastic.torch_backend  # noqa: F401  registers the backend
from elastic.data import DataLoader
from elastic.errors import Invalid
from elastic.runtime import lifecycle

BACKEND = "elastic"
REFUSED = {
    "start_method": "elasticrun starts the workers",
    "process_group_backend": "elastic creates the process group",
    "cluster_environment": "elasticrun assigns the ranks",
    "model_averaging_period": (
        "ranks that average their parameters only periodically differ in between, so no rank could replace a lost"
        " one"
    ),
}


def refuse(arguments: dict[str, Any]) -> None:
    """Raise Invalid if an argument of `DDPStrategy` is not supported."""
    for name, why in REFUSED.items():
        if arguments.get(name) is not None:
            raise Invalid(f"ElasticStrategy does not support {name}: {why}. Omit {name}")


def refuse_shards(loader: Any) -> None:
    """Raise Invalid if a loader divides steps into shards."""
    if isinstance(loader, DataLoader) and loader.arguments.shards is not None:
        raise Invalid(
            "the loader divides a step into shards, but the trainer uses one batch per rank: pass the same"
            " shards to Trainer(strategy=ElasticStrategy(shards=shards)), or omit shards=. With Fabric, write"
            " the loop as in: elasticrun docs exact"
        )


def join_process_group(timeout: timedelta | None) -> None:
    """Create the process group.

    Idempotent. This function contacts no other rank, because a new worker joins while other workers train.
    """
    if distributed.is_initialized():
        found = distributed.get_backend()
        if found != BACKEND:
            raise Invalid(
                f'a process group of backend {found} already exists, and strategy="elastic" needs its own: create'
                " the Trainer first, or call init_process_group with the backend elastic"
            )
        return
    place = lifecycle.place()
    torchs: Any = distributed
    torchs.init_process_group(
        BACKEND,
        store=torchs.HashStore(),
        rank=place.rank,
        world_size=max(place.size, 1),
        timeout=timeout,
    )


def order_of(loader: Any) -> dict[str, Any]:
    """Return Lightning's seed as arguments for an elastic loader, or an empty dict if ``loader`` is not shuffled."""
    shuffled = isinstance(getattr(loader, "sampler", None), torch_data.RandomSampler)
    return {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0"))} if shuffled else {}


def device_of(devices: list[torch.device] | None) -> torch.device:
    """Return this worker's device on its host."""
    if not devices:
        return torch.device("cpu")
    return devices[lifecycle.place().local_rank % len(devices)]
