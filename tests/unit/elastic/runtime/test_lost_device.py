"""A GPU that does not recover from an abort: its process ends immediately, with a reason."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from elastic import run
from elastic.collectives import nccl, threads_at_exit
from elastic.collectives.gloo.process_group import GlooCollectives
from elastic.collectives.nccl import NcclCollectives, NcclWork
from elastic.collectives.single_rank import LocalCollectives
from elastic.errors import DeviceLost, PeerLost
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from elastic.runtime.process_groups import Groups
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state import ObjectState
from harness.golden import raises


@pytest.fixture
def gpu(monkeypatch, threads_of_its_own):
    """One group that was aborted, and the time that passes while it is waited for."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    clock = SimpleNamespace(now=100.0)
    passing = SimpleNamespace(
        monotonic=lambda: clock.now,
        sleep=lambda seconds: setattr(clock, "now", clock.now + max(seconds, 0.01)),
    )
    monkeypatch.setattr(nccl, "time", passing)
    behind = create_autospec(NcclCollectives._behind_all, return_value=None)
    monkeypatch.setattr(NcclCollectives, "_behind_all", behind)
    kernel = create_autospec(c10d.Work, instance=True)
    kernel.is_completed.return_value = False
    group = NcclCollectives(rank=0, size=2, timeout_s=10.0)
    group._under_way.append(NcclWork(group, kernel, None))
    group.abort()
    made = Groups(worker_settings.read({}), over=lambda: True)
    made._made["named", "cuda", (0, 1)] = group
    yield SimpleNamespace(groups=made, group=group, kernel=kernel, clock=clock)
    made._closer.finish()  # whatever else of this process closes would wait for its thread


def test_a_kernel_that_outlives_its_abort_is_given_ten_seconds_and_no_more(gpu):
    with raises(DeviceLost):
        gpu.groups.drain(1.0)
    assert 110.0 <= gpu.clock.now < 110.5


def test_kernel_that_ends_late_is_no_lost_device(gpu):
    gpu.kernel.is_completed.side_effect = lambda: gpu.clock.now > 104.0
    assert gpu.groups.drain(1.0) == 1
    assert gpu.clock.now < 104.5


def test_slow_abort_is_no_lost_device_once_all_kernels_have_ended(gpu):
    gpu.kernel.is_completed.return_value = True
    gpu.group._stopping = SimpleNamespace(join=lambda timeout: None, is_alive=lambda: True)
    assert gpu.groups.drain(1.0) == 1


def test_worker_is_not_ready_until_gpu_memory_of_earlier_worlds_is_free(gpu):
    """If worlds break in a row, communicators would accumulate."""
    gpu.kernel.is_completed.return_value = True
    stuck = create_autospec(NcclCollectives, instance=True)
    stuck.freed.side_effect = lambda timeout_s: gpu.clock.now > 103.0
    gpu.groups._made = {("named", "cuda", (0, 1)): stuck}
    gpu.groups.retire()
    with raises(DeviceLost):
        gpu.groups.make_room()
    gpu.clock.now = 104.0
    gpu.groups.make_room()


def test_local_group_on_a_gpu_launches_no_watched_collective(gpu):
    """For example of a process set with one rank."""
    gpu.groups._made = {("named", "cuda", (0,)): LocalCollectives()}
    assert gpu.groups.unsettled() == [] and gpu.groups.followed_since() is None
    assert gpu.groups.launches() == [] and gpu.groups.drain(1.0) == 0
    gpu.groups.retire()
    gpu.groups.make_room()


def test_unconnected_group_is_drained_and_not_closed_in_the_training_thread(gpu):
    unmade = create_autospec(NcclCollectives, instance=True)
    unmade.ended.return_value = False
    gpu.groups._made, gpu.groups._unmade = {}, [unmade]
    with raises(DeviceLost):
        gpu.groups.drain(1.0)
    gpu.groups.retire()
    unmade.close.assert_not_called()  # not in the training thread
    assert gpu.groups._unconnected == [unmade]


def test_unconnected_communicators_are_awaited_only_above_a_limit(gpu):
    """A second loss soon after one while NCCL connects would cost all others the rest of NCCL's time."""
    unmade = [create_autospec(NcclCollectives, instance=True) for _ in range(3)]
    freed: list[object] = []
    for each in unmade:
        each.freed.side_effect = lambda timeout_s, each=each: each in freed
    for each in unmade[:2]:
        gpu.groups._made, gpu.groups._unmade = {}, [each]
        gpu.groups.retire()
        gpu.groups.make_room()
    gpu.groups._unmade = [unmade[2]]
    gpu.groups.retire()
    with raises(DeviceLost):
        gpu.groups.make_room()
    freed.append(unmade[1])
    gpu.groups.make_room()
    assert gpu.groups._unconnected == [unmade[0], unmade[2]]


def test_groups_get_two_seconds_at_exit_and_stuck_ones_are_left_behind(gpu, monkeypatch):
    left = create_autospec(threads_at_exit.leave_behind)
    monkeypatch.setattr(threads_at_exit, "leave_behind", left)
    stuck = create_autospec(NcclCollectives, instance=True)
    stuck.freed.return_value = False
    gpu.groups._made = {("named", "cuda", (0, 1)): stuck}
    gpu.groups.close()
    (waits_s,) = stuck.close.call_args.args
    assert 1.5 < waits_s <= 2.0
    left.assert_called_once_with(2.0)


def test_all_groups_are_closed_at_exit_after_a_gpu_failure(gpu):
    """The device's error would otherwise skip the other groups, and the end of the process despite their threads."""
    gpu.kernel.is_completed.side_effect = RuntimeError
    other = create_autospec(NcclCollectives, instance=True)
    gpu.groups._made["named", "cuda", (0, 2)] = other
    gpu.groups.close()
    other.close.assert_called_once()
    assert gpu.group.freed(10.0)


def test_drain_raises_after_a_gpu_failure(gpu):
    gpu.kernel.is_completed.side_effect = RuntimeError
    with pytest.raises(RuntimeError):
        gpu.groups.drain(1.0)


def test_undrained_cpu_group_does_not_delay_the_drain(gpu):
    late = create_autospec(GlooCollectives, instance=True)
    late.drain.return_value = False
    gpu.groups._made = {("named", "cpu", (0, 1)): late}
    assert gpu.groups.drain(1.0) == 1


def test_the_process_ends_immediately_after_reporting_the_reason(monkeypatch, capsys):
    """The interpreter's own end would wait for the GPU."""
    rt = WorkerRuntime(worker_settings.read({}), None)
    monkeypatch.setattr(lifecycle, "_runtime", rt)
    monkeypatch.setattr(lifecycle, "_initialized", True)
    said: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        rt.training, "raised", lambda summary, trace, blame: said.append((summary, blame))
    )

    def drain(timeout_s: float) -> int:
        raise DeviceLost("its GPU did not come back within 10 s")

    monkeypatch.setattr(rt.session.groups, "drain", drain)

    def leaves(code: int) -> None:
        raise SystemExit(f"os._exit({code})")

    monkeypatch.setattr(os, "_exit", leaves)

    @run
    def train(state: ObjectState) -> None:
        raise PeerLost("a collective broke")

    with pytest.raises(SystemExit, match=r"os._exit\(1\)"):
        train(ObjectState(step=0))
    assert said == [("DeviceLost: its GPU did not come back within 10 s", True)]
    assert "DeviceLost" in capsys.readouterr().err
