"""allreduce: results for every dtype, op and form, its scales, and its gradients."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

import horovod.torch as hvd
from conformance.worlds import FLOATS, INTEGERS, each, everywhere, raises, works

FOLD: dict[int, Callable[[Any, Any], Any]] = {
    hvd.Sum: operator.add,
    hvd.Min: torch.minimum,
    hvd.Max: torch.maximum,
    hvd.Product: operator.mul,
}


def forms() -> dict[str, Callable[..., torch.Tensor]]:
    """All forms of the call; those with an underscore overwrite their argument."""
    return {
        "allreduce": hvd.allreduce,
        "allreduce_": hvd.allreduce_,
        "async": lambda tensor, **how: hvd.synchronize(hvd.allreduce_async(tensor, **how)),
        "async_": lambda tensor, **how: hvd.synchronize(hvd.allreduce_async_(tensor, **how)),
        "grouped": lambda tensor, **how: hvd.grouped_allreduce([tensor], **how)[0],
        "grouped_": lambda tensor, **how: hvd.grouped_allreduce_([tensor], **how)[0],
    }


def expected(every: list[torch.Tensor], op: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the expected result in float64."""
    if op == hvd.Average:
        mean = sum(every) / len(every)
        assert isinstance(mean, torch.Tensor)
        return mean if dtype.is_floating_point else mean.trunc()
    return functools.reduce(FOLD[op], every)


@everywhere()
def test_every_dtype_op_and_form(rank, size):
    for dtype in INTEGERS + FLOATS:
        shape = (2, 3)
        every = [((torch.arange(6) + 2 * r) % 3 + 1).double().reshape(shape) for r in range(size)]
        for op in (hvd.Average, *FOLD):
            for number, (form, call) in enumerate(forms().items()):
                tensor = every[rank].to(dtype, copy=True)
                name = f"{dtype} {op} {form}" if number % 2 else None
                result = call(tensor, op=op, name=name)
                told = f"{form} of {dtype}, op {op}: {result}"
                assert result.dtype == dtype and result.shape == shape, told
                wanted = expected(every, op, dtype)
                tolerance = 1e-2 if dtype.is_floating_point and op == hvd.Average else 0
                assert torch.allclose(result.double(), wanted, rtol=tolerance), told
                if form.endswith("_"):
                    assert result is tensor, told
                else:
                    assert torch.equal(tensor.double(), every[rank]), told


@everywhere()
def test_any_number_of_dimensions(rank, size):
    for shape in ((), (0,), (1,), (17,), (3, 0, 2), (2, 3, 4, 5)):
        result = hvd.allreduce(torch.full(shape, float(rank)), op=hvd.Sum)
        assert result.shape == shape
        assert (result == sum(range(size))).all(), shape


@everywhere()
def test_the_average_of_whole_numbers_is_truncated_toward_zero(rank, size):
    for dtype in INTEGERS:
        low = 0 if dtype is torch.uint8 else -7
        every = [torch.tensor([low, 7, 1]) + r for r in range(size)]
        wanted = (sum(every) / size).trunc().to(dtype)
        assert torch.equal(hvd.allreduce(every[rank].to(dtype)), wanted), dtype
        assert torch.equal(hvd.allreduce_(every[rank].to(dtype)), wanted), dtype


@everywhere()
def test_scales_are_applied_before_and_after_the_sum(rank, size):
    total = size * (size + 1) / 2
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for form, call in forms().items():
            tensor = torch.full((3,), float(rank + 1), dtype=dtype)
            result = call(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
            assert result.tolist() == [2.0 * total] * 3, (dtype, form)
            tensor = torch.full((3,), float(rank + 1), dtype=dtype)
            result = call(tensor, prescale_factor=size)
            assert torch.allclose(result.double(), torch.tensor(total).double(), rtol=1e-2), form
    # 0.75 of a whole number: scaled in float64, truncated, summed.
    for dtype in (torch.int32, torch.int64):
        result = hvd.allreduce(torch.tensor([5, -5]).to(dtype), op=hvd.Sum, prescale_factor=0.75)
        assert result.tolist() == [3 * size, -3 * size], dtype
        result = hvd.allreduce(torch.tensor([5, -5]).to(dtype), op=hvd.Sum, postscale_factor=0.75)
        assert result.tolist() == [int(3.75 * size), -int(3.75 * size)], dtype


@everywhere(3)
def test_scaled_half_is_rounded_as_in_horovod_and_summed_no_less_accurately(rank, size):
    """Scaled in float32 and rounded, once; then added. With equal tensors that is Horovod's sum, bit for bit."""
    torch.manual_seed(0)
    drawn = [torch.randn(4096).mul(30).half() for _ in range(size)]
    for factor in (3.0, 1 / 3, 0.7):
        scaled = [(tensor.float() * factor).half() for tensor in drawn]
        alike = hvd.allreduce(drawn[0], op=hvd.Sum, prescale_factor=factor)
        assert torch.equal(alike, scaled[0] * size)
        total = hvd.allreduce(drawn[rank], op=hvd.Sum, prescale_factor=factor).double()
        exact = sum(tensor.double() * factor for tensor in drawn)
        horovods = ((scaled[0] + scaled[1]) + scaled[2]).double()
        assert (total - exact).abs().sum() <= (horovods - exact).abs().sum()


@everywhere()
def test_half_precision_is_scaled_in_single(rank, size):
    """1e-8 is zero in float16: scaling there would lose the result."""
    tensor = torch.full((4,), 60000.0, dtype=torch.float16)
    small = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=1e-8 * 2**14)
    wanted = (60000.0 * 1e-8 * 2**14) * size
    assert torch.allclose(small.float(), torch.tensor(wanted), rtol=2e-3)
    back = hvd.allreduce(small / size, op=hvd.Sum, postscale_factor=1e8 / 2**14 / size)
    assert torch.allclose(back.float(), torch.tensor(60000.0), rtol=2e-3)


@everywhere()
def test_tensors_need_not_be_contiguous(rank, size):
    def makers():
        yield lambda: torch.full((4, 6), float(rank)).t()
        yield lambda: torch.full((4, 12), float(rank))[:, ::3]
        yield lambda: torch.full((1, 3), float(rank)).expand(4, 3).clone().permute(1, 0)
        yield lambda: torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)

    for number, make in enumerate(makers()):
        for form, call in forms().items():
            tensor = make()
            result = call(tensor, op=hvd.Sum)
            assert (result == sum(range(size))).all(), (number, form)
            if form.endswith("_"):
                assert (tensor == sum(range(size))).all(), (number, form)


@everywhere()
def test_parameters_can_be_reduced_in_place(rank, size):
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    assert parameter.tolist() == [sum(range(size))] * 3


@everywhere()
def test_fused_tensors_have_the_same_bits_on_every_rank(rank, size):
    """1,024 at once, which are fused, in an order of submission that differs between the ranks."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(1 + n % 37, generator=generator) for n in range(1024)]
    order = torch.randperm(1024, generator=generator).tolist()
    for op in (hvd.Average, hvd.Sum):
        handles = {n: hvd.allreduce_async(tensors[n], name=f"small {op} {n}", op=op) for n in order}
        fused = [hvd.synchronize(handles[n]) for n in range(1024)]
        for n in range(0, 1024, 64):
            alone = hvd.allreduce(tensors[n], op=op, name=f"alone {op} {n}")
            # A sum of two has one order; of more, a ring's depends on the place in the buffer.
            if size == 2:
                assert torch.equal(alone, fused[n]), n
            assert torch.allclose(alone, fused[n], rtol=1e-5, atol=1e-6), n
        # Whatever the order of summation was, it was the same on every rank.
        bits = torch.cat(fused).view(torch.int32)
        assert torch.equal(hvd.allreduce(bits, op=hvd.Max), hvd.allreduce(bits, op=hvd.Min))


@everywhere(2)
def test_tensors_larger_than_the_fusion_buffer_are_reduced(rank, size):
    large = torch.ones(34 << 20)  # 136 MiB, the threshold is 128
    hvd.allreduce_(large, op=hvd.Sum, name="large")
    assert large[0] == size and large[-1] == size and large.sum() == size * len(large)
    parts = [torch.full((6 << 20,), float(n)) for n in range(6)]  # 144 MiB together
    handles = [hvd.allreduce_async_(part, name=f"part {n}") for n, part in enumerate(parts)]
    for n, handle in enumerate(handles):
        result = hvd.synchronize(handle)
        assert (result[:: 1 << 18] == n).all() and result[-1] == n


@everywhere()
def test_average_is_the_default_and_the_old_argument_still_works(rank, size):
    tensor = torch.full((2,), float(rank))
    mean = (size - 1) / 2
    assert hvd.allreduce(tensor).tolist() == [mean] * 2
    with raises(ValueError, "average"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert hvd.allreduce(tensor, average=True).tolist() == [mean] * 2
        assert hvd.allreduce(tensor, average=False).tolist() == [sum(range(size))] * 2
        assert hvd.synchronize(hvd.allreduce_async_(tensor, average=False))[0] == sum(range(size))


@everywhere()
def test_sparse_tensors_are_reduced_and_min_and_max_refused(rank, size):
    def sparse(r: int) -> torch.Tensor:
        rows = torch.tensor([[0, r, 4][: 1 + r % 3]])
        return torch.sparse_coo_tensor(rows, torch.ones(rows.shape[1], 2), (6, 2))

    dense = torch.stack([tensor.to_dense() for tensor in each(size, sparse)]).sum(0)
    for op, wanted in ((hvd.Sum, dense), (hvd.Average, dense / size)):
        wait = hvd.sparse_allreduce_async(sparse(rank), name="embedding", op=op)
        result = wait()
        assert result.is_sparse
        assert torch.allclose(result.to_dense(), wanted), op
    # Two at once, waited for in another order than they were started.
    first = hvd.sparse_allreduce_async(sparse(rank), name="first", op=hvd.Sum)
    second = hvd.sparse_allreduce_async(sparse(0), name="second", op=hvd.Sum)
    assert torch.allclose(second().to_dense(), sparse(0).to_dense() * size)
    assert torch.allclose(first().to_dense(), dense)
    for op in (hvd.Min, hvd.Max):
        with raises((ValueError, NotImplementedError)):
            hvd.sparse_allreduce_async(sparse(rank), name="least", op=op)
    works(size)


# ---- gradients -------------------------------------------------------------------------------------------------------


@everywhere()
def test_the_gradient_is_reduced_as_the_tensor_was(rank, size):
    """A rank's loss weighs rank + 1."""
    total = size * (size + 1) / 2
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, total / size),
        ({"op": hvd.Sum}, total),
        ({"op": hvd.Sum, "prescale_factor": 0.5}, total / 2),
        ({"op": hvd.Sum, "postscale_factor": 3.0}, total * 3),
        ({"op": hvd.Average, "prescale_factor": 0.5, "postscale_factor": 3.0}, total / size * 1.5),
        ({"op": hvd.Max}, size),
        ({"op": hvd.Min}, 1.0),
    ]
    for how, wanted in cases:
        for dtype in (torch.float32, torch.float64):
            tensor = torch.ones(2, 2, dtype=dtype, requires_grad=True)
            (hvd.allreduce(tensor, **how) * (rank + 1)).sum().backward()
            assert tensor.grad is not None
            assert torch.allclose(tensor.grad, torch.tensor(wanted, dtype=dtype)), (how, dtype)


@everywhere()
def test_gradients_of_a_grouped_allreduce_are_reduced(rank, size):
    first = torch.ones(2, requires_grad=True)
    second = torch.ones(3, 2, requires_grad=True)
    a, b = hvd.grouped_allreduce([first, second], op=hvd.Sum)
    (a.sum() * (rank + 1) + b.sum() * 10).backward()
    assert first.grad is not None and second.grad is not None
    assert first.grad.tolist() == [size * (size + 1) / 2] * 2
    assert (second.grad == 10 * size).all()


@everywhere()
def test_gradients_are_reduced_through_compression(rank, size):
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        tensor = torch.ones(2, requires_grad=True)
        (hvd.allreduce(tensor, compression=compression) * (rank + 1)).sum().backward()
        assert tensor.grad is not None and tensor.grad.dtype == torch.float32
        assert tensor.grad.tolist() == [(size + 1) / 2] * 2
