"""A persistent worker answers one call after another, and no call can end it."""

from __future__ import annotations

import json
import pickle
import socket
import sys
import threading
import traceback

import pytest

from elastic.errors import CollectiveFailed
from elastic.ray import call_results
from elastic.ray.persistent_worker import LENGTH, serve

called_off = threading.Event()


def until_called_off() -> bool:
    """A call that ends only when it is cancelled."""
    return called_off.wait(30)


def refuse() -> None:
    raise AssertionError("this was to stay closed")


class World:
    """Records its messages."""

    rank = 3

    def __init__(self) -> None:
        self.told: list[str] = []
        called_off.clear()

    def call_off(self) -> None:
        self.told.append("call off")
        called_off.set()

    def regroup(self) -> None:
        self.told.append("regroup")

    def settle(self) -> None:
        """Nothing is reported."""


def failure_of(error: BaseException, rank: int) -> call_results.CallFailure:
    failure = call_results.failure_in(call_results.failed(error, rank))
    assert failure is not None
    return failure


class Caller:
    """The other end of the socket."""

    hello: dict
    thread: threading.Thread

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.settimeout(30)

    def say(self, word: bytes) -> None:
        self._end.sendall(LENGTH.pack(len(word)) + word)

    def hear(self) -> bytes:
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return self._exactly(size)

    def line(self) -> bytes:
        return self._end.makefile("rb", buffering=0).readline()

    def ask(self, word: bytes) -> bytes:
        self.say(word)
        return self.hear()

    def value(self, kind: str, *parts: object) -> object:
        return call_results.opened(self.ask(call_results.call(kind, *parts)))

    def close(self) -> None:
        self._end.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._end.recv(min(size - len(data), 1 << 20))
            assert more, "the worker closed the connection"
            data += more
        return data


@pytest.fixture
def world():
    return World()


@pytest.fixture
def worker(world):
    """A worker in a thread, which ends when the socket does."""
    mine, its = socket.socketpair()
    thread = threading.Thread(target=serve, args=(its, world, {"slot": 1}))
    thread.start()
    caller = Caller(mine)
    caller.hello = json.loads(caller.line())
    caller.thread = thread
    yield caller
    caller.close()
    thread.join(30)
    its.close()
    assert not thread.is_alive()


class Counter:
    def __init__(self, start: int, by: int = 1) -> None:
        self.value, self.by = start, by

    def step(self) -> int:
        self.value += self.by
        return self.value


class Odd(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one, two) -> None:
        super().__init__("odd")


def test_the_first_frame_identifies_the_worker(worker):
    assert worker.hello == {"rank": 3, "slot": 1}


def test_functions_are_called_with_arguments(worker):
    assert worker.value(call_results.RUN, lambda a, b=0: (a, b), (1,), {"b": 2}) == (1, 2)
    assert worker.value(call_results.RUN, len, ("abc",), {}) == 3


def test_the_instance_is_kept_between_calls(worker):
    assert worker.value(call_results.EXECUTE, lambda: "nothing yet") == "nothing yet"
    assert worker.value(call_results.MAKE, Counter, (5,), {"by": 2}) is None
    assert worker.value(call_results.EXECUTE, lambda counter: counter.step()) == 7
    assert worker.value(call_results.EXECUTE, lambda counter: counter.step()) == 9
    worker.value(call_results.MAKE, Counter, (0,), {})
    assert worker.value(call_results.EXECUTE, Counter.step) == 1


def test_an_exception_is_returned_with_the_workers_traceback(worker):
    def fails():
        raise KeyError("no such sample")

    with pytest.raises(KeyError) as caught:
        worker.value(call_results.RUN, fails, (), {})
    shown = "".join(traceback.format_exception(caught.value))
    assert "rank 3:" in shown and "in fails" in shown
    assert worker.value(call_results.RUN, int, (), {}) == 0


@pytest.mark.parametrize("code", [0, 7, "a word"])
def test_sys_exit_is_an_error_of_the_call_and_ends_no_process(worker, code):
    with pytest.raises(call_results.RaisedOnWorker, match=r"rank 3 ended with SystemExit"):
        worker.value(call_results.RUN, sys.exit, (code,), {})
    assert worker.value(call_results.RUN, int, (), {}) == 0


def test_values_that_cannot_be_pickled_are_an_error_of_the_call(worker):
    with pytest.raises(TypeError, match="pickle"):
        worker.value(call_results.RUN, threading.Lock, (), {})

    def odd():
        raise Odd(1, 2)

    with pytest.raises(call_results.RaisedOnWorker, match="Odd: odd"):
        worker.value(call_results.RUN, odd, (), {})
    assert worker.value(call_results.RUN, int, (), {}) == 0


def test_a_message_that_can_not_be_unpickled_is_an_error_of_the_call(worker):
    with pytest.raises(pickle.UnpicklingError):
        call_results.opened(worker.ask(b"no pickle"))
    with pytest.raises(ValueError, match="same release"):
        worker.value("sing")
    assert worker.value(call_results.RUN, int, (), {}) == 0


def test_answers_arrive_in_order_and_large_ones_are_complete(worker):
    for size in (0, 1, 5_000_000):
        worker.say(call_results.call(call_results.RUN, bytes, (size,), {}))
    assert [len(call_results.opened(worker.hear())) for _ in range(3)] == [0, 1, 5_000_000]


def test_regroup_takes_effect_during_a_call_and_is_answered_afterwards(worker, world):
    worker.say(call_results.call(call_results.RUN, until_called_off, (), {}))
    worker.say(call_results.REGROUP)
    assert call_results.opened(worker.hear()) is True
    assert call_results.opened(worker.hear()) is None
    assert world.told == ["call off", "regroup"]


def test_worker_ends_on_request(worker, world):
    worker.say(call_results.END)
    worker.thread.join(30)
    assert not worker.thread.is_alive()


def test_worker_ends_when_its_caller_disconnects(worker, world):
    worker.close()
    worker.thread.join(30)
    assert not worker.thread.is_alive()
    assert world.told == ["call off"]  # calls that block in a collective must return


def test_failure_is_read_without_unpickling_the_value():
    class Closed:
        def __reduce__(self):
            return refuse, ()

    assert call_results.failure_in(call_results.answered(Closed())) is None
    failure = failure_of(ValueError("x"), 5)
    assert (failure.rank, failure.summary) == (5, "ValueError: x")


def test_cause_is_not_a_rank_that_only_lost_a_peer():
    lost, raised, later = (
        failure_of(error, rank)
        for rank, error in enumerate([CollectiveFailed("cut"), KeyError("k"), KeyError("l")])
    )
    assert call_results.cause([lost, later, raised]) is raised
    assert call_results.cause([lost]) is lost
