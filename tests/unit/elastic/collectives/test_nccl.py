"""The end of a wait on NCCL, with a simulated backend, without CUDA."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import create_autospec

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from elastic.collectives import nccl_library, own_gpu
from elastic.collectives.interface import Op
from elastic.collectives.nccl import NcclCollectives
from elastic.errors import CollectiveFailed, Invalid
from elastic.rendezvous.store import Store
from harness.golden import raises, recorded


class Kernel:
    """A collective on the stream: completes, fails or hangs on command. ``work`` is torch's object for it."""

    def __init__(self) -> None:
        self.completed = False
        self.error: RuntimeError | None = None
        self.waited = False
        self.work = create_autospec(c10d.Work, instance=True)
        self.work.is_completed.side_effect = lambda: self.completed
        self.work.wait.side_effect = self._wait
        # As ProcessGroupNCCL's does, since torch 2.2.
        self.work.is_success.side_effect = NotImplementedError(
            "WorkNCCL::isSuccess() is deprecated"
        )

    def _wait(self) -> bool:
        if self.error is not None:
            raise self.error
        self.waited = True
        return True


class Backend:
    """Returns one kernel; an abort completes it without an error, as in NCCL."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.aborted_in: list[threading.Thread] = []
        self.reduced: list[Any] = []
        self.torchs = create_autospec(c10d.Backend, instance=True)
        self.torchs.allreduce.side_effect = self._allreduce
        self.torchs.abort.side_effect = self._abort

    def _allreduce(self, tensors: Any, options: Any = None) -> Any:
        self.reduced += tensors
        return self.kernel.work

    def _abort(self) -> None:
        self.aborted_in.append(threading.current_thread())
        self.kernel.completed = True


EVENT = torch.cuda.Event


class MadeUpEvent:
    """Simulated event: whether the GPU has reached it is given."""

    made: ClassVar[list[Any]] = []
    ended: ClassVar[list[bool]] = []  # next answers; then True

    def __new__(cls) -> Any:
        event = create_autospec(EVENT, instance=True)
        event.query.return_value = False
        event.record.side_effect = lambda *stream: setattr(
            event.query,
            "side_effect",
            None if stream else lambda: cls.ended.pop(0) if cls.ended else True,
        )
        cls.made.append(event)
        return event


@pytest.fixture(autouse=True)
def devices(monkeypatch) -> list[torch.device]:
    """Devices that threads have selected, in order; without CUDA torch's own guard can't be used."""
    turned: list[torch.device] = []

    @contextlib.contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        turned.append(device)
        yield
        turned.append(torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "Stream", create_autospec(torch.cuda.Stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "Event", MadeUpEvent)
    monkeypatch.setattr(own_gpu, "_index", None)
    monkeypatch.setattr(own_gpu, "_chosen", None)
    return turned


@pytest.fixture
def nccl(monkeypatch) -> SimpleNamespace:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group = NcclCollectives(rank=0, size=2, timeout_s=10.0)
    backend = Backend()
    group._backend = backend.torchs
    return SimpleNamespace(group=group, backend=backend, kernel=backend.kernel)


def test_a_collective_is_queried_on_its_own_gpu_from_any_thread(nccl, devices):
    """CUDA would initialize GPU 0 there, which costs hundreds of megabytes of it."""
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    nccl.kernel.work.is_completed.side_effect = lambda: devices[-1:] == [nccl.group._device]
    assert work.done()
    assert nccl.group.ended(0.0)


def test_a_collective_that_torch_gave_up_has_not_ended_before_its_kernel(nccl):
    """Once NCCL has noticed an error, torch regards all of a communicator's collectives as complete."""
    nccl.group.allreduce(torch.ones(3), Op.SUM)
    nccl.kernel.completed = True
    MadeUpEvent.ended[:] = [False, False]
    assert not nccl.group.ended(0.0)
    assert nccl.kernel.work.get_future.return_value.wait.called
    assert MadeUpEvent.ended == [False]
    assert nccl.group.ended(5.0)


def test_completed_collective_orders_the_stream(nccl):
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


def test_an_abort_wakes_waiters_and_runs_in_a_separate_thread(nccl):
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    aborter = threading.Thread(target=nccl.group.abort)
    aborter.start()
    with pytest.raises(CollectiveFailed, match="aborted"):
        work.wait()  # although the kernel has ended normally
    aborter.join()
    assert nccl.group.drain(5.0)
    nccl.group.abort()
    (thread,) = nccl.backend.aborted_in
    assert thread not in (threading.current_thread(), aborter)
    assert not nccl.kernel.waited
    with pytest.raises(CollectiveFailed, match="aborted"):
        nccl.group.allreduce(torch.ones(3), Op.SUM)
    nccl.group.close()


def test_reported_nccl_error_breaks_the_group(nccl):
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    nccl.kernel.completed, nccl.kernel.error = (
        True,
        RuntimeError("NCCL error: remote process exited"),
    )
    with raises(CollectiveFailed):
        work.wait()
    with pytest.raises(CollectiveFailed):
        nccl.group.allreduce(torch.ones(3), Op.SUM)


def test_a_collective_that_hangs_ends_at_the_timeout(nccl):
    nccl.group._collective_timeout_s = nccl.group._launched_timeout_s = 0.0
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    with raises(CollectiveFailed):
        work.wait()


def test_int16_is_reduced_as_int32(nccl):
    tensor = torch.ones(3, dtype=torch.int16)
    work = nccl.group.allreduce(tensor, Op.SUM)
    (wide,) = nccl.backend.reduced
    assert wide.dtype == torch.int32
    wide.fill_(65537)
    nccl.kernel.completed = True
    work.wait()
    assert tensor.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("op", "chosen"), [(Op.MIN, torch.amin), (Op.MAX, torch.amax)], ids=["min", "max"]
)
def test_nan_survives_min_and_max_over_nccl(nccl, op, chosen):
    mine, other = torch.tensor([1.0, math.nan, -0.0]), torch.tensor([math.nan, 2.0, 0.0])
    works = [nccl.group.allreduce(tensor, op, 2.0) for tensor in (mine, other)]
    keys = nccl.backend.reduced
    assert not any(each.is_floating_point() for each in keys)
    keys[0].copy_(chosen(torch.stack(keys), 0))
    nccl.kernel.completed = True
    works[0].wait()
    recorded("messages", str(mine.tolist()), -0.0 if op is Op.MIN else 0.0)


def test_unsupported_dtypes_and_operations_of_nccl_are_refused(nccl):
    with pytest.raises(TypeError, match="bool"):
        nccl.group.allreduce(torch.ones(3, dtype=torch.bool), Op.SUM)
    with pytest.raises(ValueError, match="SUM"):
        nccl.group.allreduce(torch.ones(3), Op.AVERAGE)


class Building:
    """A torch with NCCL, whose group is created as slowly as a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = Backend()
        self.connecting = threading.Event()
        self.go_on = threading.Event()
        self.environment: dict[str, str] = {}
        options = SimpleNamespace(config=SimpleNamespace(blocking=1))
        nccl = create_autospec(type("ProcessGroupNCCL", (c10d.Backend,), {}))
        nccl.Options = lambda: options
        nccl.side_effect = self._made
        self.backend.torchs.eager_connect_single_device.side_effect = self._connect
        monkeypatch.setattr(c10d, "ProcessGroupNCCL", nccl, raising=False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *shape, **kinds: zeros(*shape))
        monkeypatch.setattr(NcclCollectives, "_open_id_store", lambda *arguments: None)
        self.group = NcclCollectives(rank=0, size=2, timeout_s=10.0)
        self.connect = threading.Thread(target=self._connects, daemon=True)
        self.raised: BaseException | None = None

    def _connects(self) -> None:
        try:
            self.group.connect(create_autospec(Store, instance=True), "gradients", "127.0.0.1")
        except CollectiveFailed as error:
            self.raised = error

    def _made(self, *arguments: Any) -> Any:
        self.environment = dict(os.environ)
        return self.backend.torchs

    def _connect(self, device: Any) -> None:
        self.connecting.set()
        assert self.go_on.wait(10.0)


def test_a_group_is_connected_when_its_first_collective_is_done(monkeypatch):
    torchs = Building(monkeypatch)
    torchs.backend.kernel.completed = True
    torchs.connect.start()
    assert torchs.connecting.wait(10.0)
    assert not torchs.group._built.is_set()
    torchs.go_on.set()
    torchs.connect.join(10.0)
    assert torchs.raised is None
    assert [each.numel() for each in torchs.backend.reduced] == [1]


def test_communicator_created_after_the_abort_is_aborted_too(monkeypatch):
    torchs = Building(monkeypatch)
    torchs.connect.start()
    assert torchs.connecting.wait(10.0)
    torchs.group.abort()  # torch has no communicator yet, so that this ends none
    torchs.connect.join(10.0)
    assert "aborted" in str(torchs.raised)
    torchs.go_on.set()
    assert torchs.group.drain(10.0)
    assert len(torchs.backend.aborted_in) == 2


def test_creating_a_group_does_not_change_the_environment(monkeypatch):
    torchs = Building(monkeypatch)
    torchs.backend.kernel.completed = True
    before = dict(os.environ)
    torchs.go_on.set()
    torchs.connect.start()
    torchs.connect.join(10.0)
    assert torchs.environment == before == dict(os.environ)


def test_a_collective_in_a_cuda_graph_is_refused_with_a_sentence(nccl, monkeypatch):
    """A replay would bypass everything that detects incomplete steps."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with raises(Invalid):
        nccl.group.allreduce(torch.ones(3), Op.SUM)
    assert not nccl.backend.reduced


class Revocable:
    """An NCCL with revoke, which records torch's calls in order."""

    POINTER = 4711

    def __init__(self, nccl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.revoked = self.error = 0  # what NCCL returns
        self.nccl, self.group = nccl, nccl.group
        self.library = create_autospec(nccl_library)
        self.library.revoke.side_effect = self._revoke
        self.library.reported.side_effect = lambda communicator: self.error
        self.library.words.side_effect = lambda error: f"error {error}"
        monkeypatch.setattr("elastic.collectives.nccl.nccl_library", self.library)
        nccl.backend.torchs.abort.side_effect = self._abort
        self.group._communicator = self.POINTER

    def _revoke(self, communicator: int) -> int:
        assert communicator == self.POINTER
        self.asked.append("revoke")
        self.nccl.kernel.completed = not self.revoked
        return self.revoked

    def _abort(self) -> None:
        self.asked.append("abort")
        self.nccl.kernel.completed = True


@pytest.fixture
def revocable(nccl, monkeypatch) -> Revocable:
    return Revocable(nccl, monkeypatch)


def test_abort_ends_kernels_but_frees_the_communicator_only_at_close(revocable):
    group = revocable.group
    work = group.allreduce(torch.ones(3), Op.SUM)
    group.abort()
    with pytest.raises(CollectiveFailed, match="aborted"):
        work.wait()
    group.abort()
    assert group.drain(5.0)
    assert revocable.asked == ["revoke"]
    assert not group.freed(0.0)
    group.close()
    assert revocable.asked[:2] == ["revoke", "abort"]
    assert group.freed(0.0)


def test_a_failed_revoke_is_followed_by_an_immediate_abort_and_logged_once(revocable, capsys):
    revocable.revoked = 3
    revocable.group.allreduce(torch.ones(3), Op.SUM)
    revocable.group.abort()
    assert revocable.group.drain(5.0)
    assert revocable.asked == ["revoke", "abort"]
    revocable.group.abort()
    said = capsys.readouterr().err
    recorded("log", said)


def test_a_kernel_that_outlives_a_revoke_is_aborted(revocable):
    revocable.library.revoke.side_effect = lambda communicator: (
        revocable.asked.append("revoke") or 0
    )
    revocable.group.allreduce(torch.ones(3), Op.SUM)
    revocable.group.abort()
    assert not revocable.group.drain(0.01)
    assert revocable.group.ended(5.0)
    assert revocable.asked[:2] == ["revoke", "abort"]


def test_detected_nccl_error_revokes_without_freeing_the_communicator(revocable):
    """Torch's own wait would abort the communicator in the waiting thread."""
    work = revocable.group.allreduce(torch.ones(3), Op.SUM)
    revocable.nccl.kernel.completed, revocable.error = True, 6
    with raises(CollectiveFailed):
        work.wait()
    assert not revocable.nccl.kernel.waited
    assert revocable.group.drain(5.0)
    assert revocable.asked == ["revoke"]


def test_a_waiter_does_not_query_errors_while_a_collective_is_launched(revocable):
    """Two threads must not query NCCL's state then."""
    work = revocable.group.allreduce(torch.ones(3), Op.SUM)
    revocable.nccl.kernel.completed = True
    with revocable.group._launching:
        work.wait()
    revocable.library.reported.assert_not_called()


def test_a_freed_communicator_is_not_queried(revocable):
    revocable.group.close()
    assert revocable.group._communicator == 0
    revocable.group.abort()
    assert revocable.asked.count("revoke") == 1


def test_communicator_that_cannot_be_freed_delays_close_only_up_to_the_limit(revocable):
    stuck = threading.Event()
    revocable.nccl.backend.torchs.abort.side_effect = lambda: stuck.wait(30)
    revocable.group.close(0.05)
    assert not revocable.group.freed(0.0)
    stuck.set()
    assert revocable.group.freed(5.0)


def test_communicator_connected_after_close_is_freed(monkeypatch):
    torchs = Building(monkeypatch)
    monkeypatch.setattr("elastic.collectives.nccl._revocable", lambda backend: Revocable.POINTER)
    monkeypatch.setattr(
        nccl_library, "revoke", create_autospec(nccl_library.revoke, return_value=0)
    )
    torchs.connect.start()
    assert torchs.connecting.wait(10.0)
    torchs.group.close(0.01)
    aborted = len(torchs.backend.aborted_in)
    assert not torchs.group.freed(0.0)
    torchs.go_on.set()
    assert torchs.group.freed(10.0)
    assert len(torchs.backend.aborted_in) > aborted


def test_group_aborted_while_connecting_is_revoked_when_supported(monkeypatch):
    """A peer may have been faster, and be in the first collective."""
    torchs = Building(monkeypatch)
    monkeypatch.setattr("elastic.collectives.nccl._revocable", lambda backend: Revocable.POINTER)
    revoke = create_autospec(nccl_library.revoke, return_value=0)
    monkeypatch.setattr(nccl_library, "revoke", revoke)
    monkeypatch.setattr(nccl_library, "reported", lambda communicator: 0)
    torchs.go_on.set()
    torchs.connect.start()
    while not torchs.backend.reduced:
        time.sleep(0.001)
    torchs.group.abort()
    torchs.connect.join(10.0)
    torchs.backend.kernel.completed = True
    assert torchs.group.drain(10.0)
    revoke.assert_called_once_with(Revocable.POINTER)
    assert not torchs.backend.aborted_in


# ---- streams that follow a collective ------------------------------------------------------------------------------


def test_follow_orders_the_stream_without_waiting_for_the_kernel(nccl):
    tensor = torch.ones(3)
    work = nccl.group.allreduce(tensor, Op.SUM, scale=0.5)
    work.follow()
    assert nccl.kernel.work.get_future.return_value.wait.called
    assert tensor.tolist() == [0.5, 0.5, 0.5]  # queued behind it
    assert not nccl.kernel.completed and nccl.group.unsettled


def test_settle_returns_once_the_last_followed_collective_has_ended(nccl):
    nccl.group.allreduce(torch.ones(3), Op.SUM).follow()
    nccl.kernel.completed = True
    nccl.group.settle()
    assert not nccl.group.unsettled
    nccl.group.settle()


def test_settle_raises_after_an_abort_of_a_followed_collective(nccl):
    nccl.group.allreduce(torch.ones(3), Op.SUM).follow()
    nccl.group.abort()
    assert nccl.group.drain(5.0) and nccl.kernel.completed
    with pytest.raises(CollectiveFailed):
        nccl.group.settle()


def test_settle_raises_at_the_timeout_of_a_launched_collective(nccl):
    nccl.group._launched_timeout_s = 0.0
    nccl.group.allreduce(torch.ones(3), Op.SUM).follow()
    with pytest.raises(CollectiveFailed):
        nccl.group.settle()


def test_follow_of_a_failed_group_raises(nccl):
    work = nccl.group.allreduce(torch.ones(3), Op.SUM)
    nccl.group.abort()
    with pytest.raises(CollectiveFailed):
        work.follow()


def test_followed_since_is_the_launch_of_the_oldest_collective_under_way(nccl):
    first, second = (nccl.group.allreduce(torch.ones(3), Op.SUM) for _ in range(2))
    assert nccl.group.followed_since() is None  # nothing is followed
    second.follow()
    assert nccl.group.followed_since() == first.launched_at
    nccl.kernel.completed = True
    assert nccl.group.followed_since() is None


def test_kernel_that_outlives_an_abort_does_not_count_as_followed(nccl):
    nccl.group.allreduce(torch.ones(3), Op.SUM).follow()
    nccl.backend.torchs.abort.side_effect = None  # the kernel does not end
    nccl.group.abort()
    assert nccl.group.followed_since() is None and nccl.group.unsettled


def test_followed_since_fails_the_group_on_an_error_that_nccl_has_detected(nccl, monkeypatch):
    nccl.group.allreduce(torch.ones(3), Op.SUM).follow()
    nccl.group._communicator = 1
    monkeypatch.setattr(nccl_library, "reported", lambda communicator: 6)
    monkeypatch.setattr(nccl_library, "words", create_autospec(nccl_library.words))
    monkeypatch.setattr(nccl_library, "revoke", lambda communicator: 0)
    nccl.group.followed_since()
    nccl.kernel.completed = True
    with pytest.raises(CollectiveFailed):
        nccl.group.settle()


def test_followed_collective_that_does_not_end_fails_the_group_at_its_limit(nccl, monkeypatch):
    """The training thread may wait inside CUDA, so the thread that calls this has to see it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    nccl.group.allreduce(torch.ones(3), Op.SUM).follow(5.0)
    now[0] = 200.0  # the GPU has come to it only now, for all that is known
    assert nccl.group.followed_since() == 100.0
    now[0] = 204.0
    assert nccl.group.followed_since() == 100.0
    nccl.group.allreduce(torch.ones(3), Op.SUM)  # still possible
    now[0] = 206.0
    nccl.group.followed_since()
    with pytest.raises(CollectiveFailed):
        nccl.group.settle()


def test_limit_of_a_followed_collective_starts_at_the_end_of_the_previous_one(nccl, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kernels = [Kernel(), Kernel()]
    nccl.backend.torchs.allreduce.side_effect = [each.work for each in kernels]
    for _ in kernels:
        nccl.group.allreduce(torch.ones(3), Op.SUM).follow(5.0)
    for now[0] in (100.0, 104.0):
        nccl.group.followed_since()
    kernels[0].completed = True
    for now[0] in (106.0, 110.0):
        nccl.group.followed_since()
    assert nccl.group._failed is None


SCALINGS = pytest.mark.parametrize(
    ("scale", "divisor", "op"),
    [(1.0, 1, c10d.ReduceOp.SUM), (1.0, 2, c10d.ReduceOp.AVG), (0.5, 1, None), (1.0, 3, None)],
)


@SCALINGS
@pytest.mark.parametrize("scatters", [True, False])
def test_nccl_scales_sums_of_sharded_models(nccl, monkeypatch, scatters, scale, divisor, op):
    premultiplied = create_autospec(c10d._make_nccl_premul_sum, return_value=c10d.ReduceOp.SUM)
    monkeypatch.setattr(c10d, "_make_nccl_premul_sum", premultiplied)
    torchs: Any = c10d.Backend
    scatter = create_autospec(torchs._reduce_scatter_base, return_value=nccl.kernel.work)
    nccl.backend.torchs._reduce_scatter_base = scatter
    if scatters:
        nccl.group.reduce_scatter([torch.zeros(2)], [torch.ones(4)], scale, divisor)
    else:
        nccl.group.allreduce_scaled([torch.ones(4)], scale, divisor)
    call = scatter if scatters else nccl.backend.torchs.allreduce
    options = call.call_args.args[-1]
    if op is None:
        premultiplied.assert_called_once_with(scale / divisor)
    else:
        assert options.reduceOp == op


def test_several_tensors_are_one_launch_that_ends_even_when_a_call_raises(nccl):
    order: list[str] = []
    torchs = nccl.backend.torchs
    torchs._start_coalescing = lambda: order.append("start")
    torchs._allgather_base = lambda output, tensor: order.append("gather")

    def end() -> Any:
        order.append("end")
        return nccl.kernel.work

    torchs._end_coalescing = end
    tensors = [torch.ones(1), torch.ones(2)]
    nccl.group.allgather_into([torch.zeros(2), torch.zeros(4)], tensors)
    assert order == ["start", "gather", "gather", "end"]
    assert len(nccl.group._under_way) == 1
    torchs.allreduce.side_effect = RuntimeError("NCCL error")
    with pytest.raises(CollectiveFailed):
        nccl.group.allreduce_scaled(tensors)
    assert order[-2:] == ["start", "end"]


# ---- how far it has come -------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(nccl) -> list[Kernel]:
    """Those of five collectives, of which the GPU has come to none."""
    MadeUpEvent.made.clear()
    kernels = [Kernel() for _ in range(5)]
    nccl.backend.torchs.allreduce.side_effect = [each.work for each in kernels]
    for _ in kernels:
        nccl.group.allreduce(torch.ones(3), Op.SUM)
    return kernels


def test_counts_report_launched_arrived_and_ended_collectives(nccl, kernels):
    events = MadeUpEvent.made
    assert nccl.group.counts()[:3] == (5, 0, 0)
    for event in events[:4]:
        event.query.return_value = True
    assert nccl.group.counts()[:3] == (5, 4, 0)
    kernels[0].completed = kernels[1].completed = True
    assert nccl.group.counts()[:3] == (5, 4, 2)
    assert not any(event.synchronize.called or event.wait.called for event in events)
    for event, kernel in zip(events, kernels, strict=True):
        event.query.return_value = kernel.completed = True
    assert nccl.group.counts()[:3] == (5, 5, 5)


def test_events_are_recorded_before_their_collectives_and_reused(nccl, kernels):
    kernels[0].completed = kernels[1].completed = True
    more = [Kernel() for _ in range(2)]
    nccl.backend.torchs.allreduce.side_effect = [each.work for each in more]
    nccl.group.allreduce(torch.ones(3), Op.SUM)
    assert len(MadeUpEvent.made) == 6  # it took one before it looked
    nccl.group.allreduce(torch.ones(3), Op.SUM)
    assert len(MadeUpEvent.made) == 6
    assert {event.record.call_args.args for event in MadeUpEvent.made} == {("the stream",)}
    assert nccl.group.counts()[:3] == (7, 2, 2)


def test_error_of_a_device_query_is_returned_as_a_value(nccl, kernels):
    MadeUpEvent.made[0].query.side_effect = RuntimeError("CUDA error: an illegal memory access")
    assert nccl.group.counts() == (5, 0, 0, 0.0, True)


def test_counts_report_the_longest_time_from_launch_to_arrival(nccl, kernels, monkeypatch):
    began = nccl.group._under_way[0].launched_at
    monkeypatch.setattr(time, "monotonic", lambda: began + 20.0)
    assert nccl.group.counts().took_s == 0.0
    for event in MadeUpEvent.made:
        event.query.return_value = True
    assert nccl.group.counts().took_s == pytest.approx(20.0, abs=0.1)


def test_without_a_driver_a_launched_collective_has_three_minutes_and_a_given_time_wins(
    monkeypatch,
):
    for name in ("ELASTIC_DRIVER", "ELASTIC_COLLECTIVE_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def timeout_s(given_s: float = 1800.0) -> float:
        return NcclCollectives(0, 2, 30.0, given_s)._launched_timeout_s

    assert timeout_s() == 180.0 and timeout_s(20.0) == 20.0
    for name in ("ELASTIC_DRIVER", "ELASTIC_COLLECTIVE_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1800")
            assert timeout_s() == 1800.0
