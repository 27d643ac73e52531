"""Tensors in memory that peers can map: their location, the return of their memory, and access by others."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator

import pytest
import torch

from elastic.collectives.shared_memory import arena as arenas
from elastic.collectives.shared_memory import memfd
from elastic.collectives.shared_memory.arena import Arena
from harness.golden import raises

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * MIB)
    yield made
    memfd.unmap(made.address, made.bytes)
    os.close(made.fd)


@pytest.fixture
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just started."""
    monkeypatch.setattr(arenas, "_mine", None)
    monkeypatch.setattr(arenas, "_why_not", "")


def tensor(arena: Arena, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = arena.tensor(elements, dtype)
    assert made is not None
    return made


def pages_of(arena: Arena) -> int:
    """Return the number of descriptors in the kernel."""
    return os.fstat(arena.fd).st_blocks * 512 // memfd.PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_a_tensor_of_zeros_begins_at_a_page(arena, dtype):
    first, second = tensor(arena, 1000, dtype), tensor(arena, 1, dtype)
    assert first.shape == (1000,)
    assert first.dtype == dtype
    assert not first.any()
    assert [each.data_ptr() % memfd.PAGE for each in (first, second)] == [0, 0]
    assert first.fill_(3).sum() == 3000
    assert not second.any()


def test_memory_is_released_with_the_last_view(arena):
    flat = tensor(arena, MIB)
    flat.fill_(1)
    assert pages_of(arena) >= 4 * MIB // memfd.PAGE
    view = flat[10:20].view(2, 5)
    del flat
    assert arena.lent == 4 * MIB
    assert view.sum() == 10
    del view
    assert arena.lent == 0
    assert pages_of(arena) == 0
    assert not tensor(arena, MIB).any()


def test_storage_keeps_its_memory_without_a_tensor(arena):
    storage = tensor(arena, 1000).fill_(1).untyped_storage()
    gc.collect()
    assert arena.lent == memfd.PAGE
    assert torch.tensor([], dtype=torch.float32).set_(storage).sum() == 1000


def test_memory_that_a_peer_may_write_is_never_reused(arena):
    flat = tensor(arena, 1000)
    where = flat.data_ptr()
    assert arena.quarantine(flat[500:])
    del flat
    assert arena.lent == memfd.PAGE
    assert tensor(arena, 1000).data_ptr() != where


def test_tensor_outside_of_the_arena_cannot_be_quarantined(arena):
    assert not arena.quarantine(torch.zeros(3))


def test_arena_returns_offsets_only_for_memory_inside(arena):
    tensor(arena, 5)
    flat = tensor(arena, 1000)
    assert arena.offset_of(flat.data_ptr(), flat.nbytes) == flat.data_ptr() - arena.address
    assert arena.offset_of(arena.address, arena.bytes) == 0
    assert arena.offset_of(arena.address, arena.bytes + 1) is None
    assert arena.offset_of(arena.address - 1, 1) is None
    assert arena.offset_of(torch.zeros(3).data_ptr(), 12) is None


def test_staging_region_is_released_only_once(arena):
    region = arena.take(100)
    assert region is not None
    assert region.address == arena.address + region.offset
    assert region.bytes == memfd.PAGE
    region.release()
    again = arena.take(100)
    region.release()
    assert again is not None
    assert arena.lent == memfd.PAGE


def test_full_arena_allocates_again_once_memory_is_released(arena):
    most = tensor(arena, arena.bytes, torch.uint8)
    assert arena.tensor(1, torch.float32) is None
    assert arena.take(1) is None
    del most
    assert arena.take(1) is not None


# ---- the arena of this process -----------------------------------------------------------------


def test_a_process_creates_its_arena_at_the_first_use(none_yet):
    mine = arenas.mine()
    assert mine is not None
    assert arenas.mine() is mine
    assert arenas.why_not() == ""
    flat = arenas.zeros(1000, torch.float32)
    assert mine.offset_of(flat.data_ptr(), flat.nbytes) is not None
    assert arenas.zeros(0, torch.float32).shape == (0,)


def test_zeros_are_allocated_by_torch_when_the_arena_has_no_room(none_yet, monkeypatch):
    mine = Arena(MIB)
    monkeypatch.setattr(arenas, "_mine", mine)
    flat = arenas.zeros(MIB, torch.float32)
    assert mine.offset_of(flat.data_ptr(), 1) is None
    assert not flat.any()


def test_disabled_arena_allocates_with_torch(none_yet, monkeypatch):
    monkeypatch.setenv("ELASTIC_NATIVE", "0")
    assert arenas.mine() is None
    assert arenas.why_not() == arenas.OFF
    assert not arenas.zeros(1000, torch.float32).any()


@pytest.mark.parametrize(
    "number", [errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENOSYS, errno.EPERM, errno.EIO]
)
def test_arena_refused_by_the_system_falls_back_with_a_reason(none_yet, monkeypatch, number):
    def refuse(name: str, size: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(memfd, "create", refuse)
    assert arenas.mine() is None
    assert arenas.mine() is None
    with raises(AssertionError):
        raise AssertionError(arenas.why_not())
    assert not arenas.zeros(1000, torch.float32).any()
