"""Horovod's exceptions: raised after a script has imported them, and handled by elastic.run."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from elastic import errors
from elastic.errors import (
    CollectiveFailed,
    ElasticError,
    PeerLost,
    TensorMismatch,
    Unsupported,
    WorldChanging,
)
from elastic.horovod_errors import (
    HorovodPeerLost,
    HorovodVersionMismatchError,
    HorovodWorldChanging,
    raise_as_horovod,
)
from elastic.protocol.messages import Commit, Place
from elastic.rendezvous import worker_settings
from elastic.run_loop import run
from elastic.runtime import host_updates, lifecycle
from elastic.runtime.recovery import Phase, Recovery
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state import ObjectState
from harness.golden import raises
from harness.program import output_of
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt


@pytest.fixture
def only_elastic(monkeypatch):
    """A script that has not imported Horovod's names."""
    monkeypatch.setattr(errors, "raised_as", {})


@pytest.fixture
def world_of_one(monkeypatch):
    """Initialized without elasticrun."""
    rt = WorkerRuntime(worker_settings.read({}), None)
    monkeypatch.setattr(lifecycle, "_runtime", rt)
    monkeypatch.setattr(lifecycle, "_initialized", True)
    return rt


# ---- raised exceptions ---------------------------------------------------------------------------


def test_interruptions_are_no_exceptions_without_horovods_names(only_elastic):
    for kind in (PeerLost, WorldChanging):
        made = kind("a peer is gone")
        assert type(made) is kind
        assert not isinstance(made, Exception)


def test_script_that_imports_horovod_errors_can_catch_them(only_elastic):
    raise_as_horovod()
    with raises(HorovodInternalError) as lost:
        raise PeerLost("a peer is gone")
    assert type(lost.value) is HorovodPeerLost
    with pytest.raises(HostsUpdatedInterrupt, match="planned") as change:
        raise WorldChanging("a planned change of the world is in progress")
    assert type(change.value) is HorovodWorldChanging
    assert change.value.skip_sync is False
    for raised in (lost.value, change.value):
        assert isinstance(raised, RuntimeError)
        assert isinstance(raised, errors.Interrupted)
    assert not isinstance(lost.value, HostsUpdatedInterrupt)
    assert not isinstance(change.value, HorovodInternalError)


def test_leave_requests_are_not_converted_to_horovod_exceptions(only_elastic):
    raise_as_horovod()
    asked = errors.LeaveRequested("SIGTERM")
    assert type(asked) is errors.LeaveRequested
    assert not isinstance(asked, Exception)


@pytest.mark.parametrize(
    ("module", "is_horovods"),
    [("elastic.horovod_errors", False), ("horovod.common.exceptions", True)],
)
def test_importing_horovods_exception_names_changes_raised_types(module, is_horovods):
    program = (
        f"import sys, {module}\n"
        "from elastic.errors import PeerLost\n"
        f"assert isinstance(PeerLost('x'), Exception) is {is_horovods}\n"
        "assert 'torch' not in sys.modules"
    )
    output_of(sys.executable, "-c", program, cwd=Path(__file__).parents[3])


def test_failures_that_end_a_job_are_horovod_internal_errors():
    assert isinstance(CollectiveFailed("reset by peer"), HorovodInternalError)
    mismatch = TensorMismatch("allreduce 'x' is float32 [2] on rank 0, float32 [3] on rank 1")
    assert isinstance(mismatch, HorovodInternalError)
    assert isinstance(mismatch, ElasticError)


@pytest.mark.parametrize(
    "raised",
    [
        HorovodInternalError("lost"),
        HorovodPeerLost("lost"),
        HorovodWorldChanging("planned"),
        HostsUpdatedInterrupt(skip_sync=True),
        HorovodVersionMismatchError("torch", "2.8", "2.9"),
        TensorMismatch("shapes"),
        Unsupported("no such reducescatter"),
        CollectiveFailed("reset"),
        PeerLost("lost"),
    ],
    ids=lambda raised: type(raised).__name__,
)
def test_horovod_exceptions_survive_pickling(raised):
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is type(raised)
    assert str(copy) == str(raised)
    assert vars(copy) == vars(raised)


# ---- elastic.run ---------------------------------------------------------------------------------


def trained(raises: BaseException) -> tuple[list[int], ObjectState]:
    """Return the step of each call of the function, which commits 4, continues to 5, and raises the first time."""
    state, steps = ObjectState(step=0), []

    @run
    def train(state: ObjectState) -> None:
        steps.append(state.step)
        if len(steps) > 1:
            return
        state.step = 4
        state.commit()
        state.step = 5
        raise raises

    train(state)
    return steps, state


def test_an_internal_error_restores_the_last_commit(world_of_one):
    assert trained(HorovodInternalError("enough"))[0] == [0, 4]


@pytest.mark.parametrize("skip_sync", [False, True])
def test_hosts_updated_interrupt_keeps_the_state(world_of_one, skip_sync):
    assert trained(HostsUpdatedInterrupt(skip_sync))[0] == [0, 5]


def test_a_lost_peer_that_is_caught_and_raised_again_is_recovered(world_of_one):
    assert trained(HorovodPeerLost("a peer is gone"))[0] == [0, 4]


@pytest.mark.parametrize(
    "raises",
    [
        TensorMismatch("shapes differ"),
        Unsupported("no such reducescatter"),
        ValueError("a bug"),
        CollectiveFailed("reset"),
    ],
)
def test_error_that_would_repeat_ends_the_script(world_of_one, raises):
    with pytest.raises(type(raises), match=str(raises)):
        trained(raises)


def test_a_world_that_can_not_be_formed_again_is_not_retried(world_of_one):
    """Of a fixed size, without a driver: no endless loop."""
    world_of_one.session.recovery.phase = Phase.TRAINING
    with pytest.raises(HorovodInternalError, match="enough"):
        trained(HorovodInternalError("enough"))


def test_commit_after_a_swallowed_loss_is_refused(world_of_one):
    """The step was interrupted: its state is invalid."""
    state = ObjectState(step=4)
    world_of_one.session.recovery.phase = Phase.TRAINING
    world_of_one.session.recovery.generation = 2
    world_of_one.mark_broken(2, "reset by peer")
    state.step = 5
    state.commit()  # not reported yet: the step before it was complete
    with pytest.raises(HorovodInternalError), world_of_one.guard("allreduce"):
        pass
    state.step = 6
    with raises(HorovodInternalError):
        state.commit()
    state.restore()
    assert state.step == 5


def test_local_commit_is_newer_than_agreed_ones_and_the_lowest_rank_wins():
    newest: list[Commit] = []
    for rank in (0, 1):
        recovery = Recovery(phase=Phase.TRAINING, generation=4, provisional=False)
        recovery.place = Place(rank, 2, rank, 2, 0, 1)
        recovery.enter()
        for _ in range(50):
            recovery.arrive()
        agreed = recovery.committed()
        recovery.committed_alone()
        alone = recovery.newest
        assert agreed is not None and alone is not None
        assert agreed < alone < Commit(5, 0), "the next world's are newer still"
        newest.append(alone)
    assert newest[0] > newest[1]


def test_a_state_is_notified_of_host_changes_during_training(world_of_one):
    state = ObjectState(step=0)

    @run
    def train(state: ObjectState) -> int:
        host_updates.notify(3.0, host_updates.HostUpdateResult.mixed)
        return state._host_messages.qsize()

    assert train(state) == 1
    host_updates.notify(4.0, host_updates.HostUpdateResult.mixed)
    assert state._host_messages.qsize() == 1
