"""Collectives on NCCL, on two GPUs: one rank each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from elastic.collectives import nccl
from elastic.collectives.groups.group_factory import Store, listen
from elastic.collectives.interface import Op
from elastic.errors import CollectiveFailed
from elastic.protocol.messages import Address
from harness.groups import connecting
from harness.ranks import Ranks, store_to_be
from harness.waiting import wait_until

pytestmark = pytest.mark.gpu
WAKE_S = 5.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def live_and_be_aborted(rank: int, size: int, address: Address) -> float:
    """Every collective once, then an abort while a peer is missing; seconds until that raised."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = Store(address, listen(address.host, address.port) if rank == 0 else None, 30.0)
    store.open()
    group = connecting(store, rank, size, timeout_s=30.0, device_type="cuda").connect()
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.int64):
        tensor = torch.full((1001,), rank + 1, device=device).to(dtype)
        group.allreduce(tensor, Op.SUM).wait()
        assert tensor.eq(3).all()
    flag = torch.tensor([rank == 1], device=device)
    group.broadcast(flag, 1).wait()
    assert flag.item() is True
    outputs = [torch.empty(2, device=device) for _ in range(size)]
    group.allgather(outputs, torch.full((2,), float(rank), device=device)).wait()
    assert [output[0].item() for output in outputs] == [0.0, 1.0]
    received = torch.empty(2 * (rank + 1), 3, device=device)
    sent = torch.full((3, 3), float(rank), device=device)
    group.alltoall(received, sent, [rank + 1] * 2, [1, 2]).wait()
    assert received[:, 0].tolist() == [0.0] * (rank + 1) + [1.0] * (rank + 1)
    group.barrier().wait()
    raised_s = 0.0
    if rank == 0:  # rank 1 never joins this one
        threading.Timer(0.2, group.abort).start()
        began = time.monotonic()
        try:
            group.allreduce(torch.ones(1000, device=device), Op.SUM).wait()
            raise AssertionError("nothing failed")
        except CollectiveFailed:
            raised_s = time.monotonic() - began
    else:
        time.sleep(0.5)
    group.abort()
    assert group.drain(WAKE_S)
    group.close()
    store.close()
    return raised_s


def test_second_nccl_group_works_after_the_abort_of_the_first(ranks):
    for _ in range(2):
        for raised_s in ranks.run(live_and_be_aborted, store_to_be()):
            print(f"raised after {raised_s * 1e3:.1f} ms")
            assert raised_s < WAKE_S


def test_nccl_warm_up_of_a_joining_rank_leaves_no_thread_and_no_device_change():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    first = torch.ones(1, device=device)  # a context
    nccl.warm_up(device)  # what stays for good does so from here on
    before = len(os.listdir("/proc/self/task"))
    nccl.warm_up(device)
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before, "its threads' end", WAKE_S)
    assert torch.cuda.current_device() == 0
    assert first.add_(1).item() == 2.0
