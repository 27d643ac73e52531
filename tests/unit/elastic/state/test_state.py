"""States without tensors, and what all states share: commits, torn saves, resets, names."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from elastic.collectives.interface import Collectives, Work
from elastic.data.sampler import ElasticSampler
from elastic.errors import Invalid, WorldChanging
from elastic.exact.shards import Shards
from elastic.monitoring import step_count
from elastic.monitoring.time_account import TimeAccount
from elastic.runtime import lifecycle
from elastic.runtime.commit_log import CommitLog
from elastic.state.state import ObjectState, State, has_custom_sync
from elastic.state.torch_state import TorchState
from harness.fakes import collectives as fake
from harness.golden import raises, recorded


class FakeRuntime:
    """Writes down what a state asks of it."""

    activity = 0
    generation = 1
    broken = False

    def __init__(self) -> None:
        self.said: list[str] = []
        self.change: BaseException | None = None
        self.elastic = True
        self.place = SimpleNamespace(rank=0)
        self.env = SimpleNamespace(digest_commits=False, commit_budget=0.0)
        self.account = TimeAccount(0.0, "training")
        self.commits = create_autospec(CommitLog, instance=True)
        self.commits.committed.side_effect = lambda: self.said.append("committed")
        self.commits.check.side_effect = self._check

    def settle(self) -> None:
        self.said.append("settle")

    def _check(self) -> None:
        self.said.append("check")
        if self.change is not None:
            raise self.change


@pytest.fixture
def rt(monkeypatch):
    made = FakeRuntime()
    monkeypatch.setattr(lifecycle, "active", lambda: made)
    return made


def test_restore_returns_to_the_last_commit():
    state = ObjectState(epoch=0, batch=0)
    state.batch = 5
    state.commit()
    state.batch = 9
    state.restore()
    assert (state.epoch, state.batch) == (0, 5)


def test_restore_without_a_commit_returns_to_the_initial_values():
    state = ObjectState(epoch=3)
    state.epoch = 4
    state.restore()
    assert state.epoch == 3


def test_defect_e_values_are_copied_deeply_at_commit_and_at_restore():
    state = ObjectState(history=[{"loss": 1.0}])
    state.commit()
    state.history[0]["loss"] = 2.0
    state.history.append("later")
    state.restore()
    assert state.history == [{"loss": 1.0}]
    state.history[0]["loss"] = 3.0  # what a restore hands out is not the commit itself
    state.restore()
    assert state.history == [{"loss": 1.0}]


def test_value_that_cannot_be_copied_is_reported_by_name():
    with raises(Invalid):
        ObjectState(lock=threading.Lock())
    state = ObjectState(batches=None)
    state.batches = (each for each in [1, 2])
    with pytest.raises(Invalid, match=r"state\.batches"):
        state.commit()


@pytest.mark.parametrize("value", [torch.nn.Linear(1, 1), Shards(2), ElasticSampler(range(2))])
def test_values_that_only_a_torch_state_can_restore_are_refused(value):
    """A restore would put a copy there, which no optimizer trains and no loader asks."""
    with raises(Invalid, type(value).__name__):
        ObjectState(it=value, epoch=0)


def test_failed_commit_of_a_value_that_cannot_be_copied_keeps_the_previous_commit():
    state = ObjectState(value=1)
    state.value = threading.Lock()
    with pytest.raises(Invalid):
        state.commit()
    assert state.valid()
    state.restore()
    assert state.value == 1


def test_failed_overridden_save_invalidates_the_state():
    class Careful(ObjectState):
        def save(self) -> None:
            super().save()
            if self.fail:
                raise OSError("disk full")

    state = Careful(value=1)
    state.fail = True
    with pytest.raises(OSError):
        state.commit()
    assert not state.valid()


def test_restore_of_an_invalid_state_is_logged(caplog):
    class Careful(ObjectState):
        def save(self) -> None:
            super().save()
            raise OSError("disk full")

    state = Careful(value=[1])
    with pytest.raises(OSError):
        state.commit()
    state.restore()
    recorded("log", caplog.text)


def test_commit_saves_before_checking_for_changes(rt):
    state = ObjectState(batch=0)
    state.batch = 1
    rt.change = WorldChanging("planned")
    with pytest.raises(WorldChanging):
        state.commit()
    assert rt.said == ["settle", "committed", "settle", "check"]
    assert rt.account.part == "training" and rt.account.times(rt.account._since).committing > 0
    state.batch = 2
    state.restore()
    assert state.batch == 1


@pytest.fixture
def costs(rt, monkeypatch):
    """Seconds of a copy and of a step, which the ranks exchange."""
    found = [0.01, 0.1]
    group = create_autospec(Collectives, instance=True, rank=0, size=2)

    def gather(parts, mine):
        for part in parts:
            part.copy_(torch.tensor(found))
        return create_autospec(Work, instance=True)

    group.allgather.side_effect = gather
    rt.guard = lambda name: contextlib.nullcontext()
    rt.group = lambda purpose, device: group
    rt.env.commit_budget = 0.02
    monkeypatch.setattr(step_count, "commits_every", 1)
    return found


def test_commit_beyond_the_budget_makes_no_copy_and_still_checks_for_changes(rt, costs, capsys):
    state = ObjectState(batch=0)
    made = []
    for state.batch in range(14):
        rt.said.clear()
        state.commit()
        assert rt.said[-2:] == ["settle", "check"]
        if "committed" in rt.said:
            made.append(state.batch)
    assert made == [0, 1, 2, 7, 12]
    assert step_count.commits_every == 5
    assert len(capsys.readouterr().err.splitlines()) == 1
    state.restore()
    assert state.batch == 12


def test_steps_beyond_the_budget_are_committed_at_the_end_of_training(rt, costs):
    state = ObjectState(batch=0)
    for state.batch in range(5):
        state.commit()
    rt.said.clear()
    state.commit_rest()
    assert rt.said == ["committed"]
    state.restore()
    assert state.batch == 4
    rt.said.clear()
    state.commit()
    rt.generation = 2  # which has made no copy yet
    state.commit_rest()
    assert rt.said.count("committed") == 0


def test_new_world_begins_with_a_copy_at_each_commit(rt, costs):
    state = ObjectState(batch=0)
    for state.batch in range(4):
        state.commit()
    rt.generation = 2
    rt.said.clear()
    for state.batch in range(3):
        state.commit()
    assert rt.said.count("committed") == 3 and step_count.commits_every == 5


def test_check_host_updates_makes_no_commit(rt):
    state = ObjectState(batch=0)
    state.batch = 1
    state.on_hosts_updated(17.0, 2)
    state.check_host_updates()
    assert rt.said == ["settle", "check"]
    assert state._last_updated_timestamp == 17.0
    assert state._host_messages.empty()
    state.restore()
    assert state.batch == 0


def test_reset_clears_host_messages_and_calls_callbacks_in_order():
    class Counting(State):
        def reset(self) -> None:
            calls.append("reset")

    calls: list[str] = []
    state = Counting()
    state.register_reset_callbacks([lambda: calls.append("first")])
    state.register_reset_callbacks([lambda: calls.append("second")])
    state.on_hosts_updated(1, 1)
    state.on_reset()
    assert calls == ["reset", "first", "second"]
    assert state._host_messages.empty()


def test_base_state_has_an_empty_layout_and_digest():
    state = State()
    assert (state.layout(), state.digest(), state.digest_buffers()) == ("", 0, 0)
    assert state._rank() == 0


def test_custom_broadcast_of_a_script_is_used_by_sync():
    state = ObjectState(lambda value: {**value, "epoch": 7}, lambda: 0, epoch=1)
    assert has_custom_sync(state)
    state.sync()
    state.epoch = 8
    state.restore()
    assert state.epoch == 7


def test_overridden_sync_is_recognized_as_custom():
    class Mine(ObjectState):
        def sync(self) -> None:
            pass

    assert has_custom_sync(Mine(value=1))
    assert not has_custom_sync(ObjectState(value=1))


@pytest.mark.parametrize("name", ["commit", "layout", "valid", "_saved_state"])
def test_a_value_that_would_hide_a_method_is_refused(name):
    with raises(Invalid):
        ObjectState(None, None, **{name: 1})


def test_transferred_values_are_committed_only_by_the_next_save():
    ranks = fake.world(2)
    states = [ObjectState(epoch=5, log=["a"]), ObjectState(epoch=0, log=[])]
    others = threading.Thread(target=states[0].transfer, args=(ranks[0], 0))
    others.start()
    assert states[1].transfer(ranks[1], 0) > 0
    others.join(10)
    assert (states[1].epoch, states[1].log) == (5, ["a"])
    states[1].restore()
    assert (states[1].epoch, states[1].log) == (0, [])


def test_state_works_in_a_world_of_one_without_init():
    state = ObjectState(epoch=0)
    state.epoch = 1
    state.sync()
    state.epoch = 2
    state.restore()
    assert state.epoch == 1


def test_failed_commit_restores_the_time_account(rt):
    state = ObjectState(lock=1)
    rt.commits.make_durable.side_effect = OSError
    with pytest.raises(OSError):
        state.commit()
    assert rt.account.part == "training"


@pytest.mark.parametrize("values", [{"broadcast_object": print}, {"getrank": print}])
def test_function_under_a_misspelled_option_is_refused(values):
    with raises(Invalid):
        ObjectState(**values)


@pytest.mark.parametrize("name", ["rgn", "rngs", "RNG"])
def test_misspelled_option_for_random_generators_is_refused(name):
    flag: dict[str, Any] = {name: True}
    number: dict[str, Any] = {name: 3}
    with raises(Invalid):
        TorchState(**flag)
    assert getattr(TorchState(**number), name) == 3


def test_every_state_accepts_the_arguments_of_the_run_loop_for_transfer():
    alone = fake.world(1)[0]
    for state in (State(), ObjectState(step=1), TorchState(step=1)):
        assert state.transfer(alone, root=0, group_on=None, keeps=True) == 0
