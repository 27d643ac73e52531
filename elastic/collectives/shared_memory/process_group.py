"""Collectives in shared memory between ranks of one host: implements the interface with a native group.

See native/group.h.

A group's native thread makes progress while the script computes; a waiting thread helps. A tensor in this process's
arena is reduced in place. Any other tensor is copied through staging, and its result is copied back, or to its
destination if that is in the arena. The result is bitwise equal in all cases.
"""

from __future__ import annotations

import collections
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from elastic.collectives import message_types
from elastic.collectives.dtypes_and_ops import DTYPES, check
from elastic.collectives.interface import Op, Work
from elastic.collectives.message_types import TensorType
from elastic.collectives.shared_memory import point_to_point
from elastic.collectives.shared_memory.native_library import Library, NativeOptions
from elastic.collectives.shared_memory.point_to_point import SharedMessage
from elastic.errors import CollectiveFailed, Differing, TensorMismatch

# maximum time in seconds of one native call, after which Python can handle signals
_SLICE_S = 0.05
_CLOSE_S = 0.1  # maximum time in seconds that closing waits for other ranks to stop writing

_FAILED, _NOT_YET, _DONE = -1, 0, 1

_LEFT, _ENDED, _LATE, _OTHER, _MISMATCH = 1, 2, 3, 4, 5
_REASONS = {
    _LEFT: "rank {rank} of this group left or aborted it",
    _ENDED: "the process of rank {rank} of this group exited",
    _LATE: "rank {rank} of this group did not arrive within {timeout_s:g} s",
    _OTHER: "rank {rank} of this group called a different collective, or passed a different size",
}
_CHILD = "process groups can't be used in a forked child: run collectives in the worker itself"

# Tensors to which a rank of a closed group may still write. They are never freed.
_lost: list[object] = []


class Memory(NamedTuple):
    """Memory that the ranks of a group share, as mapped in this process. All lists are indexed by rank."""

    control: int  # address of the control block, elastic_control_bytes(size) long
    arenas: Sequence[tuple[int, int]]  # address and size in bytes of each arena
    staging: Sequence[int]  # offset of each staging area in its arena
    pidfds: Sequence[int]  # pidfd of each rank; -1 means this process
    # Function to call once, when this process has stopped using the memory. Its argument is False if another rank may
    # still write to the staging area.
    release: Callable[[bool], None]


class SharedCollectives:
    """Connected group of one generation for CPU tensors in shared memory. Any thread may call `abort` at any time.

    Args:
        timeout_s: limit of each wait for another rank, in seconds.
        oversubscribed: whether this host has more ranks than cores.
        ranks: names of the ranks in errors, if the group is a part of another group. None means their numbers in the
            group.
        key: name of the group, equal on all ranks and unique in their world.
    """

    scales_inside = True

    def __init__(
        self,
        library: Library,
        rank: int,
        size: int,
        memory: Memory,
        timeout_s: float,
        *,
        oversubscribed: bool,
        ranks: Sequence[int] | None = None,
        key: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self._ranks = range(size) if ranks is None else ranks
        self._key = key
        self.timeout_s = timeout_s
        self._native = _Native(library, rank, size, memory, timeout_s, oversubscribed)
        self._library = library
        self._submitting = threading.Lock()
        # Memory that native code may still access, by ticket. Referenced here, because the caller may drop its handle
        # and tensors.
        self._held: collections.deque[tuple[int, object]] = collections.deque()
        # messages whose memory native code may still access
        self._messages: set[SharedMessage] = set()
        # length of `_messages` at which completed messages without other references are removed
        self._many = 64
        self._failed: str | None = None
        self._aborted = False

    # ---- collectives -----------------------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        check(tensor, op)
        return self._reduce(tensor, tensor.data_ptr(), tensor, op, scale, divisor)

    def allreduce_into(
        self,
        result: torch.Tensor,
        tensor: torch.Tensor,
        op: Op,
        scale: float = 1.0,
        divisor: int = 1,
    ) -> Work:
        """Reduce ``tensor`` into ``result`` without modifying ``tensor``. See `ReducesInto.allreduce_into`."""
        check(tensor, op)
        return self._reduce((result, tensor), result.data_ptr(), tensor, op, scale, divisor)

    def _reduce(
        self, held: object, result: int, tensor: torch.Tensor, op: Op, scale: float, divisor: int
    ) -> Work:
        return self._submit(
            self._library.elastic_allreduce,
            held,
            tensor.data_ptr(),
            result,
            tensor.numel(),
            DTYPES[tensor.dtype],
            int(op),
            scale,
            divisor,
        )

    def reduce_shares(
        self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1
    ) -> Work:
        """Run the first half of an allreduce.

        Afterwards the `share` of this rank contains the result, and the rest is unchanged.

        Raises:
            ValueError: ``tensor`` is not in the arena.
        """
        check(tensor, op)
        return self._submit(
            self._library.elastic_reduce_shares,
            tensor,
            tensor.data_ptr(),
            tensor.numel(),
            DTYPES[tensor.dtype],
            int(op),
            scale,
            divisor,
        )

    def reduce_tree(
        self,
        places: torch.Tensor,
        elements: int,
        program: Sequence[tuple[int, int] | None],
        divisor: int = 1,
    ) -> Work:
        check(places, Op.SUM)
        words = [-1 if each is None else each[0] << 16 | each[1] for each in program]
        return self._submit(
            self._library.elastic_reduce_tree,
            places,
            places.data_ptr(),
            elements,
            places.stride(0) * places.element_size(),
            DTYPES[places.dtype],
            (ctypes.c_int32 * len(words))(*words),
            len(words),
            1.0,
            divisor,
        )

    def spread_shares(self, tensor: torch.Tensor) -> Work:
        """Run the second half of an allreduce.

        It copies every rank's share to all ranks. ``tensor`` must be in the arena on every rank.
        """
        return self._submit(
            self._library.elastic_spread_shares,
            tensor,
            tensor.data_ptr(),
            tensor.numel(),
            DTYPES[tensor.dtype],
        )

    def share(self, elements: int, dtype: torch.dtype, rank: int | None = None) -> slice:
        """Return the elements of a flat tensor that a rank (default: this rank) owns after `reduce_shares`."""
        begin, end = ctypes.c_uint64(), ctypes.c_uint64()
        owner = self.rank if rank is None else rank
        self._library.elastic_share(
            elements, DTYPES[dtype], self.size, owner, ctypes.byref(begin), ctypes.byref(end)
        )
        return slice(begin.value, end.value)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        call = self._library.elastic_broadcast
        return self._submit(call, tensor, tensor.data_ptr(), tensor.nbytes, root)

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        pointers = (ctypes.c_void_p * self.size)(*[each.data_ptr() for each in outputs])
        held = (*outputs, tensor)
        return self._submit(
            self._library.elastic_allgather, held, pointers, tensor.data_ptr(), tensor.nbytes
        )

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        return self._submit(
            self._library.elastic_alltoall,
            (output, tensor),
            output.data_ptr(),
            tensor.data_ptr(),
            (ctypes.c_uint64 * self.size)(*[rows * row for rows in received]),
            (ctypes.c_uint64 * self.size)(*[rows * row for rows in sent]),
        )

    def barrier(self) -> Work:
        return self._submit(self._library.elastic_barrier, None)

    def _submit(self, call: Callable[..., int], held: object, *arguments: object) -> SharedWork:
        self._raise_if_failed()
        with self._submitting:
            self._let_go()
            # Registered before the collective begins: if a signal handler raises in between, the ticket remains
            # unknown. See `_let_go`.
            holding = self._held
            holding.append((0, held))
            ticket = call(self._native.handle, *arguments)
            if ticket == 0:
                holding.pop()
            else:
                holding[-1] = ticket, held
        if ticket == 0:
            raise ValueError(
                "the tensor is not in the shared memory of this process: create it with arena.zeros()"
            )
        return SharedWork(self, ticket)

    def _let_go(self) -> None:
        held = self._held
        while held:
            ticket = held[0][0] or next((later for later, _ in held if later), 0)
            if ticket == 0 or self._native.done(ticket) != _DONE:
                break
            held.popleft()

    def _release_finished(self) -> None:
        with self._submitting:
            self._let_go()

    # ---- messages, in a group used only for messages -----------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> SharedMessage:
        """Send a contiguous tensor.

        Messages to one rank with one tag arrive in order. The work is complete once the message is received.
        """
        return self._post(self._library.elastic_send, tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> SharedMessage:
        """Receive into a contiguous tensor.

        With ``source`` None, the message may come from any rank. See `SharedMessage.source`.
        """
        return self._post(self._library.elastic_receive, tensor, source, tag)

    def monitored_barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Block until rank 0 has received a message from each other rank. See `Messenger.monitored_barrier`."""
        point_to_point.monitored_barrier(self, timeout_s, wait_all_ranks)

    def _post(
        self, call: Callable[..., int], tensor: torch.Tensor, peer: int | None, tag: int
    ) -> SharedMessage:
        self._raise_if_failed()
        message = SharedMessage(self, tensor, peer)
        with self._submitting:
            if len(self._messages) >= self._many:
                self._messages = {each for each in tuple(self._messages) if not each.done()}
                self._many = 64 + 2 * len(self._messages)
            self._messages.add(message)
            begun = call(
                self._native.handle,
                tensor.data_ptr(),
                tensor.nbytes,
                message_types.code_of(tensor.dtype),
                -1 if peer is None else peer,
                tag,
                message.address,
            )
        if not begun:
            self._messages.discard(message)
            raise ValueError(
                f"rank {self.rank} of this group can't exchange messages with rank {peer}: pass another rank of the"
                " group"
            )
        return message

    def wait_for(self, message: SharedMessage, timeout_s: float) -> int:
        return self._native.wait_message(message.address, timeout_s)

    def release_memory_of(self, message: SharedMessage) -> None:
        self._messages.discard(message)

    def named(self, rank: int) -> int:
        """Return the name by which errors refer to this rank."""
        return self._ranks[rank]

    # ---- abort and close -------------------------------------------------------------------------------------------

    def is_over_without(self, message: SharedMessage) -> bool:
        """Return whether the group has failed and no rank can still write to this message's tensor."""
        if not self._native.elsewhere and self._library.elastic_status(self._native.handle) == 0:
            return False
        # The message may have arrived before the failure.
        return self.wait_for(message, 0.0) == _DONE or self.drain(0.0)

    def fail(self, why: str, rank: int | None = None) -> CollectiveFailed:
        """Fail the group with this reason, and return the error to raise.

        Args:
            why: the reason.
            rank: the rank that the reason concerns, or None.
        """
        self._failed = self._failed or why
        self._native.abort()
        return CollectiveFailed(self._failed, aborted=self._aborted, rank=rank)

    def abort(self) -> None:
        self._aborted = True
        self._failed = self._failed or "aborted"
        self._native.abort()

    def drain(self, timeout_s: float) -> bool:
        """Wait, after `abort`, until no collective of this group writes to any tensor.

        If the result is False, do not use the tensors in flight again.
        """
        drained = self._native.drain(timeout_s)
        if drained:
            # Create a new list, because another thread may still use the old one.
            self._held = collections.deque()
            self._messages = set()
        return drained

    def close(self) -> None:
        """End the group's thread and unmap the shared memory, within milliseconds.

        If another rank may still write, or a call has not returned, the memory is unmapped once all works are freed.
        """
        self.abort()
        self._native.close()
        if (self._held or self._messages) and not self.drain(0.0):
            _lost.append((self._held, self._messages))

    def close_in_forked_child(self) -> None:
        """Close in a forked child, which has neither the thread nor the memory of the other ranks."""
        self._failed = _CHILD
        self._native.close_in_forked_child()

    def failure(self) -> CollectiveFailed | TensorMismatch:
        """Return the error of a failed collective: this rank's own reason, or the group's."""
        if self._native.elsewhere:
            return CollectiveFailed(_CHILD)
        status = self._library.elastic_status(self._native.handle)
        reason, rank = status >> 8, status & 0xFF
        if self._failed is not None and (reason, rank) in ((0, 0), (1, self.rank)):
            return CollectiveFailed(self._failed, aborted=self._aborted)
        if reason == _MISMATCH:
            words = (ctypes.c_uint64 * 5)()
            self._library.elastic_mismatch(self._native.handle, words)
            source, *types = words
            sent, received = TensorType(*types[:2]), TensorType(*types[2:])
            return message_types.mismatch(int(source), sent, rank, received)
        named = self._ranks[rank]
        message = _REASONS[reason].format(rank=named, timeout_s=self.timeout_s)
        ended = named if reason == _ENDED else None
        return CollectiveFailed(
            message,
            aborted=reason == _LEFT,
            ended=ended,
            differs=Differing(self._key, self.rank, self.size) if reason == _OTHER else None,
            late=reason == _LATE,
            rank=named,
        )

    def _raise_if_failed(self) -> None:
        if self._native.elsewhere:
            raise CollectiveFailed(_CHILD)
        if self._failed is not None:
            raise CollectiveFailed(self._failed, aborted=self._aborted)


class SharedWork:
    """A collective in flight in one group."""

    def __init__(self, group: SharedCollectives, ticket: int) -> None:
        self._group = group
        self._native = group._native
        self._ticket = ticket

    def done(self) -> bool:
        verdict = self._native.done(self._ticket)
        # A failed collective counts as complete once no rank can still write to its tensor.
        return verdict == _DONE or (verdict == _FAILED and self._group.drain(0.0))

    def within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            verdict = self._native.wait(self._ticket, max(0.0, min(_SLICE_S, left_s)))
            if verdict != _NOT_YET:
                break
            if left_s <= 0:
                return False
        if verdict == _FAILED:
            raise self._group.failure()
        self._group._release_finished()
        return True

    def missing(self) -> list[int]:
        """Return the ranks that have not called this collective, or an earlier incomplete one."""
        found = self._native.missing()
        return [rank for rank in range(self._group.size) if found >> rank & 1]

    def wait(self) -> None:
        # The group's own deadline ends this loop.
        while not self.within(_SLICE_S):
            self._group._raise_if_failed()


class _Native:
    """Handle of a native group, freed together with the last reference from the group or its works.

    The shared memory is released earlier, when the group is closed, because a work or an exception may be kept for a
    long time.
    """

    def __init__(
        self,
        library: Library,
        rank: int,
        size: int,
        memory: Memory,
        timeout_s: float,
        oversubscribed: bool,
    ) -> None:
        self._library = library
        self._release: Callable[[bool], None] | None = memory.release
        self._closed = self._forgotten = False
        self._pid = os.getpid()
        # Copied by elastic_open, which borrows the descriptors.
        addresses = (ctypes.c_void_p * size)(*[address for address, _ in memory.arenas])
        lengths = (ctypes.c_uint64 * size)(*[length for _, length in memory.arenas])
        staging = (ctypes.c_uint64 * size)(*memory.staging)
        pidfds = (ctypes.c_int32 * size)(*memory.pidfds)
        options = NativeOptions(
            rank=rank,
            size=size,
            control=memory.control,
            arenas=ctypes.addressof(addresses),
            arena_bytes=ctypes.addressof(lengths),
            staging=ctypes.addressof(staging),
            pidfds=ctypes.addressof(pidfds),
            oversubscribed=oversubscribed,
            timeout_s=timeout_s,
        )
        self.handle = library.elastic_open(ctypes.byref(options))
        if not self.handle:
            memory.release(True)
            raise CollectiveFailed(
                "no thread could be started for collectives in shared memory: raise the limit on threads (ulimit -u,"
                " or pids.max of the container), or start the job with ELASTIC_NATIVE=0"
            )

    @property
    def elsewhere(self) -> bool:
        """Return whether this process is a forked child, in which threads, locks and shared memory are unavailable."""
        return self._forgotten or os.getpid() != self._pid

    def done(self, ticket: int) -> int:
        if self.elsewhere:
            return _FAILED
        return int(self._library.elastic_done(self.handle, ticket))

    def wait(self, ticket: int, timeout_s: float) -> int:
        if self.elsewhere:
            return _FAILED
        return int(self._library.elastic_wait(self.handle, ticket, timeout_s))

    def wait_message(self, state: int, timeout_s: float) -> int:
        if self.elsewhere:
            return _FAILED
        return int(self._library.elastic_wait_message(self.handle, state, timeout_s))

    def missing(self) -> int:
        return 0 if self.elsewhere else int(self._library.elastic_missing(self.handle))

    def abort(self) -> None:
        if not self.elsewhere:
            self._library.elastic_abort(self.handle)

    def drain(self, timeout_s: float) -> bool:
        return self.elsewhere or bool(self._library.elastic_drain(self.handle, timeout_s))

    def close(self) -> None:
        if not self._closed and not self.elsewhere:
            self._closed = True
            self._library.elastic_close(self.handle)
            # Wait briefly, because a rank that is processing a chunk finishes it soon.
            if self.drain(_CLOSE_S) and self._library.elastic_detach(self.handle, _CLOSE_S):
                self._let_go(True)

    def close_in_forked_child(self) -> None:
        self._forgotten = True

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:
        # Skipped at interpreter exit, when modules may already be destroyed. The system frees the resources.
        if at_the_end() or not getattr(self, "handle", None) or self.elsewhere:
            return
        self.close()
        drained = self.drain(0.0)
        self._library.elastic_free(self.handle)
        self._let_go(drained)

    def _let_go(self, drained: bool) -> None:
        release, self._release = self._release, None
        if release is not None:
            release(drained)
