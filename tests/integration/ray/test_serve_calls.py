"""Persistent workers with a real world: calls that train, that fail on some ranks, that shut down and restart."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.ray import call_results
from elastic.ray.persistent_worker import LENGTH

pytestmark = pytest.mark.forked
SERVE = ["python", "-m", "elastic.ray.persistent_worker"]


def failure_in(answer: bytes) -> call_results.CallFailure:
    failure = call_results.failure_in(answer)
    assert failure is not None, "the call has succeeded"
    return failure


class Workers:
    """Their connections, by rank. Stands where the agent's actor stands."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(60)
        self._listener.bind(self.path)
        self._listener.listen()
        self._ends: dict[int, socket.socket] = {}

    def accept(self, count: int) -> None:
        for _ in range(count):
            end, _ = self._listener.accept()
            end.settimeout(100)
            hello = json.loads(end.makefile("rb", buffering=0).readline())
            self._ends[hello["rank"]] = end

    @property
    def ranks(self) -> list[int]:
        return sorted(self._ends)

    def say(self, word: bytes, ranks: list[int] | None = None) -> None:
        for rank in self.ranks if ranks is None else ranks:
            self._ends[rank].sendall(LENGTH.pack(len(word)) + word)

    def hear(self, rank: int) -> bytes:
        return self._frame(self._ends[rank])

    def run(self, function, *args, **kwargs) -> list:
        self.say(call_results.call(call_results.RUN, function, args, kwargs))
        return [call_results.opened(self.hear(rank)) for rank in self.ranks]

    def close(self) -> None:
        for end in [self._listener, *self._ends.values()]:
            end.close()

    @staticmethod
    def _frame(end: socket.socket) -> bytes:
        def exactly(size: int) -> bytes:
            data = b""
            while len(data) < size:
                more = end.recv(size - len(data))
                assert more, "the worker is gone"
                data += more
            return data

        return exactly(*LENGTH.unpack(exactly(LENGTH.size)))


@pytest.fixture
def workers(tmp_path_factory) -> Iterator[Workers]:
    found = Workers(tmp_path_factory.mktemp("calls") / "calls")
    yield found
    found.close()


def summed(value: float) -> float:
    import torch

    import horovod.torch as hvd

    hvd.init()
    return hvd.allreduce(torch.tensor([value * (hvd.rank() + 1)]), op=hvd.Sum).item()


def train(shut_down: bool = False) -> tuple[int, int, float]:
    import horovod.torch as hvd

    total = summed(1.0)
    place = hvd.rank(), hvd.size()
    if shut_down:
        hvd.shutdown()
    return *place, total


def raise_on(rank: int) -> float:
    """The others wait in a collective for the one that raises."""
    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == rank:
        raise KeyError(f"rank {rank} has lost its data")
    return summed(1.0)


def test_persistent_workers_keep_one_world_and_their_processes_for_many_calls(job, workers):
    running = job("-np 3", SERVE, env={"ELASTIC_CALLS": workers.path})
    workers.accept(3)
    assert workers.ranks == [0, 1, 2]

    # init() in every call, and after shutdown() in the one before.
    assert workers.run(train) == [(rank, 3, 6.0) for rank in range(3)]
    assert workers.run(train, shut_down=True) == [(rank, 3, 6.0) for rank in range(3)]
    assert workers.run(train) == [(rank, 3, 6.0) for rank in range(3)]
    pids = workers.run(lambda: __import__("os").getpid())

    # All raise: the world is as it was.
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda: 1 / 0)
    for rank in (1, 2):
        workers.hear(rank)
    assert workers.run(summed, 2.0) == [12.0] * 3

    # One raises, the others wait for it, until they are told that nobody will come; then all meet anew.
    for failing in (1, 0):
        workers.say(call_results.call(call_results.RUN, raise_on, (failing,), {}))
        first = failure_in(workers.hear(failing))
        assert first.summary == f"KeyError: 'rank {failing} has lost its data'"
        workers.say(call_results.REGROUP)
        others = [rank for rank in range(3) if rank != failing]
        failures = [failure_in(workers.hear(rank)) for rank in others]
        assert all(failure.secondary for failure in failures), failures
        assert call_results.cause([*failures, first]) is first
        assert [call_results.opened(workers.hear(rank)) for rank in range(3)] == [None] * 3
        assert workers.run(summed, 1.0) == [6.0] * 3

    # One leaves the world, and the others lose it in a collective; then they meet anew, that one too.
    workers.say(call_results.call(call_results.RUN, leave_on, (2,), {}))
    answers = [workers.hear(rank) for rank in range(3)]
    assert call_results.opened(answers[2]) == "left"
    assert all(failure_in(answer).secondary for answer in answers[:2])
    regrouped(workers)
    assert workers.run(train) == [(rank, 3, 6.0) for rank in range(3)]

    # One leaves, and waits in init() for the others, which come only when they regroup: it may hear that word last.
    for told_first in ([0, 1, 2], [0, 2]):
        workers.say(call_results.call(call_results.RUN, leave_on, (1, True), {}))
        answers = [workers.hear(rank) for rank in (0, 2)]
        assert all(failure_in(answer).secondary for answer in answers)
        workers.say(call_results.REGROUP, told_first)
        assert failure_in(workers.hear(1)).secondary
        assert [call_results.opened(workers.hear(rank)) for rank in (0, 2)] == [None] * 2
        if told_first == [0, 2]:
            workers.say(call_results.REGROUP, [1])
        assert call_results.opened(workers.hear(1)) is None
        assert workers.run(train) == [(rank, 3, 6.0) for rank in range(3)]

    assert workers.run(lambda: __import__("os").getpid()) == pids  # nobody was started anew
    workers.close()
    running.succeed()
    assert len(running.worlds()) == 7  # the first, after shutdown(), and after each regrouping


def regrouped(workers: Workers) -> None:
    workers.say(call_results.REGROUP)
    assert [call_results.opened(workers.hear(rank)) for rank in workers.ranks] == [None] * 3


def leave_on(rank: int, come_back: bool = False) -> object:
    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == rank:
        hvd.shutdown()
        if not come_back:
            return "left"
        hvd.init()
    return summed(1.0)


def test_worker_that_dies_ends_the_job_and_is_named(job, workers):
    running = job("-np 2", SERVE, env={"ELASTIC_CALLS": workers.path})
    workers.accept(2)
    workers.say(call_results.call(call_results.RUN, eval, ("__import__('os')._exit(9)",), {}), [1])
    assert running.wait() == 9
    assert "rank 1" in running.output
    assert "exit code 9" in running.output
