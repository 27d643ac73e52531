"""Memory layout of the results of a step's gradients."""

import itertools

import torch

from elastic.collectives.interface import ALONE_BYTES
from elastic.tensorflow import result_memory


def test_unfused_tensors_are_first_and_each_dtype_is_contiguous():
    large = ALONE_BYTES // 4
    shapes = [(3,), (large + 1,), (2, 8), (large,), (4, 4), (large,)]
    tensors = [torch.zeros(shape) for shape in shapes]
    tensors[2] = tensors[2].double()
    places, found = result_memory.made(tensors)
    assert places == [3, 5, 1, 4, 0, 2]
    for place, each in zip(places, found, strict=True):
        assert (each.shape, each.dtype) == (tensors[place].shape, tensors[place].dtype)
    floats = found[:5]
    for each, following in itertools.pairwise(floats):
        assert following.data_ptr() == each.data_ptr() + each.nbytes
    # TensorFlow adopts memory with the largest alignment, as long as sizes are multiples of it.
    assert [each.data_ptr() % result_memory.ALIGNED for each in floats[:3]] == [0, 0, 0]


def test_shared_result_memory_pays_only_above_a_minimum_size():
    assert not result_memory.pays([torch.zeros(ALONE_BYTES // 8)] * 1)
    assert result_memory.pays([torch.zeros(ALONE_BYTES // 8)] * 2)
