"""Sums of a row of tensors in one pass: the bits of torch's additions one after the other, or nothing is done."""

from __future__ import annotations

import pytest
import torch

from elastic.collectives.shared_memory import host_sum, native_library

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(native_library.load() is None, reason=native_library.missing())


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def drawn(count: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(elements)
    return [torch.randn(elements, generator=numbers, dtype=dtype) * 3**n for n in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_row_sum_has_the_bits_of_sequential_additions(dtype):
    for count in (2, 3, 5):
        for elements in (1, 63, 100_003):
            for divisor in (1, 2, 3):
                tensors = drawn(count, elements, dtype)
                wanted = tensors[0].clone()
                for each in tensors[1:]:
                    wanted += each
                wanted /= divisor
                for into in (torch.empty_like(wanted), tensors[-1]):
                    assert host_sum.add_up(tensors, into, divisor)
                    assert torch.equal(wanted, into), (count, elements, divisor)


def test_tensors_of_different_memory_order_are_not_added(monkeypatch):
    square = drawn(1, 16, torch.float32)[0].view(4, 4)
    into = torch.zeros(4, 4)
    assert not host_sum.add_up([square, square.t()], into, 1)
    assert not host_sum.add_up([square, square], into.t(), 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not host_sum.add_up([square, square], into, 1)
    assert not into.any()


def test_row_sum_is_not_used_for_half_precision_and_gpus():
    assert host_sum.may(torch.float32, CPU)
    assert not host_sum.may(torch.bfloat16, CPU)
    assert not host_sum.may(torch.float32, torch.device("cuda"))
