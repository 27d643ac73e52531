"""Loaders with prefetching: every batch once and in order, errors in place of a batch, and no remaining thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from harness.golden import raises
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.data.data_loader_base import AsyncDataLoaderMixin as UnderItsPath

WAIT_S = 60.0


class Numbers(BaseDataLoader):
    """``fails_at``: the number whose read raises."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.read: list[int] = []
        self.full = threading.Event()
        self.readers: set[int] = set()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            self.read.append(number)
            self.readers.add(threading.get_ident())
            if len(self.read) == 3:
                self.full.set()
            yield number

    def _process_batch(self, batch: int) -> int:
        return batch * 10


class AheadNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "async data loader"]


def test_loader_without_a_thread_yields_its_batches():
    assert UnderItsPath is AsyncDataLoaderMixin
    assert list(Numbers(3)) == [0, 10, 20]
    with pytest.raises(NotImplementedError):
        len(BaseDataLoader())


@pytest.mark.parametrize("size", [0, 1, 64])
def test_every_pass_yields_every_batch_in_order(size):
    loader = AheadNumbers(async_loader_queue_size=size, count=5)
    assert len(loader) == 5
    for _ in range(2):
        assert list(loader) == [0, 10, 20, 30, 40]
    assert (threading.get_ident() in loader.readers) is (size == 0)
    assert not threads()


def test_loader_prefetches_the_given_number_of_batches():
    loader = AheadNumbers(2, 100)
    for _ in loader:
        assert loader.full.wait(WAIT_S), "two wait to be taken, besides the one that was"
        assert len(loader.read) <= 4, "the next is in the reader's hand"
        break
    assert not threads()


def test_batches_prefetched_by_an_abandoned_pass_do_not_appear_in_the_next():
    loader = AheadNumbers(4, 10)
    for batch in loader:
        if batch == 20:
            break
    assert list(loader) == [number * 10 for number in range(10)]
    assert not threads()


def test_error_of_a_data_loader_is_raised_at_its_batch():
    batches = iter(AheadNumbers(4, 10, fails_at=2))
    assert [next(batches), next(batches)] == [0, 10]
    with raises(OSError):
        next(batches)
    assert not threads()


def test_closing_ends_passes_under_way():
    loader = AheadNumbers(1, 100)
    batches = iter(loader)
    assert next(batches) == 0
    loader.close_async_loader()
    assert len(list(batches)) <= 1
    loader.close_async_loader()
    assert not threads()


def test_negative_queue_size_is_refused():
    with pytest.raises(ValueError, match="async_loader_queue_size is -1"):
        AheadNumbers(-1, 3)
