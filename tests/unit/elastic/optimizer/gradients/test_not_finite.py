import math

import pytest
import torch

from elastic.optimizer.gradients.not_finite import WHOLE_BYTES, examined, extremes


def largest(gradient: torch.Tensor) -> float:
    return max(map(abs, map(float, extremes(examined(gradient)))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 5])
def test_large_row_of_a_large_gradient_is_found_at_any_position(dtype, start):
    elements = WHOLE_BYTES // dtype.itemsize
    storage = torch.full((start + 2 * elements,), math.inf, dtype=dtype)
    gradient = storage[start : start + elements + 1000].view(-1, 1)
    gradient.zero_()
    assert largest(gradient) == 0.0, "no element of another tensor"
    width = 2 * elements // 1024
    for first in range(0, elements - width, 7 * width):
        gradient[first : first + width] = 2.0
        assert largest(gradient) == 2.0
        gradient.zero_()


def test_small_and_non_contiguous_gradients_are_examined_completely():
    for gradient in (torch.zeros(100, 100), torch.zeros(1000, 1000).t()):
        gradient[-1, -1] = math.nan
        assert any(map(math.isnan, extremes(examined(gradient))))
