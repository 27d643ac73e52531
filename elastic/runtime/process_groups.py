"""The groups of collectives and the store of the present world: made at their first use, cut when it breaks. Acts.

The link thread may cut at any time and takes no lock, so that nothing that the forming of a group holds can delay it.
Which ranks a group has is not decided here.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from elastic.collectives import construct, threads
from elastic.collectives.construct import Abortable, Connecting
from elastic.collectives.interface import Collectives
from elastic.errors import CollectiveFailed, DeviceLost
from elastic.negotiation.engine import Engine
from elastic.negotiation.messages import Members
from elastic.negotiation.transport import KEY
from elastic.protocol import messages
from elastic.protocol.messages import GRADIENTS, Address, Place
from elastic.rendezvous.environment import Environment
from elastic.rendezvous.store import Store, StoreListener, listen

if TYPE_CHECKING:  # it needs a torch that was built with NCCL
    from elastic.collectives.nccl import NcclCollectives

DEVICE_S = 10.0  # for a GPU to end what was aborted on it, which takes milliseconds
MOST_UNCONNECTED = 2  # communicators that NCCL still tries to connect: each has a GB of the GPU
CLOSE_S = 2.0  # at exit, for the groups to end
_LISTEN_S = 1e6  # for whoever wants a group, or for the end of the world; a socket takes no more than 24 days
_ASK_S = 1.0  # for rank 0 to say who waits; where its process has ended nobody answers
_FORM_S = 0.5  # at exit, for those that are being formed; then they are cut
# What all ranks need in their first step, if they have needed it before.
NAMED = "named"
_AHEAD = frozenset({NAMED, GRADIENTS})

GroupKey = tuple[str, str, tuple[int, ...]]  # purpose, type of device, ranks


class DeferredCloser:
    """Closes old groups in a thread of its own: freeing one takes tens of milliseconds that no step should pay."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def close_later(self, close: Callable[[], None]) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threads.begin("elastic-close", self._work)
        self._queue.put(close)

    def _work(self) -> None:
        while (close := self._queue.get()) is not None:
            close()
            del close  # the last reference may free sockets and threads

    def finish(self) -> None:
        """Its thread ends once all are closed; see `threads.finish`."""
        self._queue.put(None)


class Groups:
    """Those of one world at a time. ``over`` says whether the present world has ended."""

    def __init__(self, env: Environment, over: Callable[[], bool]) -> None:
        self._env = env
        self._over = over
        self._forming = threading.RLock()
        self._forming_each: dict[GroupKey, threading.Lock] = {}
        self._made: dict[GroupKey, Collectives] = {}
        self._connecting: set[Connecting] = set()
        self._unmade: list[NcclCollectives] = []  # did not connect; peers may use their memory
        self._buried: list[NcclCollectives] = []  # of the world before
        self._unconnected: list[NcclCollectives] = []  # of all worlds before; torch waits for them
        self._store: Store | None = None
        self._listener: StoreListener | None = None
        self._engine: Engine | None = None
        self._place: Place | None = None
        self._used: set[str] = set()  # of _AHEAD, in worlds before
        # What is cut when the world breaks, with its generation. Appended to before anything blocks.
        self._cuttable: list[tuple[int, Abortable]] = []
        self._closer = DeferredCloser()

    # ---- the store -------------------------------------------------------------------------------

    def listen(self, address: Address | None = None) -> Address:
        """Where this worker would serve the next generation's store; already bound."""
        if self._listener is None:
            if address is None:
                self._listener = listen(self._env.bind_host)
            else:
                self._listener = listen(address.host, address.port)
        return self._listener.address

    def open(self, world: messages.World, broken: Callable[[str], None]) -> None:
        """Rank 0 serves the store from now on: others may come as soon as they have heard of the world.

        ``broken``: what the engine calls when it notices first that this world is over.
        """
        listener = None
        if world.place.rank == 0:
            listener, self._listener = self._listener, None
        self._store = Store(
            world.store,
            listener,
            self._env.timeout_s,
            generation=world.generation,
            secret=self._env.secret,
        )
        self._place = world.place
        if world.place.rank == 0 and world.place.size > 1:
            with self._forming:
                self._engine = self._make_engine(self._store, world.place, broken)
            self._store.provide(KEY, self._engine.rules)
        self._store.open()
        self._cut_with(world.generation, self._store)
        if world.place.cross_size > 1:
            self._hurry(world, broken)

    def _hurry(self, world: messages.World, broken: Callable[[str], None]) -> None:
        """Over a network, what worlds before came to use is connected at once, all at the same time: where the way is
        long, each of them takes many round trips. Nobody waits for it here, and a rank that lacks it comes in its time.
        """
        generation, place = world.generation, world.place
        for purpose in self._used:
            key = (purpose, "cpu", tuple(range(place.size)))
            threads.begin("elastic-ahead", self._form_ahead, key, generation, place)
        if NAMED in self._used and place.rank != 0:
            with contextlib.suppress(CollectiveFailed):
                engine = self.engine(generation, place, broken)
                threading.Thread(target=engine.reach, name="elastic-reach", daemon=True).start()

    def _form_ahead(self, key: GroupKey, generation: int, place: Place) -> None:
        made = self._made
        try:
            group = self.form(key, generation, place)
        except CollectiveFailed:
            return  # whoever needs it tries again, and is told
        with self._forming:
            retired = self._made is not made
        if retired and made.pop(key, None) is not None:  # too late for `retire` to see it
            group.abort()
            group.close()

    @property
    def store(self) -> Store | None:
        return self._store

    # ---- groups ----------------------------------------------------------------------------------

    def find(self, key: GroupKey) -> Collectives | None:
        return self._made.get(key)

    def form(self, key: GroupKey, generation: int, place: Place) -> Collectives:
        """Collective among the ranks of the key. Raises CollectiveFailed."""
        with self._forming:
            made = self._made
            forming = self._forming_each.setdefault(key, threading.Lock())
        # One lock for all would make ranks wait for each other in a circle: the engine's thread and the training
        # thread form theirs at the same time, in any order.
        with forming:
            if key not in made:
                made[key] = self._form(key, generation, place)
            return made[key]

    def wanted(self, key: GroupKey, generation: int, place: Place) -> bool:
        """Whether other ranks are forming this group now, and wait for this one, or have it with this one. One message
        to rank 0.
        """
        if self.find(key) is not None:
            return True
        store = self._store
        if store is None or store.generation != generation:
            return False
        try:
            return _meeting(key, place) in store.awaited(_ASK_S)
        except CollectiveFailed:  # whoever notices that the world is broken says so
            return False

    def want(self, key: GroupKey, generation: int, place: Place) -> None:
        """Has those ranks form this group now that have called `form_when_wanted`. Raises CollectiveFailed."""
        if self._store is not None and self._store.generation == generation:
            self._store.announce(_meeting(key, place), place.rank)

    def form_when_wanted(self, key: GroupKey, generation: int, place: Place) -> None:
        """Returns at once. Once a rank wants this group, this rank takes part in forming it, whatever it does then."""
        store = self._store

        def listen() -> None:
            assert store is not None
            with contextlib.suppress(CollectiveFailed):  # the world is over
                store.listen_to(_meeting(key, place), place.rank, _LISTEN_S)
                threads.begin("elastic-ahead", self._form_ahead, key, generation, place)

        if store is not None and store.generation == generation:
            threading.Thread(target=listen, name="elastic-wanted", daemon=True).start()

    def engine(self, generation: int, place: Place, broken: Callable[[str], None]) -> Engine:
        """Of the collectives that are called by name, made at the first of them. Raises CollectiveFailed."""
        engine = self._engine
        if engine is not None and engine.generation == generation:
            return engine
        with self._forming:
            if self._engine is None or self._engine.generation != generation:
                if self._store is None or self._store.generation != generation:
                    raise CollectiveFailed(f"generation {generation} has ended")
                self._engine = self._make_engine(self._store, place, broken)
            return self._engine

    def _make_engine(self, store: Store, place: Place, broken: Callable[[str], None]) -> Engine:
        generation = store.generation

        def group_for(purpose: str, device: torch.device, members: Members) -> Collectives:
            key = (purpose, device.type, members or tuple(range(place.size)))
            return self.find(key) or self.form(key, generation, place)

        engine = Engine(
            generation=generation,
            place=place,
            store=store,
            env=self._env,
            group_for=group_for,
            broken=broken,
        )
        self._cut_with(generation, engine)
        return engine

    def leave(self) -> None:
        """``shutdown()``, or the end of the process: this rank submits nothing any more; nobody need wait for it."""
        store, place = self._store, self._place
        if self._engine is None and store is not None and place is not None and place.size > 1:
            self._engine = self._make_engine(store, place, lambda reason: None)
        if self._engine is not None:
            self._engine.leave()

    def _form(self, key: GroupKey, generation: int, place: Place) -> Collectives:
        purpose, device_type, members = key
        if self._store is None or self._store.generation != generation:
            raise CollectiveFailed(f"generation {generation} has ended")
        connecting = Connecting(
            self._store,
            purpose=_named(purpose, members, place),
            rank=members.index(place.rank),
            size=len(members),
            device_type=device_type,
            bind_host=self._env.bind_host,
            timeout_s=self._env.timeout_s,
            collective_timeout_s=self._env.collective_timeout_s,
            native=self._env.native,
            apart=place.cross_size == place.size,
            agreed=_is_agreed(purpose),
        )
        self._connecting.add(connecting)
        try:
            self._cut_with(generation, connecting)
            return connecting.connect()
        except BaseException:
            if device_type == "cuda":
                self._unmade.append(cast("NcclCollectives", connecting.group))
            raise
        finally:
            self._connecting.discard(connecting)

    def _cut_with(self, generation: int, abortable: Abortable) -> None:
        self._cuttable.append((generation, abortable))
        if self._over():  # the word came before there was anything to cut
            abortable.abort()

    def cut(self, generation: int) -> None:
        """Ends every collective of this generation. Any thread, never blocks."""
        for of, abortable in list(self._cuttable):
            if of == generation:
                abortable.abort()

    def drain(self, timeout_s: float) -> int:
        """After a cut: waits until no collective writes into any tensor. How many groups were late.

        A GPU has `DEVICE_S`: whatever came next on it would wait behind its kernels for ever. Raises DeviceLost then.
        """
        late = 0
        for (_, device_type, _), group in list(self._made.items()):
            if group.drain(timeout_s):
                continue
            late += 1
            if device_type == "cuda" and not cast("NcclCollectives", group).ended(
                DEVICE_S - timeout_s
            ):
                raise _did_not_come_back()
        if not all(group.ended(DEVICE_S) for group in self._unmade):
            raise _did_not_come_back()
        return late

    def launches(self) -> list[messages.Launches]:
        """How far each group on this worker's GPU has come. Waits for nothing; in the link thread."""
        place, found = self._place, []
        for (purpose, device_type, members), group in list(self._made.items()):
            if device_type != "cuda" or len(members) < 2 or place is None:
                continue
            counts = cast("NcclCollectives", group).counts()
            if counts.launched:
                name = _named(purpose, members, place)
                found.append(messages.Launches(name, len(members), *counts))
        return found[: messages.LAUNCHES_LIMIT]

    # ---- the end ---------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Before this worker is ready for another world: a GPU holds the communicators of two at most, so the world
        before the last one has to be off it. Raises DeviceLost.
        """
        until = time.monotonic() + self._env.timeout_s
        if not all(group.freed(max(0.0, until - time.monotonic())) for group in self._buried):
            raise DeviceLost(
                "its GPU did not free the memory of an earlier world's communicators within"
                f" {self._env.timeout_s:g} s"
            )
        # Those that did not connect are freed when NCCL's time for that is over, unless they have become many.
        until += self._env.timeout_s
        self._unconnected = [each for each in self._unconnected if not each.freed(0.0)]
        for each in self._unconnected[:-MOST_UNCONNECTED]:
            if not each.freed(max(0.0, until - time.monotonic())):
                raise DeviceLost(
                    "communicators that did not connect could not be released within"
                    f" {2 * self._env.timeout_s:g} s"
                )

    def retire(self) -> None:
        """Closes what belonged to the last world, off the critical path: the next one stands, so no member's GPU uses
        the memory of another's any more.
        """
        with self._forming:
            groups, store, engine = list(self._made.values()), self._store, self._engine
            unmade, self._unmade = self._unmade, []
            self._buried = [
                cast("NcclCollectives", group)
                for (_, device_type, _), group in self._made.items()
                if device_type == "cuda"
            ]
            self._unconnected += unmade
            for purpose, device_type, members in self._made:
                if self._place is not None and len(members) == self._place.size:
                    self._used |= {purpose} & _AHEAD if device_type == "cpu" else set()
            self._made, self._store, self._engine, self._cuttable = {}, None, None, []

        def close() -> None:
            if engine is not None:
                engine.close()
            while unmade:
                unmade.pop().close(0.0)  # whose threads may take as long as NCCL may to connect
            while groups:
                group = groups.pop()
                group.abort()
                group.close()
            if store is not None:
                store.close()

        if groups or unmade or store is not None or engine is not None:
            self._closer.close_later(close)

    def close(self) -> None:
        """At exit. Groups on the CPU keep their sockets until the process ends: see `Runtime.close`."""
        self._closer.finish()
        if not self._out_of_torch(_FORM_S):
            for connecting in list(self._connecting):
                connecting.abort()
            self._out_of_torch(CLOSE_S)
        with self._forming:
            for (_, device_type, _), group in list(self._made.items()):
                if device_type != "cuda":
                    # Freed by the interpreter, it would close its sockets, or wait for what is under way.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                else:
                    self._unmade.append(cast("NcclCollectives", group))
        until = time.monotonic() + CLOSE_S
        for each in self._unmade:
            each.abort()
        for each in self._unmade:
            each.close(max(0.0, until - time.monotonic()))
        if not all(each.freed(0.0) for each in (*self._unmade, *self._buried, *self._unconnected)):
            threads.leave_behind(CLOSE_S)
        if self._listener is not None:
            self._listener.close()

    def _out_of_torch(self, timeout_s: float) -> bool:
        """At exit: the engine begins nothing more. Whether no thread of ours is in torch's code, after twice that time
        at most.
        """
        engine = self._engine
        # In this order: what the engine carries out may begin a thread.
        return (engine is None or engine.rest(timeout_s)) and threads.finish(timeout_s)

    def close_in_forked_child(self) -> None:
        """In a forked child: hold none of the parent's sockets."""
        if self._listener is not None:
            self._listener.close()
        for _, abortable in self._cuttable:
            abortable.close_in_forked_child()


def _did_not_come_back() -> DeviceLost:
    return DeviceLost(
        f"its GPU did not respond within {DEVICE_S:g} s: an aborted collective still runs on it"
    )


def _meeting(key: GroupKey, place: Place) -> str:
    purpose, device_type, members = key
    return construct.meeting(_named(purpose, members, place), device_type, len(members))


def _named(purpose: str, members: tuple[int, ...], place: Place) -> str:
    everybody = len(members) == place.size
    return purpose if everybody else f"{purpose} of {','.join(map(str, members))}"


def _is_agreed(purpose: str) -> bool:
    """Whether its calls are the same on all ranks: what is called by name is negotiated, and gradients follow a plan
    that all ranks have compared.
    """
    return purpose == NAMED or purpose.startswith(GRADIENTS)
