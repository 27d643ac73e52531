"""Elastic training with Accelerate: a state for the objects that ``accelerator.prepare`` returns.

Samples of a loader in the state are assigned to ranks by the job's position. Accelerate still moves the loader's
batches to the device and detects the last batch. Other loaders, such as those for evaluation, divide their samples
among the ranks of the current world. See docs/transformers.md.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
)
from accelerate.utils import DistributedType
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from elastic import context
from elastic.data import DataLoader
from elastic.data.conversion import from_torch
from elastic.errors import Fixed, Invalid, NotElastic
from elastic.integrations import tested_versions
from elastic.runtime import lifecycle
from elastic.sharding import unsupported_sharding
from elastic.state.handlers.part import Carried
from elastic.state.torch_state import TorchState

_UNSUPPORTED = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


class PreparedState(TorchState):
    """State of a script that uses Accelerate.

    Create it after ``accelerator.prepare(...)``. Optimizers, schedulers, the scaler, objects registered for the
    accelerator's checkpoints, and random generators are included automatically.

    Args:
        accelerator: the script's accelerator.
        values: every model prepared for training, as returned by ``prepare``, the loaders whose position the job keeps,
            and Python values.

    Raises:
        Invalid: an object cannot be updated when the world changes. Raised before training starts.

    Example::

        state = PreparedState(accelerator, model=model, loader=train_loader, epoch=0)
    """

    def __init__(self, accelerator: Accelerator, **values: Any) -> None:
        tested_versions.check("accelerate")
        refuse(accelerator)
        optimizers = [each.optimizer for each in accelerator._optimizers]
        models = [value for value in values.values() if isinstance(value, Module)]
        unsupported_sharding.check_trainer("Accelerate", optimizers, models)
        kept = {name: _kept(accelerator, value) for name, value in values.items()}
        for number, optimizer in enumerate(accelerator._optimizers):
            kept[f"optimizer_{number}"] = optimizer.optimizer
        for number, scheduler in enumerate(accelerator._schedulers):
            kept[f"scheduler_{number}"] = Carried.of(scheduler.scheduler)
        for number, value in enumerate(accelerator._custom_objects):
            kept[f"registered_{number}"] = Carried.of(value)
        if accelerator.scaler is not None:
            kept["scaler"] = accelerator.scaler
        if accelerator._optimizers and not any(map(averaging, values.values())):
            raise Invalid(
                "the model does not average gradients: pass the model that accelerator.prepare() returned, as"
                " in PreparedState(accelerator, model=model, loader=loader)"
            )
        self._accelerator = accelerator
        follow(accelerator)
        super().__init__(rng=True, **kept)

    def reset(self) -> None:
        """Update the accelerator after a change of the world."""
        follow(self._accelerator)
        super().reset()


def refuse(accelerator: Accelerator) -> None:
    """Raise NotElastic or Invalid if a setting is not supported in a changing world."""
    kind = accelerator.distributed_type
    if kind in _UNSUPPORTED:
        raise NotElastic(
            f"this Accelerator uses {_UNSUPPORTED[kind]}, which divides the model over a fixed number of ranks,"
            " but an elastic job needs a whole model on each rank: omit the plugin",
            Fixed.MODULE,
        )
    if lifecycle.active() is None:
        if lifecycle.torchs_own():
            raise Invalid(context.NOT_LOADED)
        raise Invalid(
            "this process is not a worker of an elastic job: start the script with elasticrun -np 2 python"
            " script.py"
        )
    if kind == DistributedType.NO and lifecycle.current().elastic:
        raise Invalid(
            "this Accelerator was created before torch.distributed was initialized, so it would not average"
            " gradients: create the Accelerator after init_process_group, in a worker that elasticrun started"
        )


def _has_unknown(state: PartialState) -> bool:
    """Return Accelerate's value of ``use_distributed``.

    The result is also True for a single worker, because workers may join.

    On a GPU this value decides whether Accelerate wraps a model in DDP. On a CPU, Accelerate always does.
    """
    alone = state.num_processes == 1 and lifecycle.active() is None
    return state.distributed_type != DistributedType.NO and not alone


# Patched at import, because scripts prepare models before they create a state.
setattr(PartialState, "use_distributed", property(_has_unknown))  # noqa: B010 - not for mypy


def averaging(value: Any) -> Any:
    """Return the DDP module if the value is one, whether compiled or not. Otherwise return None."""
    inner = getattr(value, "_orig_mod", value)
    return inner if isinstance(inner, DistributedDataParallel) else None


def _kept(accelerator: Accelerator, value: Any) -> Any:
    """Return the object to store in the state. A prepared loader is converted, so that it uses the job's position."""
    if isinstance(value, Module):
        return averaging(value) or accelerator.unwrap_model(value, keep_torch_compile=False)
    if _is(value, DataLoaderDispatcher):
        raise Invalid(
            "a loader was prepared with dispatch_batches, so only rank 0 reads data, and the position would be"
            " lost with rank 0: create Accelerator(dispatch_batches=False)"
        )
    return deal(value) if is_dealable(value) else value


def is_dealable(value: Any) -> bool:
    """Return whether the value is a prepared loader that gives each rank different samples."""
    return _is(value, DataLoaderShard)


def _is(value: Any, kind: type) -> bool:
    """Return whether the actual type of a value is ``kind``.

    A prepared loader reports the class of the loader that it wraps.
    """
    return issubclass(type(value), kind)


def deal(prepared: Any, **changes: Any) -> DataLoader:
    """Make ``prepared`` return this rank's batches, starting at the job's position. Idempotent.

    Returns:
        The inner loader, which a state stores.

    Raises:
        Invalid: the loader cannot be converted.
    """
    base = getattr(prepared, "base_dataloader", None)
    if base is None:
        raise Invalid(
            f"the batches come from a {type(prepared).__name__} that Accelerate has not prepared: return"
            " self.accelerator.prepare(loader) for a torch DataLoader from get_train_dataloader(). Shards are"
            " not supported with a Trainer"
        )
    if isinstance(base, DataLoader):
        return base
    shard = base.batch_sampler
    given: dict[str, Any] = {}
    if isinstance(shard, BatchSamplerShard) or type(shard) is BatchSampler:
        inner = getattr(shard, "batch_sampler", shard)
        split = getattr(shard, "split_batches", False)
        sizes = {"global_batch_size" if split else "batch_size": inner.batch_size}
        given = {"batch_size": 1, "batch_sampler": None, "drop_last": inner.drop_last, **sizes}
        given.update(_order(inner.sampler))
    made: Any = from_torch(base, **given, **changes)
    # attributes that Accelerate reads from a prepared loader
    made.batch_sampler, made.sampler, made.generator = shard, base.sampler, None
    made.ahead = 1  # Accelerate fetches one batch ahead to check whether another follows.
    prepared.base_dataloader = made
    prepared.rng_types = None  # The elastic loader determines the order of the samples.
    # The job's state contains the position. Older versions of Accelerate fail on a loader's state without their own
    # keys.
    prepared._update_state_dict = _nothing
    return made


def _nothing() -> None:
    pass


def _order(sampler: Any) -> dict[str, Any]:
    if isinstance(sampler, SequentialSampler):
        return {"shuffle": False}
    if type(sampler) in (RandomSampler, SeedableRandomSampler) and not sampler.replacement:
        return {"shuffle": True, "seed": getattr(sampler, "initial_seed", 0)}
    return {"sampler": sampler}


def follow(accelerator: Accelerator) -> None:
    """Update Accelerate's copies of the rank and the world size to those of the current world."""
    place = lifecycle.place()
    # Accelerate expects a local process 0, but the worker in that slot may be lost while others keep training.
    setattr(PartialState, "is_local_main_process", property(_speaks))  # noqa: B010 - not for mypy
    # Each of these objects stores a copy of the process group's settings.
    for state in (PartialState(), accelerator.state):
        state.num_processes, state.process_index = max(place.size, 1), place.rank
        state.local_process_index = place.local_rank
    for loader in accelerator._dataloaders:
        shard = getattr(loader, "batch_sampler", None)
        if isinstance(shard, BatchSamplerShard):
            shard.num_processes, shard.process_index = max(place.size, 1), place.rank


def _speaks(state: PartialState) -> bool:
    """Return whether this worker prints output and shows progress for its host. Rank 0 always does."""
    place = lifecycle.place()
    elsewhere = place.local_size < place.size and state.local_process_index == 0
    return bool(state.is_main_process) or elsewhere
