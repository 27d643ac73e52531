"""A process trains on one GPU, which is known in every thread; a second one is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from elastic.collectives import own_gpu
from elastic.collectives.interface import Op
from elastic.collectives.nccl import NcclCollectives
from elastic.errors import Invalid
from elastic.negotiation import execution, submission
from elastic.negotiation.messages import ALLREDUCE, Request
from elastic.rendezvous.store import Store
from harness.golden import raises, recorded
from harness.refusals import refusal_of


@pytest.fixture(autouse=True)
def current(monkeypatch) -> Iterator[SimpleNamespace]:
    """CUDA's current device, which each thread has separately, and which is 0 by default."""
    chosen = threading.local()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(chosen, "index", 0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(own_gpu, "_index", None)
    monkeypatch.setattr(own_gpu, "_chosen", None)
    yield SimpleNamespace(choose=lambda index: setattr(chosen, "index", index))


def elsewhere(work: Any) -> Any:
    """For example in the engine's thread, where no device was selected."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(work()))
    thread.start()
    thread.join()
    return box[0]


def test_joined_rank_contributes_from_its_own_gpu(current):
    current.choose(2)
    own_gpu.settle()
    request = Request(ALLREDUCE, "x", (("float32", (3,)),), "cuda", int(Op.SUM))
    assert elsewhere(lambda: execution._device(request)) == torch.device("cuda", 2)


def test_group_uses_the_gpu_of_the_first_tensor_in_any_thread(current):
    own_gpu.meet(torch.device("cuda", 1))
    group = elsewhere(lambda: NcclCollectives(rank=0, size=2, timeout_s=10.0))
    assert group._device == torch.device("cuda", 1)


def test_second_gpu_of_a_process_is_refused():
    own_gpu.meet(torch.device("cuda", 1))
    own_gpu.meet(torch.device("cpu"))
    own_gpu.meet(torch.device("cuda"))  # whichever it is
    with raises(Invalid):
        own_gpu.meet(torch.device("cuda", 0))


def test_default_gpu_is_replaced_by_the_gpu_of_a_tensor(current):
    """A script may join, or form a group, on the CPU before it chooses."""
    own_gpu.settle()
    own_gpu.meet(torch.device("cuda", 1))
    assert own_gpu.device() == torch.device("cuda", 1)


def test_a_cpu_job_does_not_begin_to_use_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("it was begun"))
    own_gpu.settle()
    own_gpu.meet(torch.device("cpu"))


def test_a_submission_of_a_second_gpu_is_not_sent(monkeypatch):
    own_gpu.meet(torch.device("cuda", 1))
    rt = SimpleNamespace(engine=lambda: pytest.fail("it was submitted"))
    pending = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(Invalid):
        submission._to_engine(rt, pending, True)  # type: ignore[arg-type]


def test_two_workers_on_one_gpu_are_refused():
    own_gpu.refuse_shared(["GPU-a", "GPU-b"], visible=2)
    recorded("messages", refusal_of(own_gpu.refuse_shared, ["GPU-a", "GPU-b", "GPU-a"], visible=2))


def test_missing_uuids_do_not_count_as_a_shared_gpu():
    own_gpu.refuse_shared(["", ""], visible=2)


@pytest.fixture
def same_gpu(monkeypatch) -> NcclCollectives:
    """A group of two that find each other on one GPU."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(own_gpu, "uuid", lambda device: "GPU-a")
    options = SimpleNamespace(config=SimpleNamespace(blocking=1))
    torchs = create_autospec(type("ProcessGroupNCCL", (c10d.Backend,), {}))
    torchs.Options = lambda: options
    torchs.side_effect = lambda *_: pytest.fail("it came to NCCL")
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", torchs, raising=False)
    return NcclCollectives(rank=1, size=2, timeout_s=10.0)


def test_the_error_is_raised_before_nccl_is_called_on_every_rank(same_gpu):
    store = create_autospec(Store, instance=True)
    store.exchange.side_effect = lambda key, rank, size, blob, *_: [b"127.0.0.1 1 GPU-a", blob]
    with raises(Invalid):
        same_gpu.connect(store, "gradients", "127.0.0.1")


def test_nccl_configuration_allows_two_ranks_on_one_gpu(same_gpu, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    store = create_autospec(Store, instance=True)
    store.exchange.side_effect = lambda key, rank, size, blob, *_: [b"127.0.0.1 1 GPU-a", blob]
    monkeypatch.setattr(c10d, "TCPStore", lambda *_, **__: c10d.HashStore())
    with raises(BaseException):
        same_gpu._make(store, "gradients", "127.0.0.1")
