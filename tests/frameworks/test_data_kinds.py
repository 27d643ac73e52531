"""Datasets of Hugging Face and torchdata's loader, given to ours. Without them: ``pip install datasets torchdata``."""

from __future__ import annotations

from typing import Any

import pytest

import elastic
from elastic.errors import Invalid
from harness import wording

pytestmark = pytest.mark.nightly
LENGTH = 23


def samples(loader: Any) -> list[int]:
    return sorted(int(each) for batch in loader for each in batch["x"])


@pytest.fixture
def dataset() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": list(range(LENGTH))}).with_format("torch")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_hugging_face_gives_each_sample_once(dataset, workers):
    loader = elastic.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    assert samples(loader) == list(range(LENGTH))


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_is_distributed_to_loader_workers_once(dataset, workers):
    stream = dataset.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=5)
    loader = elastic.data.DataLoader(stream, batch_size=4, num_workers=workers)
    assert samples(loader) == list(range(LENGTH))


def test_a_stream_that_was_cut_for_fixed_ranks_is_refused(dataset):
    from datasets.distributed import split_dataset_by_node

    cut = split_dataset_by_node(dataset.to_iterable_dataset(), rank=0, world_size=2)
    with pytest.raises(Invalid, match=wording.GIVE_WHOLE_DATASET):
        elastic.data.DataLoader(cut, batch_size=4)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_loader_is_converted(dataset):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    theirs = torchdata.StatefulDataLoader(dataset, batch_size=4, shuffle=True, num_workers=1)
    loader = elastic.data.from_torch(theirs)
    assert loader.arguments.shuffle and loader.num_workers == 1
    assert samples(loader) == list(range(LENGTH))
