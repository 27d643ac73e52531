"""Trainers, which save and load whole models, refuse models that are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import nn

from elastic.errors import Fixed, NotElastic
from harness.fakes.process_group import only_rank

pytestmark = [
    pytest.mark.slow,  # imports
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def sharded() -> Iterator[Any]:
    """A model of four ranks, of which three are made up."""
    from torch.distributed.fsdp import fully_shard

    with only_rank(0, 4):
        yield fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@pytest.mark.nightly
def test_lightning_trainer_refuses_a_fully_sharded_module_before_ddp_wraps_the_module(sharded):
    lightning = pytest.importorskip("lightning.pytorch")
    from elastic.integrations.lightning.strategy import ElasticStrategy

    trainer = create_autospec(lightning.Trainer, instance=True)
    trainer.lightning_module = sharded
    with pytest.raises(NotElastic) as refused:
        ElasticStrategy.setup(create_autospec(ElasticStrategy, instance=True), trainer)
    assert refused.value.kind is Fixed.MODULE


def test_fabric_refuses_a_fully_sharded_module_before_ddp_wraps_the_module(sharded):
    pytest.importorskip("lightning.fabric")
    from elastic.integrations.lightning.fabric import ElasticFabricStrategy

    strategy = create_autospec(ElasticFabricStrategy, instance=True)
    with pytest.raises(NotElastic) as refused:
        ElasticFabricStrategy.setup_module(strategy, sharded)
    assert refused.value.kind is Fixed.MODULE


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Accelerate's state of a worker on a GPU, with the plugin of FSDP2."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin

    known = {
        "distributed_type": DistributedType.MULTI_GPU,
        "device": torch.device("cpu"),
        "num_processes": 2,
        "process_index": 0,
        "local_process_index": 0,
        "backend": "nccl",
        "debug": False,
        "fork_launched": False,
        "_cpu": False,
    }
    monkeypatch.setattr(PartialState, "_shared_state", known)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    plugin = create_autospec(FullyShardedDataParallelPlugin, instance=True)
    plugin.fsdp_version, plugin.mixed_precision_policy = 2, None
    plugin.activation_checkpointing = False
    state = AcceleratorState(
        fsdp_plugin=plugin, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True
    )
    found = create_autospec(accelerate.Accelerator, instance=True)
    found.state, found.distributed_type = state, state.distributed_type
    yield found


def test_accelerate_with_its_fsdp2_plugin_is_refused_on_gpus(on_a_gpu):
    from elastic.integrations.accelerate import PreparedState, refuse

    for door in (refuse, PreparedState):  # a Trainer of transformers calls the first
        with pytest.raises(NotElastic) as refused:
            door(on_a_gpu)
        assert refused.value.kind is Fixed.MODULE


def test_accelerate_refuses_a_model_sharded_by_the_script(sharded, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from elastic.integrations import accelerate as ours

    accelerator = create_autospec(accelerate.Accelerator, instance=True)
    accelerator.distributed_type = accelerate.utils.DistributedType.MULTI_CPU
    accelerator._optimizers = []
    monkeypatch.setattr(ours, "refuse", lambda _: None)  # that of the world
    with pytest.raises(NotElastic) as refused:
        ours.PreparedState(accelerator, model=sharded)
    assert refused.value.kind is Fixed.MODULE
