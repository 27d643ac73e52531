"""States over real Gloo, between processes: a newcomer gets the state, and a broken transfer leaves the commit."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import CollectiveFailed
from elastic.protocol.messages import Address
from elastic.runtime import lifecycle
from elastic.state import ElasticSampler, TorchState
from elastic.state.snapshots.snapshot import same_bits
from harness.ports import free_port
from harness.ranks import forks

LIMIT_S = 60.0


def _main(body: Callable[..., Any], rank: int, size: int, port: int, answer: Any) -> None:
    torch.set_num_threads(1)
    try:
        lifecycle.init_static(rank, size, Address("127.0.0.1", port))
        answer.send((True, body(rank)))
    except BaseException:
        answer.send((False, traceback.format_exc()))


def together(body: Callable[..., Any], size: int) -> list[Any]:
    """Runs ``body(rank)`` in a world of processes; their answers, by rank."""
    context = forks()
    port = free_port()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(body, rank, size, port, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = []
    deadline = time.monotonic() + LIMIT_S
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                pytest.fail(f"rank {rank} gave no answer within {LIMIT_S:g} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((True, None))  # it ended on purpose
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join(5)
    for good, answer in answers:
        assert good, answer
    return [answer for _, answer in answers]


def _state(rank: int, width: int = 600) -> TorchState:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), weight_decay=0.1)
    sampler = ElasticSampler(range(100))
    return TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=rank)


def _step(state: TorchState, seed: int) -> None:
    torch.manual_seed(seed)
    state.optimizer.zero_grad()
    state.model(torch.randn(4, state.model[0].in_features)).square().sum().backward()
    state.optimizer.step()


def _sync_train_digest(rank: int) -> tuple[int, int, int, int, float]:
    state = _state(rank)
    if rank == 0:
        _step(state, seed=3)
        state.sampler.record_batch(0, 10)
        state.epoch = 7
    state.sync()
    _step(state, seed=5)
    state.commit()
    lr = state.optimizer.param_groups[0]["lr"]
    return state.digest(), state.digest_buffers(), state.epoch, state.sampler.processed_num, lr


def test_sync_makes_all_workers_equal_and_training_keeps_them_equal():
    answers = together(_sync_train_digest, 3)
    assert len(set(answers)) == 1
    digest, buffers, epoch, processed, lr = answers[0]
    assert digest and buffers
    assert (epoch, processed, lr) == (7, 30, 0.1)


def _some_ranks(rank: int) -> int:
    """As the run loop does it: rank 0 sends to rank 2 alone, rank 1 has the state already."""
    rt = lifecycle.current()
    state = _state(0 if rank == 1 else rank)
    if rank != 1:
        group = rt.group("state", torch.device("cpu"), (0, 2))
        with rt.guard("copy of the state"):
            state.transfer(group, root=0)
        state.save()
    return state.digest()


def test_state_is_transferred_among_some_of_the_ranks():
    assert len(set(together(_some_ranks, 3))) == 1


def _lose_root(rank: int) -> bool | None:
    rt = lifecycle.current()
    state = _state(rank, width=3000)
    state.commit()
    expected = [each.detach().clone() for each in state.model.parameters()]
    group = rt.group("state", torch.device("cpu"))
    if rank == 0:
        # The header and a first piece go out, then the root is gone.
        calls, real = [], group.broadcast

        def broadcast(tensor: torch.Tensor, root: int) -> Any:
            calls.append(tensor)
            if len(calls) > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            work = real(tensor, root)
            work.wait()
            return work

        group.broadcast = broadcast  # type: ignore[method-assign]
        state.transfer(group, root=0)
    try:
        state.transfer(group, root=0)
    except CollectiveFailed:
        state.restore()
        live = state.model.parameters()
        return all(same_bits(one, two) for one, two in zip(live, expected, strict=True))
    return False


def test_receiver_restores_its_commit_when_the_sending_root_dies():
    assert together(_lose_root, 2)[1] is True
