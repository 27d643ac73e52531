"""`elastic.goodput`, and waits for data."""

from __future__ import annotations

import threading
import time

import pytest
from torch.utils.data import DataLoader, Dataset

import elastic
from elastic.monitoring import data_waits
from elastic.monitoring.goodput import Goodput
from elastic.monitoring.time_account import TimeAccount


class Slow(Dataset):
    """Each item takes one second of the account's manual clock."""

    def __init__(self, seen: list[str], account: TimeAccount) -> None:
        self.seen, self.account = seen, account

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        self.seen.append(self.account.part)
        return index


@pytest.fixture
def account():
    account = TimeAccount(time.monotonic(), "training")
    data_waits.count(account)
    yield account
    data_waits.stop()


def test_waiting_for_a_batch_is_booked_as_data_and_then_as_training(account):
    seen: list[str] = []
    for _ in DataLoader(Slow(seen, account)):
        assert account.part == "training"
    assert seen == ["data"] * 3
    assert account.times(time.monotonic()).data > 0


def test_a_loader_in_another_thread_delays_no_worker(account):
    seen: list[str] = []
    thread = threading.Thread(target=lambda: list(DataLoader(Slow(seen, account))))
    thread.start()
    thread.join()
    assert seen == ["training"] * 3


def test_loader_used_during_a_recovery_is_booked_as_recovering(account):
    account.begin("recovering", time.monotonic())
    seen: list[str] = []
    list(DataLoader(Slow(seen, account)))
    assert seen == ["recovering"] * 3


def test_no_data_wait_is_booked_without_a_training_function(account):
    data_waits.stop()
    seen: list[str] = []
    list(DataLoader(Slow(seen, account)))
    assert seen == ["training"] * 3


def test_goodput_is_the_share_of_training_time():
    spent = Goodput(6.0, 1.0, 0.5, 0.5, 0.5, 1.0, 0.25, 0.25)
    assert (spent.wall_s, spent.goodput) == (10.0, 0.6)
    assert Goodput(*[0.0] * 8).goodput == 0.0


def test_goodput_before_init_raises_not_initialized():
    with pytest.raises(elastic.NotInitialized, match="init"):
        elastic.goodput()
