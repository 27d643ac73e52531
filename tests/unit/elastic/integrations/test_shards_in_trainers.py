"""Trainers whose loops train with DDP refuse a loader that divides steps into shards, before training."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.data import DataLoader
from elastic.errors import Invalid
from elastic.exact.shards import Shards
from harness.golden import raises


def loader(shards: Any) -> DataLoader:
    return DataLoader(range(16), global_batch_size=8, shards=shards)


@pytest.mark.nightly
@pytest.mark.slow  # to import Lightning takes longer than all of this folder's tests: so not while they are collected
def test_lightning_refuses_shards():
    pytest.importorskip("lightning", reason="pip install hvd-elastic[lightning]")
    from elastic.integrations.lightning import torch_process_group

    for shards in (Shards(4), 4):
        with raises(Invalid):
            torch_process_group.refuse_shards(loader(shards))
    torch_process_group.refuse_shards(loader(None))


@pytest.mark.slow
def test_strategy_when_shards_are_verified_then_is_refused():
    pytest.importorskip("lightning", reason="pip install hvd-elastic[lightning]")
    from elastic.integrations.lightning.strategy import ElasticStrategy

    with raises(Invalid):
        ElasticStrategy(shards=Shards(4, verify=0.5))
