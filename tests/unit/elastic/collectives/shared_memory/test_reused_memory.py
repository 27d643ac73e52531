"""Memory of results that other frameworks hold: reused only after its release."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from elastic.collectives.shared_memory import arena as arenas
from elastic.collectives.shared_memory import memfd
from elastic.collectives.shared_memory.arena import Arena
from elastic.collectives.shared_memory.reused_memory import KEPT, ReusedMemory

MIB = 1 << 20


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    made = Arena(64 * MIB)
    monkeypatch.setattr(arenas, "_mine", made)
    yield made
    memfd.unmap(made.address, made.bytes)
    os.close(made.fd)


def test_next_tensor_of_equal_size_reuses_released_pages(arena):
    memory = ReusedMemory()
    first = memory.tensor(MIB, torch.float32)
    first.fill_(7)
    address, view = first.data_ptr(), first[:10].numpy()
    del first
    other = memory.tensor(MIB, torch.float32)
    assert other.data_ptr() != address  # a numpy view holds it
    assert view[0] == 7
    del view
    again = memory.tensor(MIB // 2, torch.float64)
    assert again.data_ptr() == address
    assert arena.offset_of(again.data_ptr(), again.nbytes) is not None


def test_number_of_kept_buffers_is_limited(arena):
    memory = ReusedMemory()
    many = [memory.tensor(MIB, torch.uint8) for _ in range(KEPT + 3)]
    del many
    kept = memory.tensor(2 * MIB, torch.uint8)
    assert arena.lent == KEPT * MIB + kept.nbytes


def test_tensor_is_allocated_by_torch_without_room_in_the_arena(arena, monkeypatch):
    memory = ReusedMemory()
    assert memory.tensor(128 * MIB, torch.uint8).shape == (128 * MIB,)
    assert memory.tensor(0, torch.float32).shape == (0,)
    monkeypatch.setattr(arenas, "_mine", None)
    monkeypatch.setattr(arenas, "_why_not", "ELASTIC_NATIVE is 0")
    assert memory.tensor(4, torch.int64).dtype == torch.int64
