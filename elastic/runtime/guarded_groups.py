"""Access to the groups of the current world, in which a failed collective raises an interruption.

User code is interrupted only in the training thread, at the places documented in `run_loop`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Protocol, cast

import torch

from elastic.collectives import own_gpu
from elastic.collectives.groups.group_factory import MESSAGES
from elastic.collectives.interface import Collectives
from elastic.collectives.single_rank import LocalCollectives
from elastic.collectives.store_group import Broadcast, DistantGroup, Wait
from elastic.errors import CollectiveFailed, Differing, PeerLost
from elastic.monitoring import script_line
from elastic.negotiation.engine import Engine
from elastic.protocol import calls
from elastic.protocol.calls import Called
from elastic.protocol.messages import STATE
from elastic.rendezvous.store import Store
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.failures import differing_calls
from elastic.runtime.session import Session

if TYPE_CHECKING:
    from elastic.collectives.interface import Messenger


def as_text(content: bytes) -> str:
    """Return bytes as text that a worker can send with Ready."""
    return base64.b64encode(zlib.compress(content)).decode()


def as_bytes(text: str) -> bytes:
    """Return the bytes that `as_text` has encoded."""
    return zlib.decompress(base64.b64decode(text))


def reply_to(name: str) -> str:
    """Return the name of the metadata with which a worker replies to a broadcast. See `WorkerRuntime.copy_group`."""
    return f"reply to {name}"


class GuardedGroups:
    """Groups of one worker in its current world, with handling of failed collectives."""

    def __init__(self, session: Session, progress: ProgressCounter) -> None:
        self._session = session
        self._progress = progress
        self._warned_alone = False
        # generations and names of the metadata that `start_exchange` has returned
        self._taken: set[tuple[int, str]] = set()

    def group(
        self, purpose: str, device: torch.device, ranks: tuple[int, ...] | None
    ) -> Collectives:
        """Return the group named ``purpose``, created at its first use. See `WorkerRuntime.group`."""
        session = self._session
        session.raise_if_broken()
        recovery = session.recovery
        if recovery.provisional:
            return self.alone_group()
        members = tuple(range(recovery.place.size)) if ranks is None else ranks
        if len(members) == 1:
            return LocalCollectives()
        own_gpu.meet(device)
        return self._formed(purpose, device.type, members)

    def messages(self, purpose: str, ranks: tuple[int, ...] | None) -> Messenger:
        """Return the group for point-to-point messages. See `WorkerRuntime.messages`."""
        session = self._session
        session.raise_if_broken()
        members = tuple(range(session.recovery.place.size)) if ranks is None else ranks
        return cast("Messenger", self._formed(purpose, MESSAGES, members))

    def expect_messages(self, purpose: str, ranks: tuple[int, ...] | None) -> None:
        """Prepare for the first message of this world, without waiting. See `WorkerRuntime.expect_messages`."""
        recovery = self._session.recovery
        place = recovery.place
        members = tuple(range(place.size)) if ranks is None else ranks
        if not recovery.provisional and len(members) > 1 and place.rank in members:
            key = (purpose, MESSAGES, members)
            self._session.groups.form_when_wanted(key, recovery.generation, place)

    def form_ahead(self, purpose: str, ranks: tuple[int, ...], generation: int) -> None:
        """Start to connect a CPU group in the background. See `WorkerRuntime.form_ahead`."""
        recovery = self._session.recovery
        needed = recovery.place.several_hosts and len(ranks) > 1
        if needed and not recovery.provisional and recovery.generation == generation:
            key = (purpose, "cpu", ranks)
            self._session.groups.form_ahead(key, generation, recovery.place)

    def copy_group(
        self, name: str, ranks: tuple[int, ...], *, replies: bool = False
    ) -> Collectives | DistantGroup:
        """Return the group in which these ranks copy values. See `WorkerRuntime.copy_group`."""
        groups, place = self._session.groups, self._session.recovery.place
        form = functools.partial(self.group, STATE, torch.device("cpu"), ranks)
        # Only rank 0 sends to other hosts: see `World.copies`.
        if not place.several_hosts or ranks[0] != 0:
            return form()
        store, limit_s = groups.store, self._session.env.collective_timeout_s
        assert store is not None, "a world of several ranks has a store"
        rank, numbers = ranks.index(place.rank), itertools.count()

        def start(blob: bytes) -> Wait:
            # differs from every `group_factory.meeting`, at which a group of the same name may be connecting
            key = f"{name} value {next(numbers)} of {','.join(map(str, ranks))}"
            return StoreExchange(store, key, rank, len(ranks), blob, limit_s).wait

        known = self._known_broadcast(name, ranks, replies=replies)
        return DistantGroup(rank, len(ranks), start, form, known)

    def _known_broadcast(
        self, name: str, ranks: tuple[int, ...], *, replies: bool
    ) -> Broadcast | None:
        """Return the result of the first broadcast of a copy, or None if the message about the world lacks a value."""
        world = self._session.recovery.world
        if world is None or name not in world.source or not world.metadata:
            return None
        sent = [world.metadata[rank].get(reply_to(name)) for rank in ranks[1:]] if replies else []
        received = [as_bytes(each) for each in sent if each is not None]
        if len(received) < len(sent):
            return None
        return Broadcast(as_bytes(world.source[name]), [*received])

    def start_exchange(
        self, key: str, blob: bytes, then: Callable[[list[bytes]], None] | None = None
    ) -> ByteExchange:
        """Start to exchange bytes with all ranks of the world. See `WorkerRuntime.start_exchange`."""
        known = self._take_metadata(key)
        if known is not None:
            if then is not None:
                then(known)
            return CompletedExchange(known)
        groups, place = self._session.groups, self._session.recovery.place
        assert groups.store is not None, "a world of several ranks has a store"
        limit_s = self._session.env.collective_timeout_s
        return StoreExchange(groups.store, key, place.rank, place.size, blob, limit_s, then)

    def _take_metadata(self, key: str) -> list[bytes] | None:
        """Return the values that all ranks have sent with Ready. None at the second call in a world."""
        world = self._session.recovery.world
        if world is None or not world.metadata or (world.generation, key) in self._taken:
            return None
        values = [each[key].encode() for each in world.metadata if key in each]
        if len(values) < world.place.size:
            return None
        self._taken = {each for each in self._taken if each[0] == world.generation}
        self._taken.add((world.generation, key))
        return values

    def _formed(self, purpose: str, kind: str, members: tuple[int, ...]) -> Collectives:
        session = self._session
        place, generation = session.recovery.place, session.recovery.generation
        key = (purpose, kind, members)
        group = session.groups.find(key)
        if group is not None:
            return group
        began = time.monotonic()
        try:
            with self._inside(generation, f"forming the {purpose} group"):
                if kind == MESSAGES and session.recovers:
                    session.groups.want(key, generation, place)
                group = session.groups.form(key, generation, place)
        except CollectiveFailed as error:
            session.mark_broken(generation, f"the {purpose} group could not be formed: {error}")
            session.record_raised(generation)
            if not session.recovers:
                raise CollectiveFailed(session.why(error)) from error
            raise PeerLost(session.why(error)) from error
        session.phases.formed(time.monotonic() - began)
        return group

    def wanted(self, purpose: str, device_type: str, ranks: tuple[int, ...] | None) -> bool:
        """Return whether other ranks are waiting for this rank to create this group. See `WorkerRuntime.wanted`."""
        recovery = self._session.recovery
        place = recovery.place
        if recovery.provisional or place.size == 1:
            return False
        members = tuple(range(place.size)) if ranks is None else ranks
        key = (purpose, device_type, members)
        return self._session.groups.wanted(key, recovery.generation, place)

    def alone_group(self) -> Collectives:
        """Return a group that contains only this rank."""
        recovery = self._session.recovery
        if recovery.provisional and recovery.place.size > 1 and not self._warned_alone:
            self._warned_alone = True
            warnings.warn(
                "a world is already training and this worker has not joined it yet: collectives before elastic.run"
                " act as in a world of size 1",
                stacklevel=4,
            )
        return LocalCollectives()

    def engine(self) -> Engine:
        """Return the engine for named collectives. See `WorkerRuntime.engine`."""
        session = self._session
        generation, place = session.recovery.generation, session.recovery.place
        broken = functools.partial(session.mark_broken, generation)
        return session.groups.engine(generation, place, broken)

    def settle(self) -> None:
        """Wait for collectives that so far only GPU streams wait for. See `WorkerRuntime.settle`."""
        for group in self._session.groups.unsettled():
            with Guard(self, "the step's collectives on the GPU"):
                group.settle()

    # ---- start and end of a collective ---------------------------------------------------------------------------

    def begin(self, name: str) -> int:
        """Begin a collective, and return its generation.

        Args:
            name: name of the collective in log lines about waits.

        Raises:
            PeerLost: the generation has ended. `Session.raise_if_broken` lists the other errors.
        """
        session = self._session
        generation = session.recovery.generation
        session.raise_if_broken()
        self._progress.enter(generation, name, time.monotonic(), get_ident())
        return generation

    def end(self, generation: int, error: BaseException | None) -> None:
        """End a collective. If it failed, raise the error that the script receives.

        Args:
            generation: generation of the collective.
            error: exception of the collective, or None on success.

        Raises:
            PeerLost: raised instead of ``error`` in an elastic job.
            CollectiveFailed: raised instead of ``error`` in other jobs, with a more precise reason.
        """
        session, inside = self._session, self._progress.inside
        awaited = self._progress.awaited() if error is not None else {}
        if self._progress.leave(time.monotonic()):
            session.poke()
        differs = error.differs if isinstance(error, CollectiveFailed) else None
        called: tuple[Called, ...] = ()
        if isinstance(error, CollectiveFailed) and differs is not None:
            called = self._report_calls(error, differs, inside)
        if isinstance(error, CollectiveFailed) and error.late:
            self._report_missing(error, awaited)
        if error is None:
            session.resumed()
        elif isinstance(error, CollectiveFailed):
            session.mark_broken(generation, str(error), called)
            why = session.why(error)
            if not session.recovers:
                if str(error) != why:
                    raise CollectiveFailed(why) from error
                return
            # The driver's message may arrive before the error, so the failure may not be recorded yet.
            session.record_raised(generation)
            raise PeerLost(why) from error

    def _report_calls(
        self, error: CollectiveFailed, group: Differing, inside: str
    ) -> tuple[Called, ...]:
        session = self._session
        line = script_line.of_thread(get_ident())
        mine = Called(session.recovery.place.rank, inside, line)
        called = differing_calls.of_all(session.groups.store, group, mine)
        error.args = (calls.sentence(called),)
        if mine.rank == min(each.rank for each in called):
            print(f"elastic: {error}", file=sys.stderr)
        return calls.distinct(called)

    def _report_missing(self, error: CollectiveFailed, awaited: dict[int, str]) -> None:
        lines = [f"rank {rank} is at {line}" for rank, line in sorted(awaited.items())]
        error.args = ("; ".join([str(error), *lines]),)

    @contextlib.contextmanager
    def _inside(self, generation: int, name: str) -> Iterator[None]:
        self._progress.enter(generation, name, time.monotonic(), get_ident())
        try:
            yield
        finally:
            if self._progress.leave(time.monotonic()):
                self._session.poke()


class ByteExchange(Protocol):
    """Exchange of bytes between all ranks of a world."""

    def wait(self) -> list[bytes]:
        """Return the bytes of all ranks, by rank. See `StoreExchange.wait`."""


class CompletedExchange:
    """Exchange of values that this rank has received with the message about the world."""

    def __init__(self, values: list[bytes]) -> None:
        self._values = values

    def wait(self) -> list[bytes]:
        """Return the bytes of all ranks, by rank."""
        return self._values


class StoreExchange:
    """Exchange of bytes between ranks of a world through its store, in the background. See `Store.exchange`."""

    def __init__(
        self,
        store: Store,
        key: str,
        rank: int,
        size: int,
        blob: bytes,
        timeout_s: float,
        then: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self._then = then
        self._blobs: list[bytes] = []
        self._error: CollectiveFailed | None = None
        # Not begun by `threads_at_exit.begin`: it runs no code of torch, so an exiting process need not wait for other
        # ranks.
        self._thread = threading.Thread(
            target=self._run,
            args=(store, key, rank, size, blob, timeout_s),
            name="elastic-exchange",
            daemon=True,
        )
        self._thread.start()

    def _run(
        self, store: Store, key: str, rank: int, size: int, blob: bytes, timeout_s: float
    ) -> None:
        try:
            self._blobs = store.exchange(key, rank, size, blob, timeout_s)
        except CollectiveFailed as error:
            self._error = error
            return
        if self._then is not None:
            self._then(self._blobs)

    def wait(self) -> list[bytes]:
        """Return the bytes of all ranks, by rank. Call this under `WorkerRuntime.guard`.

        The wait ends at the latest at the timeout of the exchange.

        Raises:
            CollectiveFailed: a rank was lost or late.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._blobs


class Guard:
    """Context manager in which collectives run. See `WorkerRuntime.guard`.

    This is a class rather than a generator, because every collective enters this context and a generator would be
    slower.
    """

    __slots__ = ("_generation", "_groups", "_name")

    def __init__(self, groups: GuardedGroups, name: str) -> None:
        self._groups = groups
        self._name = name
        self._generation = 0

    def __enter__(self) -> None:
        self._generation = self._groups.begin(self._name)

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: object
    ) -> None:
        self._groups.end(self._generation, error)
