"""Trainers whose loops train with DDP refuse a loader that cuts steps into shards, before training."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.data import DataLoader
from elastic.errors import Invalid
from elastic.exact.shards import Shards

pytest.importorskip("lightning", reason="pip install hvd-elastic[lightning]")


def loader(shards: Any) -> DataLoader:
    return DataLoader(range(16), global_batch_size=8, shards=shards)


@pytest.mark.parametrize("shards", [Shards(4), 4], ids=["Shards", "a number"])
def test_lightning_refuses_shards(shards):
    from elastic.integrations.lightning import joining

    with pytest.raises(Invalid, match="or leave shards= out; with Fabric write the loop"):
        joining.refuse_shards(loader(shards))
    joining.refuse_shards(loader(None))
