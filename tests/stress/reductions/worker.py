"""A process that joins one group after another by order, and reports the outcome of each. See `command`."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from elastic.collectives.groups.group_factory import ConnectingGroup, Store, StoreListener, listen
from elastic.collectives.interface import Collectives, Op, Work
from elastic.collectives.shared_memory import arena, peer_memory
from elastic.collectives.shared_memory.process_group import SharedCollectives
from elastic.errors import CollectiveFailed
from elastic.protocol.messages import Address
from stress.reductions.numbers import Numbers, same
from stress.reductions.plan import Call, Kind, RankReport, ReductionFault, Round

TIMEOUT_S = 20.0
_PR_SET_PDEATHSIG = 1
_MARK = 77  # value that survivors write into their tensors after the drain


@dataclass(frozen=True)
class Task:
    number: int
    round: Round
    rank: int
    store: Address


@dataclass(frozen=True)
class Cut:
    """Abort the group of this round."""

    number: int


@dataclass(frozen=True)
class Formed:
    """The group is formed, and the fault may be injected."""


@dataclass(frozen=True)
class Rested:
    """Nothing is in progress. ``listening``: address of the next store. ``held``: resources of the worker."""

    listening: Address
    held: dict[str, int]


@dataclass(frozen=True)
class CallOutcome:
    told: RankReport
    failed_at: float  # time on the clock that all processes share; 0: no failure
    began_at: float  # begin of the wait that failed
    cut_at: float  # abort by this process; 0: none
    rested: Rested


class ReductionWorker:
    """Worker of a forked process: `run` executes tasks until it receives None."""

    def __init__(self, pipe: Connection, numbers: Numbers) -> None:
        self._pipe = pipe
        self._numbers = numbers
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._connecting: tuple[int, ConnectingGroup] | None = None
        self._cut_at = 0.0
        self._listener: StoreListener | None = None

    def run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        torch.set_num_threads(1)
        threading.Thread(target=self._listen, daemon=True).start()
        self._pipe.send(self._rest())
        while (task := self._tasks.get()) is not None:
            self._pipe.send(self._work(task))
        os._exit(0)

    def _listen(self) -> None:
        while True:
            try:
                order = self._pipe.recv()
            except EOFError:
                os._exit(1)
            if isinstance(order, Cut):
                if self._connecting is not None and self._connecting[0] == order.number:
                    self._cut_at = time.monotonic()
                    self._connecting[1].abort()
            else:
                self._tasks.put(order)

    def _rest(self) -> Rested:
        if self._listener is None:
            self._listener = listen("127.0.0.1")
        gc.collect()
        peer_memory.sweep()
        mine = arena.mine()
        assert mine is not None
        held = {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mappings": Path("/proc/self/maps").read_text().count("memfd:elastic"),
            "bytes lent": mine.lent,
        }
        return Rested(self._listener.address, held)

    def _work(self, task: Task) -> CallOutcome:
        attempt = _Attempt(self._numbers, task.round, task.rank)
        listener = None
        if task.rank == 0:
            listener, self._listener = self._listener, None
        store = Store(task.store, listener, TIMEOUT_S, generation=task.number)
        store.open()
        connecting = ConnectingGroup(
            store,
            purpose="reductions",
            rank=task.rank,
            size=len(task.round.ranks),
            device_type="cpu",
            bind_host="127.0.0.1",
            timeout_s=TIMEOUT_S,
        )
        self._cut_at = 0.0
        self._connecting = task.number, connecting
        group = connecting.connect()
        assert isinstance(group, SharedCollectives)
        self._pipe.send(Formed())
        told = attempt.run(group)
        group.abort()
        group.close()
        store.close()
        self._connecting = None
        del group, connecting
        return CallOutcome(told, attempt.failed_at, attempt.began_at, self._cut_at, self._rest())


class _Attempt:
    """A round on one rank. Expected results are computed before it begins, so that errors are noticed immediately."""

    def __init__(self, numbers: Numbers, told: Round, rank: int) -> None:
        self._round = told
        self._rank = rank
        self._inputs = [numbers.put_in(call, rank) for call in told.calls]
        self._expected = [numbers.come_out(call, rank) for call in told.calls]
        self.failed_at = self.began_at = 0.0

    def run(self, group: Collectives) -> RankReport:
        right = 0
        wrong: list[str] = []
        error, ended = "", None
        tensors: list[torch.Tensor] = []
        try:
            while not error:
                tensors = []
                works = []
                for call, put_in in zip(self._round.calls, self._inputs, strict=True):
                    self.began_at = time.monotonic()
                    work, made = self._start(group, call, put_in)
                    works.append(work)
                    tensors.append(made)
                for number, work in enumerate(works):
                    self.began_at = time.monotonic()
                    work.wait()
                    if same(tensors[number], self._expected[number]):
                        right += 1
                    else:
                        wrong.append(
                            f"rank {self._rank}: wrong numbers: {self._round.calls[number]}"
                        )
                if self._round.fault is ReductionFault.NONE:
                    self.began_at = time.monotonic()
                    group.barrier().wait()
                    return RankReport(right, tuple(wrong))
        except CollectiveFailed as failed:
            self.failed_at = time.monotonic()
            error, ended = str(failed), failed.ended
        group.abort()
        undrained = not group.drain(0.0)
        written = not group.drain(TIMEOUT_S)  # the frozen rank is killed meanwhile
        for tensor in tensors:
            tensor.fill_(_MARK)
        time.sleep(0.001)
        written |= any(bool((tensor != _MARK).any()) for tensor in tensors)
        return RankReport(right, tuple(wrong), error, ended, undrained=undrained, written=written)

    def _start(
        self, group: Collectives, call: Call, put_in: torch.Tensor
    ) -> tuple[Work, torch.Tensor]:
        """Start a call; return its work and the tensor of its result."""

        def placed(elements: int) -> torch.Tensor:
            if call.inside[self._rank]:
                return arena.zeros(elements, put_in.dtype)
            return torch.empty(elements, dtype=put_in.dtype)

        size = len(call.inside)
        if call.kind is Kind.GATHER:
            result = placed(call.elements * size)
            return group.allgather(list(torch.tensor_split(result, size)), put_in), result
        if call.kind is Kind.SCATTER:
            result = placed(call.elements * size)
            parts = [call.elements] * size
            return group.alltoall(result, put_in, parts, parts), result
        result = placed(call.elements).copy_(put_in)
        if call.kind is Kind.BROADCAST:
            return group.broadcast(result, call.root), result
        return group.allreduce(result, Op[call.op], call.scale, call.divisor), result
