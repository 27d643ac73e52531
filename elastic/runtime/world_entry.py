"""Entry of this worker into worlds formed by the driver, and into static worlds without a driver."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import msgspec

from elastic.errors import CollectiveFailed
from elastic.failpoints import failpoint
from elastic.monitoring import step_count
from elastic.protocol import messages
from elastic.protocol.messages import Address
from elastic.rendezvous import find_rank0
from elastic.rendezvous.store import Store
from elastic.runtime.process_groups import STORE
from elastic.runtime.recovery import Action, Phase, Recovery
from elastic.runtime.session import Session


class DriverWorlds:
    """Entry into the worlds that the driver forms.

    All methods except `restate` must be called from the training thread.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._layout: messages.Layout | None = None  # last Layout message sent
        # last StepInput message sent
        self._step_input: messages.StepInput | None = None

    def first(self) -> None:
        """Wait for the first world. If a world is already training, return immediately, with a provisional place."""
        with self._session.lock:
            if self._session.recovery.newcomer:
                return
        self._wait("")

    def next(
        self,
        layout: str,
        text: str,
        shards: messages.ShardsHeld | None = None,
        kept: Sequence[messages.KeptCommit] = (),
        metadata: Mapping[str, str] | None = None,
        source: Mapping[str, str] | None = None,
    ) -> messages.World:
        """Report that this worker is ready, and wait for a world. This method is called under ``elastic.run``.

        Args:
            layout: digest of the state's layout.
            text: the layout itself. It is sent only once.
            shards: shards that this worker holds, or None if its state is not sharded.
            kept: older commits that this worker holds copies of.
            metadata: values that all members of the next world receive, by name. See `WorkerRuntime.start_exchange`.
            source: first values that this worker broadcasts if it is the source of the state, by the name of the
                broadcast. See `WorkerRuntime.copy_group`. Sent only if there is metadata.

        Raises:
            PeerLost: the world failed. `Session.raise_over` lists the other errors.
        """
        if self._layout is None or layout != self._layout.digest:
            self._layout = messages.Layout(layout, text)
            self._session.send(self._layout)
        return self._wait(layout, shards, kept, metadata, source)

    def restate(self) -> None:
        """Send the layout and the step input again, to another driver or on another connection.

        This method is called in the link thread.
        """
        for message in (self._layout, self._step_input):
            if message is not None:
                self._session.send(message)

    def report_step_input(self, kind: bytes) -> None:
        """Send a description of this worker's batches to the driver, for workers that join later."""
        if kind and kind != self._session.recovery.step_input:
            self._step_input = messages.StepInput(kind)
            self._session.send(self._step_input)

    def _wait(
        self,
        layout: str,
        shards: messages.ShardsHeld | None = None,
        kept: Sequence[messages.KeptCommit] = (),
        metadata: Mapping[str, str] | None = None,
        source: Mapping[str, str] | None = None,
    ) -> messages.World:
        """Report that this worker is ready, wait for a world and enter it.

        If no world follows, raise the reason as an error.
        """
        session = self._session
        session.groups.make_room()
        store = session.groups.listen()
        session.groups.connect_ahead()
        sent = _sendable(metadata or {}, store, session.recovery.place.size)
        first = _sendable_source(source or {}) if sent else {}

        def ready(recovery: Recovery) -> list[Action]:
            session.phases.mark("ready", time.monotonic())
            step = step_count.state_step
            return recovery.wait_for_world(store, layout, shards, kept, step, sent, first)

        session.update(ready)
        failpoint("rendezvous")
        session.wait_while(Phase.WAITING, "to form a world")
        with session.lock:
            phase, world = session.recovery.phase, session.recovery.world
        if phase is Phase.OVER:
            session.raise_over()
        if phase is Phase.OUTSIDE:  # The first world has started without this worker.
            place = session.recovery.place
            return messages.World(
                0, place, Address("", 0), holders=0, commit=None, reason="newcomer"
            )
        assert world is not None
        session.groups.retire()
        _open(session, world)
        return world


class FixedWorlds:
    """Entry into worlds of a fixed size, without a driver."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def form(
        self, store: Store, rank: int, size: int, local_rank: int | None, generation: int
    ) -> None:
        """Form a world of all ranks that connect to ``store``, the store of the previous world or rendezvous.

        Raises:
            CollectiveFailed: ranks did not arrive in time.
        """
        groups = self._session.groups
        mine = groups.listen() if rank == 0 else None
        timeout_s = self._session.env.collective_timeout_s
        place, address = find_rank0.arrive(store, rank, size, local_rank, mine, timeout_s)
        groups.retire()
        self.begin(messages.World(generation, place, address, 0, None, "no driver"))

    def begin(self, world: messages.World) -> None:
        """Enter the given world.

        Rank 0 serves the world's store at the given address, or at the address to which it is already bound.
        """
        if world.place.rank == 0:
            self._session.groups.listen(world.store)
        with self._session.lock:
            self._session.recovery = Recovery(
                phase=Phase.TRAINING,
                generation=world.generation,
                place=world.place,
                provisional=False,
                world=world,
            )
        _open(self._session, world)

    def next(self) -> None:
        """Form another world of the same ranks, when ``init()`` is called after ``shutdown()``.

        Raises:
            CollectiveFailed: not all ranks have called ``init()`` again in time.
        """
        store, recovery = self._session.groups.store, self._session.recovery
        assert store is not None, "a fixed world has a store"
        place = recovery.place
        try:
            self.form(store, place.rank, place.size, place.local_rank, recovery.generation + 1)
        except CollectiveFailed as error:
            raise CollectiveFailed(
                f"not all of the {place.size} ranks called init() again: {error}. Call shutdown() and init() the same"
                " number of times on every rank"
            ) from error


def _sendable(metadata: Mapping[str, str], store: Address, size: int) -> dict[str, str]:
    """Return the metadata that the driver accepts, with the address of this worker's store if there is any.

    The members of a world exchange a value themselves if one of them does not send it. In a large world, none is sent:
    the driver would discard it, and the agents could not merge the workers' reports.

    Args:
        metadata: the values, by name.
        store: address of this worker's store.
        size: size of the last world.
    """
    if size > messages.MEMBERS_WITH_METADATA:
        return {}
    sent = {name: text for name, text in metadata.items() if len(text) <= messages.METADATA_LIMIT}
    if sent:
        sent[STORE] = msgspec.json.encode(store).decode()
    return sent if len(sent) <= messages.METADATA_VALUES else {}


def _sendable_source(source: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a source that the driver accepts."""
    return {name: text for name, text in source.items() if len(text) <= messages.SOURCE_LIMIT}


def _open(session: Session, world: messages.World) -> None:
    session.groups.open(world, functools.partial(session.mark_broken, world.generation))
