"""Result of the ranks' parts on a rank that has them all."""

import math

import pytest
import torch

from elastic.collectives import dtypes_and_ops
from elastic.collectives.interface import Op


def test_parts_are_added_up_in_the_order_of_the_ranks():
    """The bits are the same on every machine, for any vector width."""
    parts = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert dtypes_and_ops.total(parts, Op.SUM).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    one = 1.0
    little = torch.finfo(dtype).eps / 2  # lost, if it is added to one in this precision
    parts = torch.tensor([[one], [little], [little]], dtype=dtype)
    assert dtypes_and_ops.total(parts, Op.SUM).item() == 1.0 + torch.finfo(dtype).eps


@pytest.mark.parametrize("op", [Op.MIN, Op.MAX, Op.SUM, Op.PRODUCT])
def test_nan_on_one_rank_is_nan_in_the_result(op):
    for rank in range(3):
        parts = torch.ones(3, 1)
        parts[rank] = math.nan
        assert math.isnan(dtypes_and_ops.total(parts, op).item())


def test_integers_wrap_around():
    parts = torch.full((3, 1), 100, dtype=torch.int8)
    assert dtypes_and_ops.total(parts, Op.SUM).item() == 300 - 256
