"""Copies of tensors: what is copied again, what is not, and what is waited for."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from unittest.mock import MagicMock, create_autospec

import pytest
import torch

from elastic.collectives.shared_memory.host_copy import HostCopy
from elastic.errors import DeviceLost
from elastic.state.snapshots import change_detection, pinned_copy
from elastic.state.snapshots.snapshot import SMALL, Snapshot, as_bytes, dense, same_bits
from harness.golden import raises


@pytest.fixture
def copies(monkeypatch):
    """How many tensors each copy wrote."""
    counted: list[int] = []
    real = HostCopy.run

    def counting(self, tensors, pointers):
        counted.append(len(tensors))
        real(self, tensors, pointers)

    monkeypatch.setattr(HostCopy, "run", counting)
    return counted


def test_unchanged_tensors_are_not_copied_and_one_change_copies_all(copies):
    snapshot = Snapshot()
    tensors = {"a": torch.randn(SMALL + 1), "b": torch.randn(3)}
    snapshot.take(tensors, None)
    snapshot.take(tensors, None)
    assert copies == [2]
    tensors["b"].add_(1)
    snapshot.take(tensors, None)
    assert copies == [2, 2]
    assert same_bits(snapshot.bank.buffers()["b"], tensors["b"])


def test_all_tensors_are_copied_after_a_notice_or_without_trust(copies):
    snapshot = Snapshot()
    tensors = {"a": torch.randn(3)}
    snapshot.take(tensors, None)
    change_detection.notice()
    snapshot.take(tensors, None)
    snapshot.take(tensors, None, trust=False)
    assert copies == [1, 1, 1]


def test_another_storage_is_noticed_even_at_the_same_version(copies):
    snapshot = Snapshot()
    one = torch.zeros(SMALL * 2)
    tensor = torch.nn.Parameter(one)
    snapshot.take({"a": dense(tensor)}, None)
    tensor.data = torch.zeros(SMALL * 2)  # equal content: no sample could tell
    snapshot.take({"a": dense(tensor)}, None)
    assert copies == [1, 1]


def test_untracked_change_of_a_small_tensor_is_detected(copies):
    snapshot = Snapshot()
    tensor = torch.zeros(SMALL)
    snapshot.take({"a": tensor}, None)
    tensor.data[17] = 1
    snapshot.take({"a": tensor}, None)
    assert copies == [1, 1]


def test_nan_tensor_is_always_copied_again(copies):
    snapshot = Snapshot()
    tensor = torch.full((4,), float("nan"))
    snapshot.take({"a": tensor}, None)
    snapshot.take({"a": tensor}, None)
    assert copies == [1, 1]


def test_snapshot_buffers_are_reused_and_keep_strides():
    snapshot = Snapshot()
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    snapshot.take({"a": tensor}, None)
    buffer = snapshot.bank.buffers()["a"]
    tensor.add_(1)
    snapshot.take({"a": tensor}, None)
    assert snapshot.bank.buffers()["a"] is buffer
    assert buffer.stride() == tensor.stride()
    snapshot.take({"a": torch.randn(7)}, None)
    assert snapshot.bank.buffers()["a"].shape == (7,)


def test_inference_tensors_are_always_copied_again(copies):
    snapshot = Snapshot()
    with torch.inference_mode():
        tensor = torch.zeros(3)
    snapshot.take({"a": tensor}, None)
    snapshot.take({"a": tensor}, None)
    assert copies == [1, 1]


CUDA = torch.device("cuda", 2)


class Devices:
    """Which device is the thread's present one; ``current`` while nobody guards it is the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = torch.device("cuda", 0)

        @contextlib.contextmanager
        def guard(device: torch.device) -> Iterator[None]:
            before, self.current = self.current, device
            yield
            self.current = before

        monkeypatch.setattr(torch.cuda, "device", guard)

    def event(self, complete: Callable[[], bool]) -> torch.cuda.Event:
        """One on CUDA: asked on another device it would make CUDA begin to use that."""
        event = create_autospec(torch.cuda.Event, instance=True)

        def query() -> bool:
            assert self.current == CUDA
            return complete()

        event.query.side_effect = query
        return event  # type: ignore[no-any-return]


def under_way(event: torch.cuda.Event) -> pinned_copy.PinnedCopy:
    transit = pinned_copy.PinnedCopy()
    transit.events.append((CUDA, event))
    return transit


def test_pending_copies_are_waited_for(monkeypatch):
    answers = [False, False, True]
    snapshot = Snapshot()
    snapshot.take({"a": torch.zeros(2)}, "first")
    snapshot.bank.transit = under_way(Devices(monkeypatch).event(lambda: answers.pop(0)))
    snapshot.complete()
    assert answers == []
    snapshot.take({"a": torch.ones(2)}, "second")
    assert snapshot.bank.extra == "second"


def test_a_device_that_hangs_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(pinned_copy, "COPY_LIMIT_S", 0.0)
    snapshot = Snapshot()
    snapshot.take({"a": torch.zeros(2)}, "first")
    snapshot.bank.transit = under_way(Devices(monkeypatch).event(lambda: False))
    with raises(DeviceLost):
        snapshot.complete()
    with pytest.raises(DeviceLost):
        snapshot.take({"a": torch.ones(2)}, "second")
    assert snapshot.bank.buffers()["a"].tolist() == [0, 0]


@pytest.mark.parametrize("size, at_most_s", [(1 << 20, 30.0), (12 << 30, 90.0)])
def test_copy_timeout_depends_on_the_size(monkeypatch, size, at_most_s):
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    event = Devices(monkeypatch).event(lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", create_autospec(torch.cuda.current_stream))
    transit = pinned_copy.PinnedCopy()
    transit.follow(CUDA, size)
    with raises(DeviceLost):
        transit.wait()
    assert at_most_s / 2 < now <= at_most_s


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(1, 3).expand(5, 3),
        torch.tensor(3.0),
        torch.empty(0, 2),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
    ],
    ids=["transposed", "expanded", "scalar", "empty", "conjugate", "bool"],
)
def test_bytes_are_in_logical_order(tensor):
    assert as_bytes(tensor).numel() == tensor.nbytes
    assert torch.equal(as_bytes(tensor), as_bytes(tensor.resolve_conj().contiguous().clone()))


def test_dense_keeps_each_distinct_element_once():
    view = dense(torch.arange(3).expand(4, 3))
    assert view.tolist() == [[0, 1, 2]]


class Pinning:
    """CUDA's runtime, as far as it pins: which memory is pinned, by address, and in which order of calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = False
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def cudaHostRegister(self, at: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            self.pinned[at] = nbytes
        return 2 if self.refuses else 0

    def cudaHostUnregister(self, at: int) -> int:
        del self.pinned[at]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"


def test_pinned_memory_is_one_allocation_for_all_tensors(monkeypatch):
    cuda = Pinning(monkeypatch)
    tensors = [
        torch.randn(2**18 + 1),
        torch.randn(7, 3).t(),
        torch.tensor(1, dtype=torch.int8),
        torch.empty(0, 4),
        torch.randn(3, dtype=torch.complex128),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    rooms = pinned_copy.like(tensors)
    size = sum(each.nbytes for each in tensors)
    [pinned_bytes] = cuda.pinned.values()
    assert size <= pinned_bytes <= size + pinned_copy.ALIGNMENT * len(tensors)
    for room, tensor in zip(rooms, tensors, strict=True):
        assert (room.shape, room.dtype) == (tensor.shape, tensor.dtype)
        assert room.stride() == torch.empty_like(tensor).stride()
        room.copy_(tensor)
    assert all(map(same_bits, rooms, tensors))  # none lies over another
    one = rooms[4]
    del rooms, room
    assert len(cuda.pinned) == 1  # while anybody has a part of it
    del one
    assert cuda.pinned == {}


def test_host_memory_that_cannot_be_pinned_raises_memory_error(monkeypatch):
    Pinning(monkeypatch).refuses = True
    with raises(MemoryError):
        pinned_copy.like([torch.zeros(100)])


@pytest.mark.parametrize("hangs", [False, True])
def test_pinned_memory_is_kept_when_a_hung_device_may_still_write(monkeypatch, hangs):
    """And nobody waits for that device longer than for a commit."""
    transit = create_autospec(pinned_copy.PinnedCopy, instance=True)
    transit.wait.side_effect = DeviceLost("a copy did not complete") if hangs else None
    cudart = MagicMock(["cudaHostUnregister"])
    monkeypatch.setattr(pinned_copy, "PinnedCopy", lambda: transit)
    monkeypatch.setattr(
        pinned_copy, "_side", {CUDA: create_autospec(torch.cuda.Stream, instance=True)}
    )
    monkeypatch.setattr(pinned_copy, "_given_up", [])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    Devices(monkeypatch)
    pages = pinned_copy._Pages(-1, 64)
    pages.device, pages.address, pages.owner = CUDA, 4711, os.getpid()
    pages.__del__()
    transit.follow.assert_called_once_with(CUDA, 64)
    assert cudart.cudaHostUnregister.called == (not hangs)
    assert pinned_copy._given_up == [pages] * hangs
    pages.device = None  # or it would be given back once more
