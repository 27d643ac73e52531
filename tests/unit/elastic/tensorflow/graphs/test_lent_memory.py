"""Memory that TensorFlow holds without a copy: the test calls the C++ library like TensorFlow."""

from __future__ import annotations

import ctypes
import weakref

import pytest
import torch

from elastic.collectives.shared_memory import native_library
from elastic.tensorflow.graphs.lent_memory import ALIGNED, LARGE, LentMemory

pytestmark = pytest.mark.skipif(native_library.load() is None, reason=native_library.missing())


def large() -> torch.Tensor:
    memory = torch.zeros(LARGE + ALIGNED, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNED
    return memory[begin : begin + LARGE]


def let_go(lent: LentMemory, flag: int) -> None:
    assert lent.let_go is not None
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(lent.let_go)(
        None, 0, flag
    )


def test_lent_tensor_is_kept_until_deallocated_and_collected():
    lent = LentMemory()
    tensors = [large(), large()]
    gone = [weakref.ref(each) for each in tensors]
    flags = [lent.lend(each) for each in tensors]
    tensors.clear()
    lent.collect()
    assert all(each() is not None for each in gone)
    assert flags[0] is not None and flags[1] is not None and flags[0] != flags[1]
    let_go(lent, flags[1])
    assert gone[1]() is not None, "no Python runs in that thread"
    lent.collect()
    assert gone[0]() is not None and gone[1]() is None
    let_go(lent, flags[0])
    lent.collect()
    assert gone[0]() is None


def test_small_or_unaligned_tensors_are_copied():
    lent = LentMemory()
    assert lent.lend(torch.zeros(8)) is None
    memory = torch.zeros(2 * LARGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNED + 1
    assert lent.lend(memory[begin : begin + LARGE]) is None


def test_flags_of_lent_memory_are_reused_and_limited(monkeypatch):
    lent = LentMemory()
    monkeypatch.setattr(lent, "_free", [0])
    first = lent.lend(large())
    assert first is not None and lent.lend(large()) is None
    let_go(lent, first)
    lent.collect()
    assert lent.lend(large()) == first


def test_tensors_are_copied_without_the_library(monkeypatch):
    monkeypatch.setattr(native_library, "load", lambda: None)
    assert LentMemory().lend(large()) is None
