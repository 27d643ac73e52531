"""Torch computes with one thread here: ranks are threads of this process, and each would have helpers of its own that
keep the processors busy while they wait.
"""

import sys
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def without_sharding_guard() -> Iterator[None]:
    """The check that a test installs in torch's optimizers is removed after it."""
    yield
    if "elastic.torch_backend.sharding_guard" in sys.modules:
        from elastic.torch_backend import sharding_guard

        while sharding_guard._installed:
            sharding_guard._installed.pop().remove()
