"""A collective in progress that several threads wait for, as those of a fused batch do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import create_autospec

import pytest
from torch.distributed import ProcessGroupGloo, Work

from elastic.collectives.gloo.call_header import CollectiveKind, Places, header
from elastic.collectives.gloo.process_group import GlooCollectives, GlooWork
from elastic.collectives.nccl import NcclCollectives, NcclWork


def over_gloo(gloo: Work, then: Callable[[], None]) -> GlooWork:
    group = GlooCollectives(0, 2, 30.0)
    group._backend = create_autospec(ProcessGroupGloo, instance=True)
    group._backend.alltoall_base.return_value = gloo
    group._backend.allreduce.return_value = gloo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Places, "agree", lambda places, header: True)
        return group._call(header(CollectiveKind.ALLREDUCE), second=("allreduce",), then=then)


def over_nccl(nccl: Work, then: Callable[[], None]) -> NcclWork:
    group = create_autospec(NcclCollectives, instance=True)
    group._failed = ""  # so that no GPU is queried whether the collective is over
    group._launched_timeout_s = 60.0
    return NcclWork(group, nccl, then)


@pytest.mark.parametrize("begin", [over_gloo, over_nccl])
def test_no_waiter_returns_before_the_result_is_in_place(begin):
    begun, go_on = threading.Event(), threading.Event()
    result: list[str] = []
    seen: list[list[str]] = []

    def then() -> None:
        begun.set()
        go_on.wait(10)
        result.append("sum")

    done = create_autospec(Work, instance=True)
    done.is_completed.return_value = done.wait.return_value = True
    work = begin(done, then)

    def wait() -> None:
        work.wait()
        seen.append(list(result))

    first, second = threading.Thread(target=wait), threading.Thread(target=wait)
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.1)  # it would have returned by now
    go_on.set()
    first.join(10)
    second.join(10)
    assert seen == [["sum"], ["sum"]]
