"""Copies for a commit: every bit is copied, by the C++ library or by torch, for all kinds of tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from elastic.collectives.shared_memory import native_library
from elastic.collectives.shared_memory.host_copy import HostCopy
from elastic.state.snapshots.snapshot import same_bits


@pytest.fixture(params=["library", "torch"])
def way(request, monkeypatch):
    """Copies of tensors that can be copied byte by byte, with or without the library."""
    if request.param == "torch":
        monkeypatch.setattr(native_library, "load", lambda: None)
    elif native_library.load() is None:
        pytest.skip(native_library.missing())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return request.param


@pytest.fixture
def by_torch(monkeypatch):
    """Record how many tensors torch has to copy, each time."""
    counted: list[int] = []
    real = torch._foreach_copy_

    def counting(to, what):
        counted.append(len(to))
        real(to, what)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    return counted


def copy_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    buffers = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
    with torch.no_grad():
        HostCopy(tensors, buffers).run(tensors, [tensor.data_ptr() for tensor in tensors])
    return buffers


def assert_copied(tensors: list[torch.Tensor]) -> None:
    for tensor, buffer in zip(tensors, copy_of(tensors), strict=True):
        assert same_bits(tensor, buffer)


def test_copies_of_any_size_and_alignment_are_exact(way):
    sizes = (0, 1, 63, 64, 65, 1023, 1024, 1025, 1151, 100_003)
    for size, shift in itertools.product(sizes, (0, 1, 17)):
        whole = torch.arange(size + 2 * shift, dtype=torch.int64).to(torch.uint8)
        source = whole[shift : shift + size]
        room = torch.full((size + 64,), 7, dtype=torch.uint8)
        buffer = room[33 - shift : 33 - shift + size]
        HostCopy([source], [buffer]).run([source], [source.data_ptr()])
        assert torch.equal(buffer, source), (size, shift)
        assert (room[: 33 - shift] == 7).all(), (size, shift)  # and nothing outside
        assert (room[33 - shift + size :] == 7).all(), (size, shift)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_dtype_are_copied(way, dtype):
    assert_copied([torch.randn(40, 50).to(dtype), torch.ones((), dtype=dtype)])


def test_tensors_without_a_contiguous_layout_are_copied_by_torch(way, by_torch):
    odd = [
        torch.randn(30, 40).t(),
        torch.randn(30, 40)[:, ::2],
        torch.randn(2, 3, 20, 20).to(memory_format=torch.channels_last),
        torch._neg_view(torch.randn(2000)),
        torch.randn(2000, dtype=torch.complex64).conj(),
    ]
    assert_copied([torch.randn(2000), *odd, torch.nn.Parameter(torch.randn(3))])
    assert by_torch == ([len(odd)] if way == "library" else [len(odd) + 2])


def test_a_tensor_of_a_subclass_is_left_to_torch(by_torch, monkeypatch):
    class Other(torch.Tensor):
        pass

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert_copied([torch.randn(2000).as_subclass(Other)])
    assert by_torch == [1]


def test_several_torch_threads_copy_instead_of_the_library(by_torch, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert_copied([torch.randn(2000)])
    assert by_torch == [1]


def test_later_tensors_are_copied_from_their_current_location(way):
    first, second = torch.randn(3000), torch.randn(3000)
    buffer = torch.empty(3000)
    copy = HostCopy([first], [buffer])
    copy.run([first], [first.data_ptr()])
    copy.run([second], [second.data_ptr()])
    assert torch.equal(buffer, second)
