"""Accelerate in a world that has lost workers: which rank prints."""

from unittest.mock import create_autospec

import pytest

from elastic.protocol.messages import Place
from elastic.runtime import lifecycle
from harness.golden import raises

accelerate = pytest.importorskip("accelerate")


@pytest.mark.parametrize(
    ("place", "prints"),
    [
        (Place(0, 3, 0, 3, 0, 1), True),
        (Place(0, 2, 2, 2, 0, 1), True),  # slots 0 and 1 are gone
        (Place(2, 3, 0, 3, 0, 1), False),  # slot 0 is back, with the last rank
        (Place(1, 4, 1, 2, 0, 2), False),
        (Place(2, 4, 0, 2, 1, 2), True),  # on another host
    ],
)
def test_one_worker_per_host_prints_for_any_lost_slots(monkeypatch, place, prints):
    from elastic.integrations.accelerate import _speaks

    monkeypatch.setattr(lifecycle, "place", lambda: place)
    state = create_autospec(accelerate.PartialState, instance=True)
    state.is_main_process, state.local_process_index = place.rank == 0, place.local_rank
    assert _speaks(state) is prints


@pytest.mark.parametrize(
    ("processes", "ours", "kind", "puts_models_in_ddp"),
    [
        (1, True, "MULTI_GPU", True),  # others may join
        (1, False, "MULTI_GPU", False),
        (2, False, "MULTI_GPU", True),
        (1, True, "NO", False),
    ],
)
def test_single_worker_on_a_gpu_trains_in_ddp(
    monkeypatch, processes, ours, kind, puts_models_in_ddp
):
    import elastic.integrations.accelerate  # noqa: F401 - it changes what Accelerate answers

    monkeypatch.setattr(lifecycle, "active", lambda: object() if ours else None)
    state = accelerate.PartialState.__new__(accelerate.PartialState)
    monkeypatch.setattr(state, "_shared_state", {})
    monkeypatch.setitem(state.__dict__, "num_processes", processes)
    monkeypatch.setitem(
        state.__dict__, "distributed_type", getattr(accelerate.utils.DistributedType, kind)
    )
    assert state.use_distributed is puts_models_in_ddp


def test_a_loader_that_accelerate_has_not_prepared_is_refused():
    """As get_train_dataloader() of a Trainer may return."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from elastic.errors import Invalid
    from elastic.integrations.accelerate import deal

    with raises(Invalid):
        deal(DataLoader(TensorDataset(torch.ones(2))))


def test_dealt_loader_when_accelerate_takes_a_snapshot_then_no_state_is_read(monkeypatch):
    """Versions up to 1.12 subtract from an entry of torchdata's state, which is missing here."""
    import torch
    from accelerate.data_loader import DataLoaderShard
    from torch.utils.data import TensorDataset

    from elastic.data import DataLoader
    from elastic.integrations.accelerate import deal

    prepared = DataLoaderShard(TensorDataset(torch.ones(8)), batch_size=2)
    deal(prepared)
    read = create_autospec(DataLoader.state_dict)
    monkeypatch.setattr(DataLoader, "state_dict", read)
    prepared._update_state_dict()
    read.assert_not_called()
