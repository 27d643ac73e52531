"""Copies of a shard from a GPU while training continues."""

from __future__ import annotations

import threading

import pytest
import torch

from elastic.collectives import threads_at_exit
from elastic.errors import DeviceLost
from elastic.state.fully_sharded import background_copy
from elastic.state.fully_sharded.background_copy import BackgroundCopy
from elastic.state.snapshots import pinned_copy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BUSY_NS = 1_000_000_000


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
    return [torch.arange(24, device="cuda").reshape(4, 6).to(kind) for kind in kinds]


@pytest.fixture
def no_room(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))


def begin(tensors, *, exposed=True, busy=False):
    """Begin a copy, of which the bus is ``busy``. Return it and the host memory."""
    host = pinned_copy.like(tensors)
    for each in host:
        each.zero_()
    if busy:
        device = tensors[0].device
        with torch.cuda.stream(pinned_copy._side.setdefault(device, torch.cuda.Stream(device))):
            torch.cuda._sleep(BUSY_NS)
    pairs = list(zip(tensors, host, strict=True))
    return BackgroundCopy(pairs, pinned_copy.DeviceStaging(), exposed=exposed), host


def check(host, before):
    for each, wanted in zip(host, before, strict=True):
        assert torch.equal(each, wanted)


def step() -> None:
    """A step of any optimizer, whose parameters need not be the copied tensors."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


@pytest.mark.parametrize("exposed", [True, False])
def test_tensors_may_be_overwritten_during_a_copy(tensors, exposed, request):
    if not exposed:
        request.getfixturevalue("no_room")
    before = [each.cpu() for each in tensors]
    copy, host = begin(tensors, exposed=exposed, busy=True)
    for each in tensors:
        each.add_(1)
    assert copy.finish()
    check(host, before)


def test_step_of_an_optimizer_waits_on_the_stream_and_the_host_does_not(tensors, no_room):
    before = [each.cpu() for each in tensors]
    step()  # the first one imports modules
    copy, host = begin(tensors, busy=True)
    step()
    for each in tensors:
        each.add_(1)
    assert not copy._transit.complete()
    assert copy.finish()
    check(host, before)
    assert not background_copy._in_flight


@pytest.mark.parametrize("data", [True, False])
def test_write_before_the_step_is_found_for_any_version_counter(tensors, no_room, data):
    copy, _ = begin(tensors, busy=True)
    written = tensors[2].data if data else tensors[2]
    written[1, 1] += 1
    step()
    assert not copy.finish()


def test_write_that_is_undone_before_the_step_is_found(tensors, no_room):
    """As in an evaluation with averaged weights, after which the script restores the trained ones."""
    copy, _ = begin(tensors, busy=True)
    trained = tensors[2].clone()
    tensors[2].fill_(7)
    pinned_copy._side[trained.device].synchronize()
    tensors[2].copy_(trained)
    step()
    assert not copy.finish()


def test_thread_that_waits_for_a_copy_waits_for_the_step_as_well(tensors, no_room):
    copy, _ = begin(tensors)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(copy.finish()))
    thread.start()
    step()
    thread.join(20.0)
    assert found == [True]


def test_thread_that_waits_at_the_exit_of_the_process_ends(tensors, no_room, monkeypatch):
    copy, _ = begin(tensors)
    monkeypatch.setattr(threads_at_exit, "_leave_at", 0.0)
    with pytest.raises(threads_at_exit.ProcessExiting):
        copy.finish()
    step()


def test_copy_that_does_not_end_is_a_lost_device(tensors, no_room, monkeypatch):
    monkeypatch.setattr(pinned_copy, "COPY_LIMIT_S", 0.0)
    monkeypatch.setattr(pinned_copy, "SLOWEST_BYTES_S", 1e12)
    copy, _ = begin(tensors, busy=True)
    copy.order()
    with pytest.raises(DeviceLost):
        copy.finish()
    torch.cuda.synchronize()
