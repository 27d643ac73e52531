"""The gradient of each collective, with each option, in each kind of process set: the table of `gradient_table`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import horovod.torch as hvd
from conformance.worlds import World
from harness.gradient_table import CASES, MOVING, WIDTH, Case, sets

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def gradients(case: Case, dtype: torch.dtype, members: list[int], among: Any) -> list[Any]:
    place, size = members.index(hvd.rank()), len(members)
    given = [
        torch.ones(case.rows(place, size), WIDTH, dtype=dtype, requires_grad=True)
        for _ in range(case.count)
    ]
    results = case.call(hvd, given, members, among)
    upstream = torch.from_numpy(case.upstream(place, size)).to(results[0].device, dtype)
    torch.autograd.backward(results, [upstream * (at + 1) for at in range(case.count)])
    return [each.grad for each in given]


def check(rank: int, size: int, dtype: torch.dtype) -> None:
    cases = MOVING if dtype.is_complex else CASES
    for ranks in (None, *sets(size)):
        among = hvd.global_process_set if ranks is None else hvd.add_process_set(ranks)
        members = list(range(size)) if ranks is None else ranks
        if rank in members:
            for case in cases:
                wanted = case.wanted(members.index(rank), len(members))
                for at, made in enumerate(gradients(case, dtype, members, among)):
                    assert made.dtype == dtype
                    np.testing.assert_allclose(
                        made.to("cpu", torch.complex128).numpy(),
                        wanted * (at + 1),
                        rtol=TOLERANCE.get(dtype, 1e-6),
                        err_msg=case.name,
                    )
        if ranks is not None:
            hvd.remove_process_set(among)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("world", [2, 3], indirect=True, ids="{}-ranks".format)
def test_gradients_equal_horovods_gradients(world: World, dtype: torch.dtype) -> None:
    world.run(check, dtype)
