"""Losses in torch's futures are raised as such; and the start of a world."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, call, create_autospec, patch

import pytest
import torch

from elastic import run_loop
from elastic.checkpoints import training_checkpoints
from elastic.errors import PeerLost, StateMismatch, WorldChanging
from elastic.negotiation import process_sets
from elastic.protocol.messages import MEMBERS_WITH_SOURCE, STATE, Address, Commit, Place, World
from elastic.run_loop import unwrapped
from elastic.runtime.errors_while_leaving import Departure
from elastic.runtime.guarded_groups import reply_to
from elastic.runtime.session import Session
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state.state import State
from elastic.torch_backend import following_group
from harness.golden import raises


@pytest.fixture
def session():
    return create_autospec(Session, instance=True)


def hook_that_reduces_twice() -> None:
    """As in PowerSGD: the second reduction begins in a callback of the first one's future."""

    def second(_: object) -> None:
        raise PeerLost("lost h:0#1")

    first: torch.futures.Future[None] = torch.futures.Future()
    result = first.then(second)
    first.set_result(None)
    result.wait()


def test_loss_reported_to_a_future_callback_is_raised_as_peer_lost(session):
    session.raise_if_ended.side_effect = PeerLost("lost h:0#1")
    with raises(PeerLost):
        unwrapped(session, hook_that_reduces_twice)


def test_error_of_the_script_is_raised_unchanged(session):
    with raises(RuntimeError):
        unwrapped(session, lambda: torch.zeros(2) + torch.zeros(3))
    session.raise_if_ended.assert_called_once_with()


def test_result_of_a_call_is_returned(session):
    assert unwrapped(session, lambda: 3) == 3


@pytest.mark.parametrize("error", [PeerLost("lost h:0#1"), WorldChanging("h:2#1 joined")])
def test_no_handler_of_sigchld_runs_from_the_end_of_a_world_until_user_code_runs_again(error):
    """torch raises in this thread once a loader worker has died."""

    def raises_(*_: object) -> None:
        raise RuntimeError("a loader worker died")

    def enters(*_: object, first: bool) -> None:
        if not first:
            signal.raise_signal(signal.SIGCHLD)

    rt = MagicMock(spec=WorkerRuntime)
    rt.alone, rt.elastic, rt.session = False, False, MagicMock()
    rt.training, rt.commits, rt.place = MagicMock(), MagicMock(), MagicMock()
    values: list[Any] = [error, 3]
    before = signal.signal(signal.SIGCHLD, raises_)
    try:
        with (
            patch.object(run_loop, "_enter_world", side_effect=enters),
            patch.object(run_loop, "unwrapped", side_effect=values),
            patch.object(training_checkpoints, "finish"),
            patch.object(training_checkpoints, "returned"),
        ):
            state = create_autospec(State, instance=True)
            state.handled.return_value = {}
            assert run_loop._train(rt, MagicMock(), state, Departure(rt.session), None) == 3
        assert signal.getsignal(signal.SIGCHLD) is raises_
    finally:
        signal.signal(signal.SIGCHLD, before)


def entering(world: World) -> tuple[Any, Any]:
    """Runtime and state of a worker that enters this world after another one."""
    rt, state = MagicMock(spec=WorkerRuntime), create_autospec(State, instance=True)
    state.first_broadcast.return_value = None
    rt.alone, rt.place = False, world.place
    rt.session, rt.worlds, rt.commits, rt.kept_variables = (MagicMock() for _ in range(4))
    rt.session.recovery.newcomer = False
    rt.worlds.next.return_value = world
    rt.commits.went_back.return_value = False
    state.layout.return_value = ""
    state.is_sharded.return_value = False
    return rt, state


def enter(rt: Any, state: Any) -> None:
    """Enter the world as a worker whose script runs no code in it."""
    with (
        patch.object(training_checkpoints, "entered"),
        patch.object(following_group, "follow"),
        patch.object(process_sets, "start_copy", autospec=True, return_value=list),
        patch.object(run_loop, "has_custom_sync", return_value=False),
        patch.object(run_loop, "runs_script_in_reset", return_value=False),
    ):
        run_loop._enter_world(rt, state, "", first=False)


@pytest.mark.parametrize(
    ("size", "hosts", "provisional", "sends"),
    [
        (MEMBERS_WITH_SOURCE, 2, False, True),
        (MEMBERS_WITH_SOURCE + 1, 2, False, False),
        (2, 1, False, False),
        (2, 2, True, False),
    ],
)
def test_first_broadcast_is_sent_only_by_members_of_small_worlds_on_several_hosts(
    size, hosts, provisional, sends
):
    place = Place(0, size, 0, size // hosts, 0, hosts)
    rt, state = entering(World(4, place, Address("h", 1), size, Commit(3, 5), "h:1 lost"))
    rt.provisional = provisional
    state.first_broadcast.return_value = (b"header", b"reply")
    state.world_metadata.return_value = {"merges": "3"}
    enter(rt, state)
    *_, metadata, source = rt.worlds.next.call_args.args
    assert metadata.keys() == ({"merges", reply_to(STATE)} if sends else {"merges"})
    assert (STATE in source) is sends


@pytest.mark.parametrize("calls_back", [True, False])
def test_state_after_reset_callbacks_is_committed_when_sent_to_a_joining_worker(calls_back):
    place = Place(0, 2, 0, 2, 0, 1)
    world = World(4, place, Address("h", 1), holders=1, commit=Commit(3, 5), reason="h:1#2 joined")
    rt, state = entering(world)
    state.calls_back.return_value = calls_back
    rt.commits.adopt.side_effect = lambda copied: state.mock_calls.append(call.adopted())
    enter(rt, state)
    said = [
        name for name, *_ in state.mock_calls if name in ("on_reset", "transfer", "save", "adopted")
    ]
    assert said == ["on_reset", "transfer", *(["save"] if calls_back else []), "adopted"]


def test_group_that_stops_together_is_known_before_the_world_in_which_a_change_may_be_planned():
    place = Place(0, 2, 0, 2, 0, 1)
    world = World(4, place, Address("h", 1), holders=2, commit=Commit(3, 5), reason="h:1#2 joined")
    rt, state = entering(world)
    state.stop_group.return_value = "eu"
    rt.worlds.next.side_effect = lambda *_: (rt.commits.stop_with.assert_called_with("eu"), world)[
        1
    ]
    enter(rt, state)
    rt.worlds.next.assert_called_once()


@pytest.mark.parametrize("sharded", [True, False])
def test_step_of_a_received_state_is_known_before_its_commit_is_reported(sharded):
    place = Place(1, 2, 1, 2, 0, 1)
    world = World(4, place, Address("h", 1), holders=1, commit=Commit(3, 5), reason="h:1#2 joined")
    rt, state = entering(world)
    state.is_sharded.return_value = sharded
    reported, wanted = [], state.report_step
    state.transfer.side_effect = lambda *_, **__: wanted.reset_mock()
    rt.commits.adopt.side_effect = lambda *_, **__: reported.append(wanted.call_count)
    with (
        patch.object(training_checkpoints, "entered"),
        patch.object(training_checkpoints, "bring_shards", autospec=True) as bring,
        patch.object(following_group, "follow"),
        patch.object(process_sets, "start_copy", autospec=True, return_value=list),
        patch.object(run_loop, "has_custom_sync", return_value=False),
        patch.object(run_loop, "runs_script_in_reset", return_value=False),
    ):
        bring.side_effect = lambda *_: (wanted.reset_mock(), (1, False, None))[1]
        run_loop._enter_world(rt, state, "", first=False)
    assert reported == [1]


@pytest.mark.parametrize(("rank", "compared"), [(0, True), (2, True), (1, False), (3, False)])
def test_digest_of_a_copy_is_reported_only_when_sent_by_rank_0(rank, compared):
    place, commit = Place(rank, 4, rank // 2, 2, rank % 2, 2), Commit(3, 5)
    copies = [[0, 2], [1, 3]]
    world = World(4, place, Address("h", 1), 2, commit, "h:1#2 joined", copies=copies)
    rt, state = entering(world)
    state.transfer.return_value = 100
    enter(rt, state)
    assert rt.commits.report_digest.called == compared


@pytest.mark.parametrize(
    ("rank", "holders", "script", "order"),
    [
        (
            0,
            2,
            False,
            ["begin_reconcile", "start", "on_reset", "transfer", "copy_sets", "decode", "settle"],
        ),
        (
            2,
            2,
            False,
            ["begin_reconcile", "start", "on_reset", "transfer", "copy_sets", "decode", "settle"],
        ),
        (0, 2, True, ["start", "copy_sets", "settle", "on_reset", "transfer", "decode"]),
        (0, 0, False, ["start", "on_reset", "transfer", "copy_sets", "decode", "settle"]),
    ],
)
def test_exchange_without_a_predecessor_starts_before_a_rank_waits(rank, holders, script, order):
    place, commit = Place(rank, 3, rank, 3, 0, 1), Commit(3, 5) if holders else None
    rt, state = entering(World(4, place, Address("h", 1), holders, commit, "h:1#2 joined"))
    calls = state.mock_calls

    def copy_sets() -> list[str]:
        calls.append(call.copy_sets())
        return []

    def transfer(*_: Any, before_decoding: Callable[[], object], **options: Any) -> int:
        before_decoding()
        calls.append(call.decode())
        return 0

    state.transfer.side_effect = transfer
    with (
        patch.object(training_checkpoints, "entered"),
        patch.object(training_checkpoints, "resume"),
        patch.object(following_group, "follow"),
        patch.object(following_group, "settle", lambda *_: calls.append(call.settle())),
        patch.object(process_sets, "start_copy", autospec=True) as start,
        patch.object(run_loop, "has_custom_sync", return_value=False),
        patch.object(run_loop, "runs_script_in_reset", return_value=script),
    ):
        start.side_effect = lambda *_: (calls.append(call.start()), copy_sets)[1]
        run_loop._enter_world(rt, state, "", first=False)
    assert [name for name, *_ in calls if name in {*order, "begin_reconcile"}] == order


@pytest.mark.parametrize("holders", [0, 1])
def test_values_that_receivers_hold_are_omitted_only_if_ranks_share_a_commit(holders):
    commit = Commit(3, 5) if holders else None
    world = World(4, Place(0, 2, 0, 2, 0, 1), Address("h", 1), holders, commit, reason="first")
    rt, state = create_autospec(WorkerRuntime, instance=True), create_autospec(State, instance=True)
    rt.guard.return_value = contextlib.nullcontext()
    run_loop._copy_state(rt, state, world)
    assert state.transfer.call_args.kwargs["keeps"] is (holders > 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_states_of_a_second_training_that_differ_are_refused_on_every_rank(rank):
    rt = create_autospec(WorkerRuntime, instance=True)
    rt.place = Place(rank, 3, rank, 3, 0, 1)
    run_loop._same_layout(rt, ["w 3"] * 3)
    rt.group.assert_not_called()
    with raises(StateMismatch):
        run_loop._same_layout(rt, ["w 3", "w 3", "w 4"])
    rt.group.return_value.barrier.assert_called_once_with()  # all have found it before one raises
