"""A collective under way that several threads wait for, as those of a fused batch do."""

from __future__ import annotations

import threading
from unittest.mock import create_autospec

import pytest
from torch.distributed import Work

from elastic.collectives.gloo.process_group import GlooCollectives, GlooWork
from elastic.collectives.nccl import NcclCollectives, NcclWork


@pytest.mark.parametrize(
    ("kind", "group"), [(GlooWork, GlooCollectives), (NcclWork, NcclCollectives)]
)
def test_nobody_who_waits_returns_before_the_result_is_in_place(kind, group):
    begun, go_on = threading.Event(), threading.Event()
    result: list[str] = []
    seen: list[list[str]] = []

    def then() -> None:
        begun.set()
        go_on.wait(10)
        result.append("sum")

    done = create_autospec(Work, instance=True)
    done.is_completed.return_value = done.wait.return_value = True
    made = create_autospec(group, instance=True)
    made._failed = ""  # so that no GPU is asked whether the collective is over
    work = kind(made, done, then)

    def wait() -> None:
        work.wait()
        seen.append(list(result))

    first, second = threading.Thread(target=wait), threading.Thread(target=wait)
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.1)  # it would be back by now
    go_on.set()
    first.join(10)
    second.join(10)
    assert seen == [["sum"], ["sum"]]
