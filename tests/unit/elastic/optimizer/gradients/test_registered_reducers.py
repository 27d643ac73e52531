import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients import gradient_reducer
from elastic.runtime import lifecycle


@pytest.fixture(autouse=True)
def runtime():
    lifecycle.init()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
    lifecycle.shutdown()


def test_reducers_created_and_listed_concurrently_are_all_listed():
    begins = threading.Barrier(4)
    kept: list[torch.optim.Optimizer] = []

    def create_and_list() -> None:
        begins.wait(30.0)
        for _ in range(60):
            parameter = torch.nn.Parameter(torch.zeros(1))
            kept.append(DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1)))
            for _ in range(20):
                gradient_reducer.reducers()

    before = set(gradient_reducer.reducers())
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(create_and_list) for _ in range(4)]:
            each.result()
    assert len(set(gradient_reducer.reducers()) - before) == len(kept) == 240
