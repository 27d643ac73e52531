"""Point-to-point messages between ranks of one host, in shared memory. See native/lanes.h."""

from __future__ import annotations

import ctypes
import time
from typing import Protocol

import torch

from elastic.errors import CollectiveFailed, TensorMismatch

UNDER_WAY = -1  # value of kUnderWay in native/lanes.h
_SLICE_S = 0.05  # maximum time in seconds of one native call, after which Python can handle signals
# Tags of monitored_barrier. They differ from torch's tags, which have 32 bits.
_HERE, _GO_ON = 1 << 40, 1 << 41
# Extra seconds that other ranks wait after the timeout of monitored_barrier, until rank 0 has named the missing rank.
# If a rank that has arrived left earlier, its message would be withdrawn, and rank 0 would report it as missing.
_VERDICT_S = 1.0


class MessageGroup(Protocol):
    """Part of the interface of `SharedCollectives` that point-to-point messages use."""

    rank: int
    size: int
    timeout_s: float

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> SharedMessage: ...

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> SharedMessage: ...

    def wait_for(self, message: SharedMessage, timeout_s: float) -> int: ...

    def release_memory_of(self, message: SharedMessage) -> None: ...

    def is_over_without(self, message: SharedMessage) -> bool: ...

    def named(self, rank: int) -> int: ...

    def fail(self, why: str, rank: int | None = None) -> CollectiveFailed: ...

    def failure(self) -> CollectiveFailed | TensorMismatch: ...


class SharedMessage:
    """A point-to-point message in flight.

    Args:
        peer: the other rank, or None for any rank.
    """

    __slots__ = ("_group", "_peer", "address", "held", "state")

    def __init__(self, group: MessageGroup, held: torch.Tensor, peer: int | None) -> None:
        self._group = group
        self._peer = peer
        self.held = held  # memory that native code reads or writes
        self.state = ctypes.c_int32(UNDER_WAY)
        self.address = ctypes.addressof(self.state)

    @property
    def source(self) -> int:
        """Return the rank of the sender, once the message is received."""
        return self.state.value

    def done(self) -> bool:
        return self.state.value != UNDER_WAY or self._group.is_over_without(self)

    def within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.state.value == UNDER_WAY:
            left_s = deadline - time.monotonic()
            verdict = self._group.wait_for(self, max(0.0, min(_SLICE_S, left_s)))
            if verdict < 0:
                raise self._group.failure()
            if verdict == 0 and left_s <= 0:
                return False
        self._group.release_memory_of(self)
        return True

    def missing(self) -> list[int]:
        """Return the ranks that this message waits for. For a receive from any rank, these are all other ranks."""
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        return others if self._peer is None else [self._peer]

    def wait(self) -> None:
        limit_s = self._group.timeout_s
        if self.within(limit_s):
            return
        named = None if self._peer is None else self._group.named(self._peer)
        ranks = "no rank" if named is None else f"rank {named}"
        verb = "sent a message with this tag" if named is None else "did not respond"
        raise self._group.fail(
            f"{ranks} of this group {verb} within {limit_s:g} s: check that each recv has a send"
            " with the same tag",
            named,
        )


def monitored_barrier(group: MessageGroup, timeout_s: float, wait_all_ranks: bool) -> None:
    """Block until rank 0 has received a message from each other rank. See `Messenger.monitored_barrier`."""
    nothing, until = torch.empty(0, dtype=torch.uint8, device="cpu"), time.monotonic() + timeout_s
    if group.rank != 0:
        group.send(nothing, 0, _HERE)
        why = f"it did not answer within {timeout_s + _VERDICT_S:g} s"
        try:
            if group.receive(nothing, 0, _GO_ON).within(timeout_s + _VERDICT_S):
                return
        except CollectiveFailed as error:
            why = str(error)
        raise group.fail(
            f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv"
            f" from rank 0: {why}"
        )
    others = range(1, group.size)
    arrivals = [group.receive(nothing, rank, _HERE) for rank in others]
    late: list[int] = []
    for rank, arrival in zip(others, arrivals, strict=True):
        if not arrival.within(max(0.0, until - time.monotonic())):
            late.append(rank)
            if not wait_all_ranks:
                break
    if late:
        ranks = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, late))}"
        raise group.fail(
            f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {timeout_s * 1e3:.0f} ms"
        )
    for pending in [group.send(nothing, rank, _GO_ON) for rank in others]:
        pending.wait()  # The message is withdrawn if this rank leaves before the message was received.
