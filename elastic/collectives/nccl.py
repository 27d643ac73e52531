"""Collectives over NCCL: implements the interface with ``ProcessGroupNCCL`` and nonblocking communicators.

The training thread never waits inside NCCL or CUDA for a peer. It polls until a collective has completed, and only then
makes its stream wait for the collective. An abort therefore needs no cooperation of the waiting thread. On a side
stream, such as those that FSDP2 uses for communication, the training thread does not wait: the stream waits
(`NcclWork.follow`), and `settle` polls at the next commit.

A group ends in two phases, each in its own thread. `abort` revokes the communicator: its kernels end and no memory is
freed, because kernels of peers may still read this rank's memory. `close` frees it, after the next world is formed. A
worker reports that it is ready for that world only after its own kernels have ended. A communicator that is not
connected yet, or that this version of NCCL cannot revoke, is aborted and freed immediately.

After an abort the stream continues, and the interrupted kernels leave invalid data: no result and no gradient of an
aborted step may be used. Unless a side stream follows a collective, no operation that reads a result is queued before
the collective has succeeded. After a side stream has followed one, parameters can contain such data, until the newest
commit is restored. Commits never contain such data, because they call `settle` first.

This module requires TORCH_NCCL_ASYNC_ERROR_HANDLING=0. Otherwise, torch's watchdog ends the process when a
communicator is aborted. This and other variables that torch and NCCL read are set at startup:
`elastic.rendezvous.nccl_settings`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from elastic.collectives import dtypes_and_ops, nccl_library, own_gpu, threads_at_exit
from elastic.collectives.interface import Counts, Op, Work
from elastic.collectives.torch_group import REDUCE, as_bytes
from elastic.errors import CollectiveFailed, Invalid
from elastic.rendezvous import worker_settings
from elastic.rendezvous.store import Call, Store, listen

# Time in seconds to poll without sleeping. The collectives of a step usually end within it.
_SPIN_S = 0.001
_STEP_S = 0.0001
_WARM_UP_S = 30.0


class NcclCollectives:
    """NCCL group of one generation, for the tensors of one CUDA device.

    Call `connect` first. Any thread may call `abort`.
    """

    scales_inside = False

    def __init__(
        self, rank: int, size: int, timeout_s: float, collective_timeout_s: float | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s  # timeout for connecting, in seconds
        self._collective_timeout_s = (
            timeout_s if collective_timeout_s is None else collective_timeout_s
        )
        self._launched_timeout_s = worker_settings.launched_timeout_s(self._collective_timeout_s)
        self._device = own_gpu.device()
        self._backend: Any = None
        self._failed: str | None = None
        self._aborted = False  # whether `_failed` is due to an abort
        # the script's error that caused `_failed`, or None
        self._invalid: Invalid | None = None
        self._lock = threading.Lock()
        self._building: threading.Thread | None = None
        self._stopping: threading.Thread | None = None
        self._freeing: threading.Thread | None = None
        self._freed = threading.Event()
        self._communicator = 0  # NCCL's pointer to the communicator, while connected and revocable
        self._revoking = threading.Lock()
        self._revoked = False
        # held during a launch, when NCCL must not be queried for errors
        self._launching = threading.Lock()
        # set once the communicator is created or its creation is abandoned
        self._built = threading.Event()
        self._swapping = Call()
        self._under_way: collections.deque[NcclWork] = collections.deque()
        self._launched = 0
        # CUDA events for reuse, which avoids an allocation per step
        self._spare: list[torch.cuda.Event] = []
        # The first collective that the GPU had not reached at the last check, and the start of the wait for it.
        self._looked_at: tuple[int, float] | None = None
        self._took_s = 0.0
        # stream on which an event is recorded after coalesced calls
        self._behind: torch.cuda.Stream | None = None
        # The last collective that a stream follows, until `settle`.
        self._followed: NcclWork | None = None
        # The oldest collective in flight while streams follow one, and the time at which it became the oldest.
        self._oldest: tuple[NcclWork, float] | None = None

    # ---- connection ------------------------------------------------------------------------------------------------

    def connect(self, store: Store, purpose: str, bind_host: str) -> None:
        """Block until the communicator's creation has begun on all ranks.

        Raises:
            CollectiveFailed: a rank is late or lost, or `abort` was called.
            Invalid: two ranks use the same GPU. Raised on every rank.
        """
        self._building = threads_at_exit.begin(
            "elastic-nccl", self._build, store, purpose, bind_host
        )
        longest_s = self._collective_timeout_s + self._timeout_s + 1.0
        if not self._built.wait(longest_s):
            self._fail(f"NCCL did not connect {self.size} ranks within {longest_s:g} s")
        if self._invalid is not None:
            raise self._invalid
        self._raise_if_failed()

    def _build(self, store: Store, purpose: str, bind_host: str) -> None:
        try:
            self._make(store, purpose, bind_host)
        except Exception as error:  # any exception must be passed to the waiting thread
            self._invalid = error if isinstance(error, Invalid) else None
            self._fail(f"{error}")
        finally:
            self._built.set()
        if self._failed is not None and self._backend is not None:
            # The abort is repeated, because torch may have had no communicator yet at the previous abort.
            self._stop()

    def _make(self, store: Store, purpose: str, bind_host: str) -> None:
        """Create the communicator. This is a separate function, so that all temporaries are freed when it returns."""
        torch.cuda.set_device(self._device)
        nccl: Any = c10d.ProcessGroupNCCL  # This class exists only in torch's CUDA builds.
        options = _options(self._collective_timeout_s)
        ids = self._open_id_store(store, purpose, bind_host)
        self._raise_if_failed()
        backend = nccl(ids, self.rank, self.size, options)
        with self._lock:
            self._backend = backend
        self._raise_if_failed()
        backend.eager_connect_single_device(self._device)
        first = torch.zeros(1, dtype=torch.float32, device=self._device)
        # Once the communicator is connected, kernels of peers may read this rank's memory. It must therefore be
        # revocable, so that an abort does not free that memory.
        with self._revoking:
            # torch waits here until the communicator is connected. An earlier query of the pointer would wait while
            # it holds the GIL.
            work = NcclWork(self, backend.allreduce([first]), None)
            self._under_way.append(work)
            if self._freeing is None:
                self._communicator = _revocable(backend)
        self._raise_if_failed()
        # Connections that a communicator makes at its first collective are made here, not in the training thread.
        work.wait()

    def _open_id_store(self, store: Store, purpose: str, bind_host: str) -> c10d.Store:
        """Return the store for NCCL's unique ID. NCCL's threads use it, so it cannot be implemented in Python."""
        listener = listen(bind_host) if self.rank == 0 else None
        port = b"" if listener is None else str(listener.address.port).encode()
        host = b"" if listener is None else bind_host.encode()
        key = f"{purpose}/nccl/{self.size}"
        # The wait for a late rank has the timeout of a collective.
        answers = store.exchange(
            key,
            self.rank,
            self.size,
            b" ".join([host, port, own_gpu.uuid(self._device).encode()]),
            self._collective_timeout_s,
            self._swapping,
        )
        served_at, gpus = zip(*(each.decode().rsplit(" ", 1) for each in answers), strict=True)
        if not worker_settings.gpus_are_shared():
            own_gpu.refuse_shared(gpus, torch.cuda.device_count())
        server_host, _, server_port = served_at[0].rpartition(" ")
        ids = c10d.TCPStore(
            server_host,
            int(server_port),
            is_master=listener is not None,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.socket.detach(),
        )
        return c10d.PrefixStore(key, ids)

    # ---- collectives -----------------------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        dtypes_and_ops.check(tensor, op)
        options = c10d.AllreduceOptions()
        options.reduceOp = REDUCE[op]  # type: ignore[assignment]
        carried, then = dtypes_and_ops.carried(tensor, op, scale, divisor)
        return self.submit("allreduce", [carried], options, then=then)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self.submit("broadcast", [as_bytes(tensor)], options)

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self.submit("allgather", [[as_bytes(each) for each in outputs]], [as_bytes(tensor)])

    def allgather_into(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor]) -> Work:
        calls = [
            ("_allgather_base", as_bytes(output), as_bytes(tensor))
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._submit_together(calls)

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        tensors: list[torch.Tensor],
        scale: float = 1.0,
        divisor: int = 1,
    ) -> Work:
        calls: list[tuple[Any, ...]] = []
        thens: list[Callable[[], object]] = []
        for output, tensor in zip(outputs, tensors, strict=True):
            options = c10d.ReduceScatterOptions()
            result = output.detach()
            thens += self._scaled(options, result, scale, divisor)
            calls.append(("_reduce_scatter_base", result, tensor.detach(), options))
        return self._submit_together(calls, thens)

    def allreduce_scaled(
        self, tensors: list[torch.Tensor], scale: float = 1.0, divisor: int = 1
    ) -> Work:
        calls: list[tuple[Any, ...]] = []
        thens: list[Callable[[], object]] = []
        for tensor in tensors:
            options = c10d.AllreduceOptions()
            result = tensor.detach()
            thens += self._scaled(options, result, scale, divisor)
            calls.append(("allreduce", [result], options))
        return self._submit_together(calls, thens)

    def _scaled(
        self, options: Any, result: torch.Tensor, scale: float, divisor: int
    ) -> list[Callable[[], object]]:
        """Configure the sum that NCCL computes. Return the functions that complete the result afterwards."""
        if scale == 1.0 and divisor == self.size:
            options.reduceOp = c10d.ReduceOp.AVG
        elif result.dtype is torch.bfloat16 and scale != divisor:
            # A premultiplied sum could be 0, because torch passes the factor as float32 and NCCL reads a bfloat16
            # (pytorch/pytorch#190745).
            return [functools.partial(dtypes_and_ops.rescale_, result, scale, divisor)]
        elif scale != divisor:
            premultiplied: Any = c10d._make_nccl_premul_sum
            options.reduceOp = premultiplied(scale / divisor)
        return []

    def _submit_together(
        self, calls: list[tuple[Any, ...]], thens: list[Callable[[], object]] | None = None
    ) -> NcclWork:
        """Launch several calls of torch's backend as one kernel."""
        then = None if not thens else functools.partial(_call_all, thens)
        if len(calls) == 1:
            return self.submit(*calls[0], then=then)

        def together(backend: Any) -> Any:
            backend._start_coalescing()
            try:
                for name, *arguments in calls:
                    getattr(backend, name)(*arguments)
            finally:
                # Ends the NCCL group call even after an error; otherwise NCCL would wait for more calls.
                work = backend._end_coalescing()
            return work

        work = self._launch(together, then)
        if self._behind is None:
            self._behind = torch.cuda.Stream(self._device)
        work.mark_end(self._behind)
        return work

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        return self.submit(
            "alltoall_base",
            as_bytes(output),
            as_bytes(tensor),
            [rows * row for rows in received],
            [rows * row for rows in sent],
        )

    def barrier(self) -> Work:
        return self.allreduce(torch.zeros(1, dtype=torch.float32, device=self._device), Op.SUM)

    def submit(
        self, name: str, *arguments: Any, then: Callable[[], object] | None = None
    ) -> NcclWork:
        return self._launch(lambda backend: getattr(backend, name)(*arguments), then)

    def _launch(self, call: Callable[[Any], Any], then: Callable[[], object] | None) -> NcclWork:
        backend = self._backend
        self._raise_if_failed()
        if torch.cuda.is_current_stream_capturing():
            raise Invalid(
                "a collective can't be captured in a CUDA graph: capture only forward and backward, or train"
                " without CUDA graphs"
            )
        arrived = self._spare.pop() if self._spare else torch.cuda.Event()
        try:
            arrived.record(torch.cuda.current_stream(self._device))
            with self._launching:
                work = NcclWork(self, call(backend), then)
        except RuntimeError as error:
            self._fail(str(error))
            raise CollectiveFailed(str(error), aborted=self._aborted) from None
        work.is_launched(self._launched + 1, arrived)
        while self._under_way and self._under_way[0].done():
            self._spare += self._under_way.popleft().event_back()
        self._under_way.append(work)
        self._launched += 1
        return work

    @property
    def unsettled(self) -> bool:
        return self._followed is not None

    def settle(self) -> None:
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.wait_on_host()  # sufficient, because NCCL runs collectives in order

    def followed_since(self) -> float | None:
        if self._followed is None:
            return None
        self._heed_error()
        if self._failed is not None:
            return None
        try:
            under_way = (work for work in list(self._under_way) if not work.finished())
            oldest = next(under_way, None)
        except RuntimeError:  # After an error, the device fails every query.
            return None
        if oldest is None:
            self._oldest = None
            return None
        now = time.monotonic()
        if self._oldest is None or self._oldest[0] is not oldest:
            self._oldest = oldest, now
        # The time is not measured from the launch, because the host may be a whole step ahead of the GPU.
        elif now - self._oldest[1] > oldest.limit_s:
            self._fail(f"a collective did not complete within {oldest.limit_s:.0f} s")
        return oldest.launched_at

    def counts(self) -> Counts:
        launched, now = self._launched, time.monotonic()
        works = list(self._under_way)
        if works:
            launched = max(launched, works[-1].number)
        done = arrived = launched
        failed = False
        try:
            waiting = next((work for work in works if not work.finished()), None)
            late = next((work for work in works if not work.has_arrived()), None)
        except RuntimeError:  # After an error, the device fails every query.
            waiting, late, failed = works[0], works[0], True
        if waiting is not None:
            done = waiting.number - 1
        if late is not None:
            arrived = max(done, late.number - 1)
        if self._looked_at is not None and self._looked_at[0] <= arrived:
            self._took_s = max(self._took_s, self._looked_at[1])
        self._looked_at = None if late is None else (late.number, now - late.launched_at)
        return Counts(launched, arrived, done, self._took_s, failed)

    # ---- abort and close -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._fail("aborted", aborted=True)

    def drain(self, timeout_s: float) -> bool:
        """Wait, after `abort`, for the kernels of all collectives.

        Return whether all have ended and no thread is about to start one.
        """
        deadline = time.monotonic() + timeout_s
        ending = [thread for thread in (self._stopping, self._building) if thread is not None]
        for thread in ending:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self.ended(max(0.0, deadline - time.monotonic())):
            self._free()  # Kernels that outlive a revoke may end on an abort.
            return False
        return not any(thread.is_alive() for thread in ending)

    def ended(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        behind = self._behind_all()
        while any(not work.finished() for work in list(self._under_way)) or not (
            behind is None or behind.query()
        ):
            if time.monotonic() > deadline:
                return False
            time.sleep(_STEP_S)
        return True

    def _behind_all(self) -> torch.cuda.Event | None:
        """Return a CUDA event that is recorded after all of the group's kernels.

        Once NCCL has detected an error, torch reports every collective as completed, whether its kernel has ended or
        not.
        """
        if not self._under_way:
            return None
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._under_way[-1].order()
            behind = torch.cuda.Event()
            behind.record()
        return behind

    def close(self, timeout_s: float | None = None) -> None:
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        self.abort()
        with contextlib.suppress(RuntimeError):  # After an error, the device fails every query.
            self.drain(max(0.0, deadline - time.monotonic()))
        self._free()
        self.freed(max(0.0, deadline - time.monotonic()))
        self._under_way.clear()

    def freed(self, timeout_s: float) -> bool:
        return self._freed.wait(timeout_s)

    def close_in_forked_child(self) -> None:
        # CUDA does not support forks, so the child cannot use the group. The sockets are opened close-on-exec.
        self._failed = (
            "process groups can't be used in a forked child: run collectives in the worker itself"
        )

    def _fail(self, reason: str, *, aborted: bool = False) -> None:
        if self._failed is None:
            self._aborted = aborted
            self._failed = reason
        with self._lock:
            if self._backend is not None and self._stopping is None:
                self._stopping = threads_at_exit.begin("elastic-nccl-stop", self._stop)
        self._swapping.abort()
        self._built.set()

    def _stop(self) -> None:
        """Stop the group's kernels on the GPU. Keep its memory allocated if this version of NCCL supports that."""
        with self._revoking:
            if self._communicator and not self._revoked:
                error = nccl_library.revoke(self._communicator)
                self._revoked = not error
                if error:
                    _log_once(f"NCCL did not revoke a communicator: {nccl_library.words(error)}")
        if not self._revoked:
            _abort(self._backend)

    def _free(self) -> None:
        """Free the group once, in a separate thread, because freeing it waits for the kernels and for peers."""
        with self._lock:
            if self._freeing is None:
                self._communicator = 0
                self._freeing = threads_at_exit.begin("elastic-nccl-free", self._give_back)

    def _give_back(self) -> None:
        _abort(self._backend)
        for thread in (self._stopping, self._building):
            if thread is not None:
                thread.join()
        # Abort again: the communicator may have been connected only after the first abort.
        _abort(self._backend)
        self._backend, self._communicator = None, 0
        self._freed.set()

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise CollectiveFailed(self._failed, aborted=self._aborted)

    def _heed_error(self) -> None:
        """Fail the group if NCCL has detected an error.

        This method is called before torch's `Work.wait`, which would free the communicator immediately in that case.
        """
        if self._failed is not None or not self._launching.acquire(blocking=False):
            return
        try:
            communicator = self._communicator
            error = nccl_library.reported(communicator) if communicator else 0
        finally:
            self._launching.release()
        if error:
            self._fail(f"NCCL error: {nccl_library.words(error)}")


def warm_up(device: torch.device) -> None:
    """Warm up NCCL: create a communicator of this rank alone, reduce a tensor, and free the communicator.

    The first communicator of a process loads kernels and inspects the machine: 0.7 s on an H100, later ones took 0.04
    s.
    """
    nccl: Any = c10d.ProcessGroupNCCL
    backend = None
    # Errors are ignored here. They recur, and are reported, when a group is created.
    with contextlib.suppress(RuntimeError):
        backend = nccl(c10d.HashStore(), 0, 1, _options(_WARM_UP_S))
        backend.eager_connect_single_device(device)
        backend.allreduce([torch.zeros(1, dtype=torch.float32, device=device)]).wait()
        torch.cuda.current_stream(device).synchronize()
    _abort(backend)


class NcclWork:
    """A collective in flight in an NCCL group. ``then`` moves the result to its destination."""

    def __init__(
        self, group: NcclCollectives, work: Any, then: Callable[[], object] | None
    ) -> None:
        self._group = group
        self._work = work
        self._complete = threads_at_exit.Completion(
            None if then is None else functools.partial(self._put, then)
        )
        # CUDA event that is recorded after the work that ``then`` has queued.
        self._in_place: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        self.number = 0  # position of the work in its group, from 1
        self.limit_s = group._launched_timeout_s
        self.launched_at = 0.0
        # CUDA event that is recorded before the collective, on the stream from which it was launched.
        self._arrived: torch.cuda.Event | None = None

    def is_launched(self, number: int, arrived: torch.cuda.Event) -> None:
        self.number, self._arrived, self.launched_at = number, arrived, time.monotonic()

    def event_back(self) -> list[torch.cuda.Event]:
        """Return a list with the work's CUDA event for reuse, or an empty list. Call this once the work is done."""
        event, self._arrived = self._arrived, None
        return [] if event is None else [event]

    def has_arrived(self) -> bool:
        """Return whether the GPU has reached the collective.

        Raises:
            RuntimeError: the device has failed.
        """
        event = self._arrived
        if event is None:
            return True
        with torch.cuda.device(self._group._device):
            come = event.query()
        # The event may already be reused by another work.
        return come or self._arrived is not event

    def done(self) -> bool:
        return self._group._failed is not None or self.finished()

    def finished(self) -> bool:
        """Return whether the kernels of the collective have ended, successfully or not."""
        # The current device may be wrong: this runs in any thread, and most threads use device 0.
        with torch.cuda.device(self._group._device):
            return bool(self._work.is_completed())

    def order(self) -> None:
        """Make the current stream wait for the kernel of the collective. Unlike `wait`, this does not detect errors."""
        if self._end is None:
            self._work.get_future().wait()
        else:
            torch.cuda.current_stream(self._group._device).wait_event(self._end)

    def mark_end(self, stream: torch.cuda.Stream) -> None:
        """Record an event after coalesced calls, because their future does not synchronize streams."""
        with torch.cuda.device(self._group._device), torch.cuda.stream(stream):
            self._work.wait()
            self._end = torch.cuda.Event()
            self._end.record(stream)

    def within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_STEP_S)
        self.wait()
        return True

    def follow(self, limit_s: float | None = None) -> None:
        """Make the current stream wait for the collective; see `StreamOrdered`."""
        self._group._raise_if_failed()
        if limit_s is not None:
            self.limit_s = min(self.limit_s, limit_s)
        self._group._followed = self
        self.order()
        self._put_in_place()

    def wait_on_host(self) -> None:
        """Block until the collective's kernels have ended.

        Raises:
            CollectiveFailed: the group has failed.
        """
        began = time.monotonic()
        while not self.done():
            waited = time.monotonic() - began
            if waited > self.limit_s:
                self._group._fail(f"a collective did not complete within {waited:.0f} s")
            elif waited > _SPIN_S:
                time.sleep(_STEP_S)
        self._group._heed_error()
        # The kernels of an aborted communicator end without an error, so check whether the group has failed.
        self._group._raise_if_failed()

    def wait(self) -> None:
        self.wait_on_host()
        try:
            self._work.wait()  # Makes the current stream wait for the collective.
        except RuntimeError as error:
            self._group._communicator = 0  # torch has freed the communicator.
            self._group._fail(str(error))
            raise CollectiveFailed(str(error), aborted=self._group._aborted) from None
        self._put_in_place()

    def _put_in_place(self) -> None:
        self._complete()
        if self._in_place is not None:
            # Another thread may have written the result, on its stream.
            torch.cuda.current_stream(self._group._device).wait_event(self._in_place)

    def _put(self, then: Callable[[], object]) -> None:
        then()
        if torch.cuda.is_initialized():
            in_place = torch.cuda.Event()
            in_place.record(torch.cuda.current_stream(self._group._device))
            self._in_place = in_place


def _call_all(thens: list[Callable[[], object]]) -> None:
    for then in thens:
        then()


def _options(timeout_s: float) -> Any:
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    options.is_high_priority_stream = True
    return options


def _revocable(backend: Any) -> int:
    """Return NCCL's pointer to the communicator of the current device, or 0 if it cannot be revoked."""
    if not (nccl_library.can_revoke() and hasattr(backend, "_comm_ptr")):
        _log_once("this NCCL can't revoke a communicator: version 2.28 and torch 2.8 are required")
        return 0
    return int(backend._comm_ptr())


@functools.cache
def _log_once(why: str) -> None:
    print(
        f"elastic: {why}; after a worker is lost, kernels of slow workers may fail with an illegal memory access",
        file=sys.stderr,
    )


def _abort(backend: Any) -> None:
    # The group has failed already, so an error during the abort is irrelevant.
    with contextlib.suppress(RuntimeError):
        if backend is not None:
            backend.abort()
