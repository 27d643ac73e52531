"""Process groups and rendezvous store of the current world.

The groups and the store are created at first use and aborted when the world fails. The link thread may abort them at
any time. It takes no lock to do so, and thus never waits for the creation of a group. The callers determine the ranks
of each group.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import cast

import msgspec
import torch

from elastic.collectives import threads_at_exit
from elastic.collectives.groups import group_factory
from elastic.collectives.groups.group_factory import Abortable, ConnectingGroup
from elastic.collectives.interface import Collectives, DeviceCollectives
from elastic.errors import CollectiveFailed, DeviceLost
from elastic.negotiation.engine import Engine
from elastic.negotiation.messages import Members
from elastic.negotiation.transport import KEY
from elastic.protocol import messages
from elastic.protocol.messages import GRADIENTS, STATE, Address, Place
from elastic.rendezvous.store import Store, StoreListener, connect_ahead, listen
from elastic.rendezvous.worker_settings import Environment
from elastic.runtime.store_connections import KEEPING_RANKS, early_connections, kept_connections

# timeout in seconds for a GPU to end aborted work, which usually takes milliseconds
DEVICE_S = 10.0
# maximum number of communicators that NCCL is still trying to connect; each takes 1 GB of GPU memory
MOST_UNCONNECTED = 2
CLOSE_S = 2.0  # timeout in seconds for the groups to end at exit
# timeout in seconds for waiting until a group is wanted or the world ends; sockets accept at most 24 days
_LISTEN_S = 1e6
# timeout in seconds for rank 0 to list waiting ranks, because a dead process does not answer
_ASK_S = 1.0
_WATCH_S = 1.0  # interval in seconds between checks of collectives that only GPU streams wait for
_FORM_S = 0.5  # timeout in seconds at exit for groups that are being created; then they are aborted
# purpose of the group for named collectives
NAMED = "named"
# purposes of groups that all ranks need in their first step if an earlier world has used them
_AHEAD = frozenset({NAMED, GRADIENTS})
# name of the metadata that contains the address at which a member can serve a store
STORE = "store"
NEXT = "next store"  # key under which rank 0 provides the address at which it will serve the next world's store

GroupKey = tuple[str, str, tuple[int, ...]]  # purpose, device type, ranks


class DeferredCloser:
    """Thread that closes the groups of previous worlds.

    Closing takes tens of milliseconds and must not delay a step.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def close_later(self, close: Callable[[], None]) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threads_at_exit.begin("elastic-close", self._work)
        self._queue.put(close)

    def _work(self) -> None:
        while (close := self._queue.get()) is not None:
            close()
            del close  # dropping the last reference may free sockets and threads

    def finish(self) -> None:
        """Stop the thread after it has closed all groups. See `threads_at_exit.finish`."""
        self._queue.put(None)


class Groups:
    """Process groups and rendezvous store of the current world. ``over`` returns whether that world has ended."""

    def __init__(self, env: Environment, over: Callable[[], bool]) -> None:
        self._env = env
        self._over = over
        self._forming = threading.RLock()
        self._forming_each: dict[GroupKey, threading.Lock] = {}
        self._made: dict[GroupKey, Collectives] = {}
        self._connecting: set[ConnectingGroup] = set()
        self._unmade: list[
            DeviceCollectives
        ] = []  # groups that failed to connect; their memory may be in use by peers
        # GPU groups of the previous world; their memory must be freed before the next world forms
        self._buried: list[DeviceCollectives] = []
        self._unconnected: list[
            DeviceCollectives
        ] = []  # groups of previous worlds that torch is still trying to connect
        self._store: Store | None = None
        # addresses at which the members of the world can serve stores, by rank, or () if they are not known
        self._addresses: tuple[Address, ...] = ()
        # stores at which groups without rank 0 meet, by their first rank
        self._nearby: dict[int, Store] = {}
        self._listener: StoreListener | None = None
        # whether this rank has returned the listener's address, at which it may serve the next world's store
        self._promised = False
        self._next: Address | None = None  # address of rank 0's next store, if it is distant
        # sockets that are connecting to the next store, with its address
        self._ahead: tuple[Address, list[socket.socket]] | None = None
        self._engine: Engine | None = None
        self._place: Place | None = None
        # whether this rank probably negotiates collectives: it has in the last world, or joins a world
        self._negotiates = False
        self._used: set[str] = set()  # purposes in `_AHEAD` that previous worlds have used
        # objects to abort when the world fails, each with its generation; appended before the object blocks
        self._cuttable: list[tuple[int, Abortable]] = []
        self._closer = DeferredCloser()
        self._watching: threading.Thread | None = None
        self._closing = threading.Event()

    # ---- the store -------------------------------------------------------------------------------

    def listen(self, address: Address | None = None) -> Address:
        """Bind and return an address at which this worker can serve the next generation's store."""
        with self._forming:
            self._promised = True
            if self._listener is None:
                if address is None:
                    self._listener = listen(self._env.bind_host)
                else:
                    self._listener = listen(address.host, address.port)
            return self._listener.address

    def open(self, world: messages.World, broken: Callable[[str], None]) -> None:
        """Open the rendezvous store of a new world.

        Rank 0 starts to serve it immediately, because other ranks may connect as soon as they have received the world.

        Args:
            world: the new world.
            broken: called by the engine if it is the first to detect that this world has failed.
        """
        listener, self._promised = None, False
        if world.place.rank == 0:
            listener, self._listener = self._listener, None
        keeps = world.place.several_hosts and 0 < world.place.rank < KEEPING_RANKS
        self._store = Store(
            world.store,
            listener,
            self._env.timeout_s,
            generation=world.generation,
            secret=self._env.secret,
            keeps=kept_connections(world.place.size) if keeps else 0,
            connecting=self._take_ahead(world.store) if keeps else (),
        )
        self._addresses = _addresses_of(world)
        self._next = None
        self._negotiates |= self._place is None and 0 < world.holders <= world.place.rank
        self._place = world.place
        if world.place.rank == 0 and world.place.size > 1:
            with self._forming:
                self._engine = self._make_engine(self._store, world.place, broken)
            self._store.provide(KEY, self._engine.rules)
            if world.place.several_hosts:
                address = msgspec.json.encode(self.listen())
                self._store.provide(NEXT, lambda: [address])
        self._store.open()
        self._cut_with(world.generation, self._store)
        if world.place.several_hosts:
            self._hurry(world, broken)

    def connect_ahead(self) -> None:
        """Start to connect to the store of the next world, in case its rank 0 is that of this world. Does not wait."""
        address, self._next = self._next, None
        if address is not None and self._place is not None:
            self._take_ahead(None)
            count = early_connections(self._place.size)
            self._ahead = address, connect_ahead(address, count)

    def _take_ahead(self, address: Address | None) -> list[socket.socket]:
        """Return the sockets that are connecting to this address. Close them if it is another one."""
        of, sockets = self._ahead or (None, [])
        self._ahead = None
        if of == address:
            return sockets
        for each in sockets:
            each.close()
        return []

    def _find_next(self, store: Store, rank: int) -> None:
        with contextlib.suppress(CollectiveFailed, msgspec.MsgspecError):
            found = msgspec.json.decode(store.fetch(NEXT, rank)[0], type=Address)
            if self._store is store:
                self._next = found

    def _hurry(self, world: messages.World, broken: Callable[[str], None]) -> None:
        """Start to connect, in parallel, the groups that are needed first, if the world spans several hosts.

        These are the groups of all ranks that previous worlds have used, and the group in which the state is sent. Over
        long distances, each connection takes many round trips. This method does not wait for the connections.
        """
        generation, place, store = world.generation, world.place, self._store
        assert store is not None
        if 0 < place.rank < KEEPING_RANKS and self._env.driver is not None:
            args = store, place.rank
            threading.Thread(
                target=self._find_next, args=args, name="elastic-next", daemon=True
            ).start()
        ahead = [(purpose, tuple(range(place.size))) for purpose in self._used]
        if world.holders and world.copying:
            ahead.append((STATE, world.copying))
        for purpose, members in ahead:
            key = (purpose, "cpu", members)
            self.form_ahead(key, generation, place)
        if (self._negotiates or NAMED in self._used) and place.rank != 0:
            with contextlib.suppress(CollectiveFailed):
                engine = self.engine(generation, place, broken)
                threading.Thread(target=engine.reach, name="elastic-reach", daemon=True).start()

    def form_ahead(self, key: GroupKey, generation: int, place: Place) -> None:
        """Start a thread that takes part in creating this group. This method does not wait."""
        threads_at_exit.begin("elastic-ahead", self._form_ahead, key, generation, place)

    def _form_ahead(self, key: GroupKey, generation: int, place: Place) -> None:
        made = self._made
        try:
            group = self.form(key, generation, place)
        except CollectiveFailed:
            return  # Ignore the error: a caller that needs the group will retry and raise it.
        with self._forming:
            retired = self._made is not made
        # the group was created after `retire` was called
        if retired and made.pop(key, None) is not None:
            group.abort()
            group.close()

    @property
    def store(self) -> Store | None:
        return self._store

    # ---- groups ----------------------------------------------------------------------------------

    def find(self, key: GroupKey) -> Collectives | None:
        return self._made.get(key)

    def unsettled(self) -> list[DeviceCollectives]:
        """Return the GPU groups with unsettled collectives.

        Only GPU streams wait for an unsettled collective, so the host has not checked its outcome yet.
        """
        return [group for group in _on_gpus(self._made).values() if group.unsettled]

    def form(self, key: GroupKey, generation: int, place: Place) -> Collectives:
        """Return the group with this key. If it does not exist, create it collectively among the key's ranks.

        Raises:
            CollectiveFailed: a rank was lost, or did not arrive in time.
        """
        with self._forming:
            made = self._made
            forming = self._forming_each.setdefault(key, threading.Lock())
        # One lock per group: with a single lock, ranks could deadlock, because the engine's thread and the training
        # thread create their groups at the same time, in any order.
        with forming:
            if key not in made:
                made[key] = self._form(key, generation, place)
            return made[key]

    def wanted(self, key: GroupKey, generation: int, place: Place) -> bool:
        """Return whether this group exists, or whether other ranks are waiting for this rank to create it.

        This method sends one message to the rank at whose store the group meets.
        """
        if self.find(key) is not None:
            return True
        _, _, members = key
        try:
            store = self._store_for(members, generation, place)
            return _meeting(key, place) in store.awaited(_ASK_S)
        except CollectiveFailed:  # Another caller detects and reports the failure of the world.
            return False

    def want(self, key: GroupKey, generation: int, place: Place) -> None:
        """Make the ranks that have called `form_when_wanted` create this group now.

        Raises:
            CollectiveFailed: the world has ended.
        """
        if self._store is not None and self._store.generation == generation:
            self._store.announce(_meeting(key, place), place.rank)

    def form_when_wanted(self, key: GroupKey, generation: int, place: Place) -> None:
        """Start a thread that takes part in creating this group as soon as another rank requests it.

        This method does not wait.
        """
        store = self._store

        def listen() -> None:
            assert store is not None
            with contextlib.suppress(CollectiveFailed):  # raised when the world ends
                store.listen_to(_meeting(key, place), place.rank, _LISTEN_S)
                self.form_ahead(key, generation, place)

        if store is not None and store.generation == generation:
            threading.Thread(target=listen, name="elastic-wanted", daemon=True).start()

    def engine(self, generation: int, place: Place, broken: Callable[[str], None]) -> Engine:
        """Return the engine for named collectives. This method creates it at the first call.

        Raises:
            CollectiveFailed: the generation has ended.
        """
        engine = self._engine
        if engine is not None and engine.generation == generation:
            return engine
        with self._forming:
            if self._engine is None or self._engine.generation != generation:
                if self._store is None or self._store.generation != generation:
                    raise _ended(generation)
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
        """Announce that this rank will submit no more collectives, at ``shutdown()`` or exit.

        Afterwards, no rank waits for this one.
        """
        store, place = self._store, self._place
        if self._engine is None and store is not None and place is not None and place.size > 1:
            self._engine = self._make_engine(store, place, lambda reason: None)
        if self._engine is not None:
            self._engine.leave()

    def _form(self, key: GroupKey, generation: int, place: Place) -> Collectives:
        purpose, device_type, members = key
        connecting = ConnectingGroup(
            self._store_for(members, generation, place),
            purpose=_named(purpose, members, place),
            rank=members.index(place.rank),
            size=len(members),
            device_type=device_type,
            bind_host=self._env.bind_host,
            timeout_s=self._env.timeout_s,
            collective_timeout_s=self._env.collective_timeout_s,
            native=self._env.native,
            apart=place.cross_size == place.size or _sends_to_other_hosts(key, place),
            agreed=_is_agreed(purpose),
        )
        self._connecting.add(connecting)
        try:
            self._cut_with(generation, connecting)
            group = connecting.connect()
            if _is_on_gpus(key) and self._env.driver is None and self._watching is None:
                self._watching = threads_at_exit.begin("elastic-watch", self._watch)
            return group
        except BaseException:
            if _is_on_gpus(key):
                self._unmade.append(cast(DeviceCollectives, connecting.group))
            raise
        finally:
            self._connecting.discard(connecting)

    def _store_for(self, members: tuple[int, ...], generation: int, place: Place) -> Store:
        """Return the store at which a group meets: that of its first rank if known, because rank 0 may be distant.

        Raises:
            CollectiveFailed: the generation has ended.
        """
        first = members[0]
        with self._forming:
            store = self._store
            if store is None or store.generation != generation:
                raise _ended(generation)
            if first == 0 or not self._addresses:
                return store
            if first not in self._nearby:
                if first == place.rank and self._promised:
                    raise _ended(generation)  # The listener is needed in the next world.
                listener = None
                if first == place.rank:
                    listener, self._listener = self._listener, None
                nearby = Store(
                    self._addresses[first],
                    listener,
                    self._env.timeout_s,
                    generation=store.generation,
                    secret=self._env.secret,
                    owner=first,
                )
                nearby.open()
                self._nearby[first] = nearby
                self._cut_with(store.generation, nearby)
            return self._nearby[first]

    def _cut_with(self, generation: int, abortable: Abortable) -> None:
        self._cuttable.append((generation, abortable))
        if self._over():  # The world failed before the object was registered.
            abortable.abort()

    def cut(self, generation: int) -> None:
        """Abort all collectives of this generation. Thread-safe. This method never blocks."""
        for of, abortable in list(self._cuttable):
            if of == generation:
                abortable.abort()

    def drain(self, timeout_s: float) -> int:
        """Wait, after `cut`, until no collective can write to a tensor.

        Returns the number of groups that did not end in time.

        Raises:
            DeviceLost: a GPU did not end its work within `DEVICE_S` seconds. Any later work on this GPU would wait
                forever.
        """
        made = dict(self._made)  # copied, because other threads may add groups
        late, on_gpus = 0, _on_gpus(made)
        for key, group in made.items():
            if not group.drain(timeout_s):
                late += 1
                if key in on_gpus and not on_gpus[key].ended(DEVICE_S - timeout_s):
                    raise _did_not_come_back()
        if not all(group.ended(DEVICE_S) for group in self._unmade):
            raise _did_not_come_back()
        return late

    def launches(self) -> list[messages.Launches]:
        """Return the numbers of collectives that each GPU group of this worker has launched, started and completed.

        This method does not wait. It is called in the link thread.
        """
        place, found = self._place, []
        for (purpose, _, members), group in _on_gpus(self._made).items():
            if place is None:
                continue
            counts = group.counts()
            if counts.launched:
                name = _named(purpose, members, place)
                found.append(messages.Launches(name, len(members), *counts))
        return found[: messages.LAUNCHES_LIMIT]

    def followed_since(self) -> float | None:
        """Return the launch time of the oldest collective that only GPU streams wait for, or None.

        This method must always be called from the same thread.

        No thread of this package waits for these collectives, so this method also fails the groups in which NCCL has
        detected an error or a timeout has expired.
        """
        found = [group.followed_since() for group in self.unsettled()]
        return min((at for at in found if at is not None), default=None)

    def _watch(self) -> None:
        """Call `followed_since` regularly.

        This method is used if there is no link thread: the training thread may be waiting inside CUDA.
        """
        while not self._closing.wait(_WATCH_S):
            self.followed_since()

    # ---- abort and close -------------------------------------------------------------------------

    def make_room(self) -> None:
        """Free the GPU memory of old communicators, before this worker reports that it is ready for the next world.

        A GPU has room for the communicators of only two worlds, so those of the world before the previous one must be
        freed.

        Raises:
            DeviceLost: the memory was not freed in time.
        """
        until = time.monotonic() + self._env.timeout_s
        if not all(group.freed(max(0.0, until - time.monotonic())) for group in self._buried):
            raise DeviceLost(
                f"the GPU did not release the communicators of an earlier world within {self._env.timeout_s:g} s,"
                " and has no room for those of the next world. This worker exits: check its GPU with nvidia-smi"
                " and dmesg"
            )
        # NCCL's timeout frees communicators that failed to connect, so wait only if there are too many of them.
        until += self._env.timeout_s
        self._unconnected = [each for each in self._unconnected if not each.freed(0.0)]
        for each in self._unconnected[:-MOST_UNCONNECTED]:
            if not each.freed(max(0.0, until - time.monotonic())):
                raise DeviceLost(
                    "the GPU did not release communicators that failed to connect within"
                    f" {2 * self._env.timeout_s:g} s, and has no room for those of the next world. This worker"
                    " exits: check its GPU with nvidia-smi and dmesg"
                )

    def retire(self) -> None:
        """Close the groups of the previous world.

        The work runs in a separate thread, so that it does not delay training. This method is called when the next
        world has formed: from then on, no member's GPU uses another member's memory.
        """
        with self._forming:
            made = dict(self._made)
            groups, engine = list(made.values()), self._engine
            stores = [*self._nearby.values(), *([] if self._store is None else [self._store])]
            unmade, self._unmade = self._unmade, []
            self._buried = list(_on_gpus(made).values())
            self._unconnected += unmade
            self._negotiates = engine is not None
            for purpose, device_type, members in made:
                if self._place is not None and len(members) == self._place.size:
                    self._used |= {purpose} & _AHEAD if device_type == "cpu" else set()
            self._made, self._store, self._engine, self._cuttable = {}, None, None, []
            self._addresses, self._nearby = (), {}

        def close() -> None:
            if engine is not None:
                engine.close()
            while unmade:
                # do not wait: their threads may take as long as NCCL's connection timeout
                unmade.pop().close(0.0)
            while groups:
                group = groups.pop()
                group.abort()
                group.close()
            for store in stores:
                store.close()

        if groups or unmade or stores or engine is not None:
            self._closer.close_later(close)

    def close(self) -> None:
        """Close the groups at exit. CPU groups keep their sockets until the process ends: see `WorkerRuntime.close`."""
        self._closing.set()
        self._closer.finish()
        if not self._out_of_torch(_FORM_S):
            for connecting in list(self._connecting):
                connecting.abort()
            self._out_of_torch(CLOSE_S)
        with self._forming:
            made = dict(self._made)
            on_gpus = _on_gpus(made)
            self._unmade += on_gpus.values()
            for key, group in made.items():
                if key not in on_gpus:
                    # Keep the group alive: its destructor would close its sockets, or wait for in-flight work.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        until = time.monotonic() + CLOSE_S
        for each in self._unmade:
            each.abort()
        for each in self._unmade:
            each.close(max(0.0, until - time.monotonic()))
        if not all(each.freed(0.0) for each in (*self._unmade, *self._buried, *self._unconnected)):
            threads_at_exit.leave_behind(CLOSE_S)
        if self._listener is not None:
            self._listener.close()
        self._take_ahead(None)

    def _out_of_torch(self, timeout_s: float) -> bool:
        """Stop the engine at exit, and wait until no thread of this package runs code of torch.

        Returns whether that was achieved within twice the timeout.
        """
        engine = self._engine
        # Stop the engine first, because its work may start a thread.
        return (engine is None or engine.rest(timeout_s)) and threads_at_exit.finish(timeout_s)

    def close_in_forked_child(self) -> None:
        """Close the sockets that a forked child has inherited. This method is called in the child."""
        if self._listener is not None:
            self._listener.close()
        self._take_ahead(None)
        for _, abortable in self._cuttable:
            abortable.close_in_forked_child()


def _addresses_of(world: messages.World) -> tuple[Address, ...]:
    """Return the addresses at which the members of a world can serve stores, by rank, or () if they are not known."""
    texts = [each.get(STORE, "") for each in world.metadata]
    try:
        return tuple(msgspec.json.decode(text, type=Address) for text in texts)
    except msgspec.MsgspecError:
        return ()


def _is_on_gpus(key: GroupKey) -> bool:
    _, device_type, members = key
    return device_type == "cuda" and len(members) > 1


def _sends_to_other_hosts(key: GroupKey, place: Place) -> bool:
    """Return whether rank 0 sends the state in this group, probably to other hosts: see `World.copies`."""
    purpose, _, members = key
    some = len(members) < place.size
    return purpose == STATE and some and members[0] == 0 and place.several_hosts


def _on_gpus(made: Mapping[GroupKey, Collectives]) -> dict[GroupKey, DeviceCollectives]:
    # Copy the dictionary first, because other threads add groups.
    return {
        key: cast(DeviceCollectives, each) for key, each in list(made.items()) if _is_on_gpus(key)
    }


def _ended(generation: int) -> CollectiveFailed:
    return CollectiveFailed(
        f"the world of generation {generation} has ended, so no group can be created in it; elastic.run continues in"
        " the next world"
    )


def _did_not_come_back() -> DeviceLost:
    return DeviceLost(
        f"the GPU of this worker did not respond within {DEVICE_S:g} s, because an aborted collective still runs on"
        " it. This worker exits: check its GPU with nvidia-smi and dmesg"
    )


def _meeting(key: GroupKey, place: Place) -> str:
    purpose, device_type, members = key
    return group_factory.meeting(_named(purpose, members, place), device_type, len(members))


def _named(purpose: str, members: tuple[int, ...], place: Place) -> str:
    whole_world = len(members) == place.size
    return purpose if whole_world else f"{purpose} of {','.join(map(str, members))}"


def _is_agreed(purpose: str) -> bool:
    """Return whether all ranks make the same calls of the group named ``purpose``.

    This is the case for named collectives, which are negotiated, and for gradients, which follow a plan that all ranks
    have compared.
    """
    return purpose == NAMED or purpose.startswith(GRADIENTS)
