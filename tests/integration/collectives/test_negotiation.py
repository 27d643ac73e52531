"""Named collectives under faults: a rank is killed, a rank is missing, threads submit concurrently."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from elastic.api.ops import (
    Sum,
    allgather,
    allreduce,
    allreduce_async,
    barrier,
    broadcast,
    poll,
    synchronize,
)
from elastic.errors import CollectiveFailed, DuplicateName, TensorMismatch
from elastic.negotiation import rank0_transport
from elastic.negotiation.fusion import FusionLimits
from elastic.negotiation.messages import ALL, Request, RequestList, ResponseList
from elastic.negotiation.rank0_transport import LocalController
from elastic.negotiation.transport import ControllerClient, rules_of
from elastic.protocol.calls import Called
from elastic.rendezvous import worker_settings
from elastic.rendezvous.store import listen
from elastic.rpc import server as rpc_server
from elastic.runtime import lifecycle
from harness.golden import recorded
from harness.ranks import Died, Ranks, store_to_be

SOON_S = 5.0  # far below every timeout of a collective


@pytest.fixture
def ranks(request: Any) -> Iterator[Ranks]:
    ranks = Ranks(3)
    ranks.run(start, store_to_be(), getattr(request, "param", {}))
    yield ranks
    ranks.close()


def start(rank: int, size: int, address: Any, environ: dict[str, str]) -> None:
    lifecycle.init_static(rank, size, address, environ)


def warm(rank: int, size: int) -> None:
    for _ in range(2):
        assert allreduce(torch.ones(2), name="warm", op=Sum).tolist() == [3.0, 3.0]


def from_many_threads(rank: int, size: int) -> int:
    wrong: list[object] = []

    def work(thread: int) -> None:
        for turn in range(20):
            name = f"thread {thread}"
            value = float(thread + turn)
            if turn % 2:
                got = allreduce(torch.full((3,), value), name=name, op=Sum)
            else:
                handle = allreduce_async(torch.full((3,), value), name=name, op=Sum)
                deadline = time.monotonic() + 30
                while not poll(handle):
                    assert time.monotonic() < deadline
                got = synchronize(handle)
            if got.tolist() != [3 * value] * 3:
                wrong.append((thread, turn, got))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads if rank else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    return len(threads)


def wait_for_all(rank: int, size: int) -> str:
    """Return the end of a wait for rank 2, which is being killed; and then of everything else."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    pending = allreduce_async(torch.ones(2), name="pending", op=Sum)
    began = time.monotonic()
    found = []
    for call in (
        lambda: allreduce(torch.ones(2), name="warm"),
        lambda: synchronize(pending),
        barrier,
    ):
        try:
            call()
        except CollectiveFailed as error:
            found.append(str(error))
    assert time.monotonic() - began < SOON_S
    assert len(found) == 3
    return found[0]


def test_killed_rank_ends_the_wait_of_all_ranks_when_threads_submit_concurrently(ranks):
    ranks.run(warm)
    assert ranks.run(from_many_threads) == [4, 4, 4]
    assert ranks.run(interrupted) == [[6.0, 6.0]] * 3
    ranks.start(wait_for_all)
    assert isinstance(ranks.result(2), Died)
    for rank in (0, 1):
        found = ranks.result(rank)
        assert isinstance(found, str), found


def wait_for_rank_0(rank: int, size: int) -> float:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(CollectiveFailed):
        allreduce(torch.ones(2), name="after")
    return time.monotonic() - began


def test_death_of_the_coordinator_ends_the_wait_of_all_ranks(ranks):
    ranks.run(warm)
    ranks.start(wait_for_rank_0)
    assert isinstance(ranks.result(0), Died)
    assert max(ranks.result(1), ranks.result(2)) < SOON_S


def interrupted(rank: int, size: int) -> list[float]:
    """A wait that a signal handler cuts short is only put off: handle and name stay taken."""
    if rank < 2:
        handle = allreduce_async(torch.full((2,), rank + 1.0), name="cut short", op=Sum)
    if rank == 1:

        def alarm(*_: Any) -> None:
            raise KeyError("alarm")

        before = signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyError):
            synchronize(handle)
        signal.signal(signal.SIGALRM, before)
        with pytest.raises(DuplicateName):
            allreduce_async(torch.ones(2), name="cut short", op=Sum)
    if rank == 2:
        time.sleep(0.3)
        handle = allreduce_async(torch.full((2,), 3.0), name="cut short", op=Sum)
    value: list[float] = synchronize(handle).tolist()
    return value


def left_without_a_word(rank: int, size: int) -> int | None:
    """Before any collective: the others hear of it nevertheless."""
    if rank == 1:
        lifecycle.shutdown()
        return -1
    with pytest.raises(CollectiveFailed) as caught:
        allreduce(torch.ones(2), name="without rank 1")
    return caught.value.rank


def test_a_rank_that_shuts_down_before_its_first_collective_is_not_waited_for(ranks):
    found = ranks.run(left_without_a_word)
    assert found[0] == 1
    assert found[1] == -1
    assert found[2] in (
        0,
        1,
        None,
    )  # None: rank 0 has given the world up by then, and its connection


class Recorder(LocalController):
    """Rank 0's end without decisions: what it receives is recorded."""

    def __init__(self, size: int) -> None:
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        listener = listen("127.0.0.1")
        env = dataclasses.replace(worker_settings.read({}), secret=b"secret")
        super().__init__(
            rules_of(listener, FusionLimits()),
            listener,
            size,
            7,
            env,
            died=lambda why: self.heard.put((0, why)),
        )

    def _offered(self, rank: int, offer: RequestList) -> None:
        self.heard.put((rank, offer))

    def _left(self, rank: int) -> None:
        self.heard.put((rank, "left"))

    def _look(self) -> None: ...


def started_server(size: int) -> tuple[LocalController, Any, queue.SimpleQueue[Any]]:
    """Rank 0's end, its settings, and what it receives."""
    made = Recorder(size)
    return made, made.rules, made.heard


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 0's end, with ranks 1 and 2 connected; their offers and losses are recorded."""
    monkeypatch.setattr(rank0_transport, "BEAT_S", 0.1)
    monkeypatch.setattr(rpc_server, "count_limit", lambda *limits: 16)
    made, rules, heard = started_server(size=3)
    peers = {rank: ControllerClient(rules, rank, 7, b"secret", silence_s=2.0) for rank in (1, 2)}
    for rank, peer in peers.items():
        peer.send(RequestList(ALL, 0, b"\x01"))
        assert heard.get(timeout=5)[0] == rank
    yield SimpleNamespace(hub=made, peers=peers, heard=heard, rules=rules)
    for peer in peers.values():
        peer.close()
    made.close()


def test_a_rank_that_does_not_read_delays_no_other(hub):
    large = ResponseList((1,), 0, bytes(8 << 20))
    hub.hub.publish(large)
    hub.hub.publish(ResponseList((2,), 0, b"small"))
    assert [decision.known for decision in hub.peers[2].receive()] == [b"small"]
    assert [decision.known for decision in hub.peers[1].receive()] == [large.known]  # it had time


def test_unauthenticated_peers_are_ignored_without_affecting_other_peers(hub):
    for secret in (b"wrong", b""):
        stranger = ControllerClient(hub.rules, 1, 7, secret)
        stranger.send(RequestList(ALL, 0, b"\xff"))
        with pytest.raises(CollectiveFailed):
            stranger.receive()
        stranger.close()
    address = (hub.rules.host, hub.rules.port)
    crowd = [socket.create_connection(address, 5) for _ in range(150)]
    crowd[0].sendall(b"\xff" * 64)  # no frame of any length that is allowed
    hub.peers[1].send(RequestList(ALL, 0, b"\x02"))
    assert hub.heard.get(timeout=5) == (1, RequestList(ALL, 0, b"\x02"))
    assert len(hub.hub._server.pending.all()) <= 16
    for each in crowd:
        each.close()


@pytest.mark.parametrize("towards", ["rank 0", "rank 2"])
def test_a_modified_byte_ends_the_connection_and_is_not_accepted(towards):
    """A man in the middle: unchanged data is accepted, changed data is not."""
    made, rules, heard = started_server(size=2)
    middle = socket.create_server(("127.0.0.1", 0))
    through = msgspec.structs.replace(rules, port=middle.getsockname()[1])
    peer = ControllerClient(through, 1, 7, b"secret")
    near, _ = middle.accept()
    far = socket.create_connection((rules.host, rules.port), 5)

    def passed_on(source: socket.socket, sink: socket.socket, spoilt: bool) -> None:
        data = bytearray(source.recv(65536))
        data[-20] ^= spoilt
        sink.sendall(data)

    passed_on(near, far, False)  # hello
    peer.send(RequestList(ALL, 0, b"\x01"))
    passed_on(near, far, False)
    assert heard.get(timeout=5) == (1, RequestList(ALL, 0, b"\x01"))
    made.publish(ResponseList(ALL, 0, b"first"))
    passed_on(far, near, False)
    assert peer.receive()[0].known == b"first"
    if towards == "rank 0":
        peer.send(RequestList(ALL, 0, b"\x02"))
        passed_on(near, far, True)
        assert heard.get(timeout=5) == (1, "left")
    else:
        made.publish(ResponseList(ALL, 0, b"second"))
        passed_on(far, near, True)
        with pytest.raises(CollectiveFailed, match="authentication"):
            peer.receive()
    for each in (peer, made, near, far, middle):
        each.close()


def test_a_lost_rank_is_named(hub):
    hub.peers[2].close()
    assert hub.heard.get(timeout=5) == (2, "left")
    hub.hub.publish(ResponseList(ALL, 0, b"on"))
    assert hub.peers[1].receive()[0].known == b"on"


def test_rank_waits_while_rank_0_sends_heartbeats(hub):
    began = time.monotonic()
    later = threading.Timer(3.0, hub.hub.publish, [ResponseList(ALL, 0, b"late")])
    later.start()
    assert hub.peers[1].receive()[0].known == b"late"
    assert time.monotonic() - began > 2.5
    later.join()


def test_silent_connection_is_abandoned():
    listener = listen("127.0.0.1")
    rules = rules_of(listener, FusionLimits())
    peer = ControllerClient(rules, 1, 7, b"secret", silence_s=0.3)
    with pytest.raises(CollectiveFailed) as caught:
        peer.receive()
    assert caught.value.rank == 0
    peer.close()
    listener.close()


def alone() -> LocalController:
    """Rank 0's line to itself, in a world of one."""
    listener = listen("127.0.0.1")
    env = worker_settings.read({"HOROVOD_STALL_CHECK_DISABLE": "1"})
    return LocalController(
        rules_of(listener, FusionLimits()), listener, 1, 7, env, died=pytest.fail
    )


def test_rank_0_receives_decisions_from_before_the_end():
    """The others were notified, and may have ended the world: a mismatch is an error of all."""
    line = alone()
    line.send(RequestList(ALL, 0, requests=(Request("barrier", "barrier.b"),)))
    line.abort()
    (decision,) = line.receive()
    assert [response.request.name for response in decision.responses] == ["barrier.b"]
    for _ in range(2):
        with pytest.raises(CollectiveFailed, match="aborted"):
            line.receive()
    line.close()


def test_rank_0_receives_the_last_decision_when_the_world_ends_concurrently():
    line = alone()
    with line._deciding:  # as when the others have been told, and rank 0 has not yet
        line.abort()
        heard: queue.SimpleQueue[list[ResponseList]] = queue.SimpleQueue()
        rank_0 = threading.Thread(target=lambda: heard.put(line.receive()))
        rank_0.start()
        line.own.put(ResponseList(ALL, 0, b"told"))
    assert [decision.known for decision in heard.get(timeout=5)] == [b"told"]
    rank_0.join()
    line.close()


def call_another(rank: int, size: int) -> tuple[Called, ...]:
    with pytest.raises(TensorMismatch) as caught:
        if rank == 0:
            allreduce(torch.ones(3), name="x", op=Sum)
        elif rank == 1:
            broadcast(torch.ones(3, 2, dtype=torch.int64), 0, name="x")
        else:
            allgather(torch.ones(4), name="y")
    alike = allreduce(torch.ones(1), name="again", op=Sum)
    assert alike.item() == size, "nothing of it is left"
    return caught.value.calls


def test_ranks_that_call_different_collectives_immediately_get_the_calls_of_each(ranks):
    found = ranks.run(call_another)
    assert found[0] == found[1] == found[2]
    assert [(each.rank, each.name, each.tensors) for each in found[0]] == [
        (0, "allreduce.x", "float32 [3]"),
        (1, "broadcast.x", "int64 [3, 2]"),
        (2, "allgather.y", "float32 [4]"),
    ]
    first = call_another.__code__.co_firstlineno
    file = Path(__file__).name
    assert [each.line for each in found[0]] == [f"{file}:{first + n}" for n in (3, 5, 7)]


STALLS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}


def stall(rank: int, size: int) -> tuple[int | None, str]:
    if rank == 1:
        return None, ""  # it submits nothing, and doesn't even know of the others
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        handles = [allreduce_async(torch.ones(1), name=name, op=Sum) for name in ("w", "bias")]
        with pytest.raises(CollectiveFailed) as caught:
            for handle in handles:
                synchronize(handle)
    return caught.value.rank, said.getvalue()


@pytest.mark.parametrize("ranks", [STALLS], indirect=True)
def test_stall_is_reported_with_tensors_and_missing_ranks_and_ended(ranks):
    found = ranks.run(stall)
    assert found[0][0] == found[2][0] == 1
    recorded("log", found[0][1])


@pytest.mark.parametrize(
    "ranks", [{"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}], indirect=True, ids=["2 s"]
)
def test_stopped_rank_0_is_abandoned_by_the_other_ranks(ranks):
    ranks.run(beat_fast)
    ranks.run(warm)
    ranks.start(wait_in_vain)
    assert ranks.result(0) is None
    os.kill(ranks.pid(0), signal.SIGSTOP)
    for rank in (1, 2):
        assert ranks.result(rank) == 0
    os.kill(ranks.pid(0), signal.SIGKILL)


def beat_fast(rank: int, size: int) -> None:
    rank0_transport.BEAT_S, rank0_transport.SILENT_BEATS = 0.2, 0


def wait_in_vain(rank: int, size: int) -> int | None:
    if rank == 0:
        return None
    with pytest.raises(CollectiveFailed) as caught:
        allreduce(torch.ones(1), name="without rank 0", op=Sum)
    return caught.value.rank
