"""Compression: the sent tensor, and the result."""

import pytest
import torch

from elastic.api.compression import Compression


def there_and_back(compression, tensor):
    wire, context = compression.compress(tensor)
    return wire, compression.decompress(wire, context)


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_small_and_integer_tensors_are_not_cast(compression, dtype):
    tensor = torch.ones(3, dtype=dtype)
    wire, back = there_and_back(compression, tensor)
    assert wire is tensor
    assert back is tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("compression", "wire_dtype"),
    [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)],
)
def test_floats_are_cast_and_cast_back(compression, wire_dtype, dtype):
    tensor = torch.tensor([[1.5, -0.25], [3.0, 0.0]], dtype=dtype)
    wire, back = there_and_back(compression, tensor)
    assert wire.dtype == wire_dtype
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_compression_none_returns_the_same_tensor():
    tensor = torch.rand(5)
    wire, back = there_and_back(Compression.none, tensor)
    assert wire is tensor
    assert back is tensor


def test_gradients_pass_through_the_cast():
    tensor = torch.ones(3, requires_grad=True)
    _, back = there_and_back(Compression.bf16, tensor)
    back.sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, torch.ones(3))
