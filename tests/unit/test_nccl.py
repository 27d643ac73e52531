"""How waiting on NCCL ends, with a backend that is told what to report; no CUDA is needed for that."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.collectives.interface import Op
from elastic.collectives.nccl import NcclCollectives
from elastic.errors import CollectiveFailed


class Kernel:
    """A collective on the stream: completes, fails or hangs on command."""

    def __init__(self) -> None:
        self.completed = False
        self.success = True
        self.waited = False

    def is_completed(self) -> bool:
        return self.completed

    def is_success(self) -> bool:
        return self.success

    def wait(self) -> None:
        self.waited = True


class Backend:
    """Hands out one kernel; an abort completes it, as NCCL's does, without an error."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.aborted_in: list[threading.Thread] = []
        self.reduced: list[Any] = []

    def allreduce(self, tensors: Any, options: Any) -> Kernel:
        self.reduced += tensors
        return self.kernel

    def abort(self) -> None:
        self.aborted_in.append(threading.current_thread())
        self.kernel.completed = True


@pytest.fixture
def nccl(monkeypatch) -> SimpleNamespace:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group = NcclCollectives(rank=0, size=2, timeout_s=10.0)
    group._backend = backend = Backend()
    return SimpleNamespace(group=group, backend=backend, kernel=backend.kernel)


def test_a_completed_collective_orders_the_stream_behind_it(nccl):
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    assert not work.done()
    nccl.kernel.completed = True
    assert work.done()
    work.wait()
    assert nccl.kernel.waited


def test_a_result_is_scaled_in_the_order_of_the_stream_and_once(nccl):
    tensor = torch.ones(3, requires_grad=True)
    work = nccl.group.allreduce(tensor, Op.SUM, scale=0.5)
    nccl.kernel.completed = True
    assert tensor.tolist() == [1, 1, 1]
    work.wait()
    work.wait()
    assert nccl.kernel.waited
    assert tensor.tolist() == [0.5, 0.5, 0.5]


def test_an_abort_wakes_who_waits_and_runs_in_a_thread_of_its_own(nccl):
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    aborter = threading.Thread(target=nccl.group.abort)
    aborter.start()
    with pytest.raises(CollectiveFailed, match="aborted"):
        work.wait()  # although the kernel has ended as if all were well
    aborter.join()
    assert nccl.group.drain(5.0)
    nccl.group.abort()
    (thread,) = nccl.backend.aborted_in
    assert thread not in (threading.current_thread(), aborter)
    assert not nccl.kernel.waited
    with pytest.raises(CollectiveFailed, match="aborted"):
        nccl.group.allreduce(torch.ones(3), Op.SUM)
    nccl.group.close()


def test_what_nccl_reports_breaks_the_group(nccl):
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    nccl.kernel.completed, nccl.kernel.success = True, False
    with pytest.raises(CollectiveFailed, match="reported an error"):
        work.wait()
    with pytest.raises(CollectiveFailed):
        nccl.group.allreduce(torch.ones(3), Op.SUM)


def test_a_collective_that_hangs_ends_at_the_timeout(nccl):
    nccl.group._collective_timeout_s = 0.0
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    with pytest.raises(CollectiveFailed, match="did not complete within"):
        work.wait()


def test_16_bit_integers_travel_as_32_bit_ones(nccl):
    tensor = torch.ones(3, dtype=torch.int16)
    work = nccl.group.allreduce(tensor, Op.SUM)
    (wide,) = nccl.backend.reduced
    assert wide.dtype == torch.int32
    wide.fill_(65537)
    nccl.kernel.completed = True
    work.wait()
    assert tensor.tolist() == [1, 1, 1]


def test_what_nccl_cannot_reduce_is_refused(nccl):
    with pytest.raises(TypeError, match="bool"):
        nccl.group.allreduce(torch.ones(3, dtype=torch.bool), Op.SUM)
    with pytest.raises(ValueError, match="SUM"):
        nccl.group.allreduce(torch.ones(3), Op.AVERAGE)
