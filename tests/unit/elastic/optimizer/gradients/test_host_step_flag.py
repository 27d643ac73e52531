"""The mark of a step on its way from a GPU to the host."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from elastic.collectives.interface import Op
from elastic.errors import DeviceLost
from elastic.optimizer.gradients import host_step_flag
from elastic.optimizer.gradients.host_step_flag import HostStepFlag
from elastic.optimizer.gradients.plan_agreement import StepFlag
from elastic.state.snapshots.pinned_copy import PinnedCopy


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.fixture
def copy(monkeypatch) -> Any:
    found = create_autospec(PinnedCopy, instance=True)
    monkeypatch.setattr(host_step_flag, "PinnedCopy", lambda: found)
    monkeypatch.setattr(torch, "empty_like", lambda mark, **_: torch.ones(1))
    return found


def test_step_flag_is_read_after_its_copy_completes(copy):
    mark = torch.zeros(1).as_subclass(OnGpu)
    seen = HostStepFlag(mark)
    seen.fetch()
    copy.follow.assert_called_once_with(mark.device, 4)
    copy.wait.assert_not_called()
    assert isinstance(seen.read(Op.SUM), StepFlag)
    copy.wait.assert_called_once_with()


def test_endless_copy_raises_device_lost(copy):
    copy.wait.side_effect = DeviceLost("a copy did not complete")
    seen = HostStepFlag(torch.zeros(1).as_subclass(OnGpu))
    seen.fetch()
    with pytest.raises(DeviceLost):
        seen.read(Op.SUM)


def test_step_flag_on_the_cpu_is_not_copied():
    mark = torch.zeros(1)
    seen = HostStepFlag(mark)
    seen.fetch()
    assert seen.read(Op.SUM) == seen.read(Op.SUM)
