"""A worker on the virtual clock: a real Recovery machine under a model of the run loop, its links and its collectives.

The training thread is a generator that yields what it waits for: seconds, or a condition that is looked at again
whenever something happens to this worker. State is the number of steps and a hash of how they came about, so that two
states are equal only if the same worlds made them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from elastic import protocol, recovery
from elastic.errors import LeaveRequested, PeerLost, WorldChanging
from elastic.protocol import Address, Commit, Message, Worker
from elastic.recovery import Cut, Phase, Recovery, Send, Verdict

if TYPE_CHECKING:
    from elastic.chaos.simulator import Simulation

HOLD_S = 60.0
Thread = Generator[float | Callable[[], bool], None, None]
State = tuple[int, int]  # steps, hash of the history


class UserError(Exception):
    """What user code raises."""


class Collective:
    """One collective of one generation: done when all ranks have come, each hearing of it at its own time."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.came: dict[int, SimulatedWorker] = {}
        self.sent: State = (0, 0)  # by the first of the ranks
        self.done: set[int] = set()


class SimulatedWorker:
    """One process from its start to its exit."""

    def __init__(self, sim: Simulation, worker: Worker) -> None:
        self.sim = sim
        self.worker = worker
        self.recovery = Recovery()
        self.alive = True
        self.state: State = (
            0,
            sim.random.getrandbits(32),
        )  # everybody starts with weights of its own
        self.saved = self.state
        self.outbox: list[Message] = []
        self.frozen = False
        self.will_raise = ""
        self._welcomed = False
        self._unread: list[Message] = []  # while it is frozen
        self._failed: set[int] = set()  # generations of which a peer is gone
        self._collectives = 0
        self._waits_for: Callable[[], bool] = lambda: False
        self._thread = self._life()

    # ---- the process -----------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something happened: go on if that is what the training thread waits for."""
        while self.alive and not self.frozen and self._waits_for():
            try:
                awaited = next(self._thread)
            except StopIteration:
                return
            if callable(awaited):
                self._waits_for = awaited
            else:
                until = self.sim.now + awaited
                self._waits_for = lambda until=until: self.sim.now >= until  # type: ignore[misc]
                self.sim.at(until, self.poke)

    def begin(self) -> None:
        self._waits_for = lambda: True
        self.poke()

    def die(self, code: int) -> None:
        if self.alive:
            self.alive = False
            self.sim.peers_lose(self, self.recovery.generation)
            self.sim.exited(self, code)

    def thaw(self) -> None:
        """SIGCONT."""
        self.frozen = False
        unread, self._unread = self._unread, []
        for message in unread:
            self.receive(message)
        self.poke()

    def receive(self, message: Message) -> None:
        """The link thread."""
        if self.frozen:
            self._unread.append(message)
        elif self.alive:
            self._welcomed |= isinstance(message, protocol.Welcome)
            self._perform(self.recovery.receive(message))
            self.poke()

    def peer_gone(self, generation: int) -> None:
        self._failed.add(generation)
        self.poke()

    def _perform(self, actions: list[recovery.Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.sim.from_worker(self, message)
                case Cut(generation):
                    self.sim.peers_lose(self, generation)

    # ---- what a script does ----------------------------------------------------------------------------------------

    def _life(self) -> Thread:
        code = 0
        yield self.sim.between(0.2, 2.0)  # imports
        self.sim.from_worker(self, protocol.Hello(self.worker, 1))
        yield lambda: self._welcomed
        try:
            if not self.recovery.newcomer:
                yield from self._wait_for_world("")
            yield self.sim.between(0.0, 1.0)  # the model, the data
            self.recovery.enter()
            yield from self._run()
            self.recovery.leave()
            self.sim.completed(self)
        except LeaveRequested:
            code = 0 if isinstance(self.recovery.over, protocol.Leave) else 1
        except UserError as error:
            self._perform(self.recovery.raised(str(error), "Traceback ..."))
            code = 1
        yield self.sim.between(0.0, 0.5)
        self.die(code)

    def _run(self) -> Thread:
        while True:
            try:
                yield from self._enter_world()
                yield from self._train()
                self._perform(self.recovery.returned())
                yield lambda: self.recovery.phase is not Phase.RETURNED
                self._raise_if_broken()
                return
            except PeerLost:
                yield self.sim.between(0.0, 0.05)
                self.state = self.saved
            except WorldChanging:
                self._commit()

    def _wait_for_world(self, layout: str) -> Thread:
        self._perform(self.recovery.wait_for_world(Address("127.0.0.1", 1), layout))
        yield lambda: self.recovery.phase is not Phase.WAITING
        self._collectives = 0
        if self.recovery.phase is Phase.OVER:
            raise LeaveRequested(self.recovery.reason)

    def _enter_world(self) -> Thread:
        yield from self._wait_for_world("model.weight float32 [10]")
        world = self.recovery.world
        assert world is not None
        rank, size = world.place.rank, world.place.size
        lacking = tuple(range(max(1, world.holders), size))
        if world.holders == 0:
            self.saved = self.state
        if lacking and (rank == 0 or rank in lacking):
            copying = self._collective("state", 0, (0, *lacking))
            yield from self._arrive(copying)
            if rank:
                self.state = self.saved = copying.sent
        self.recovery.adopt()
        self.sim.labelled(self)

    def _train(self) -> Thread:
        while self.state[0] < self.sim.steps:
            yield self.sim.between(0.002, 0.03)
            if self.will_raise:
                raise UserError(self.will_raise)
            yield from self._arrive(self._collective("gradients", self._collectives))
            self._collectives += 1
            if self._collectives == 1:
                self.sim.from_worker(self, protocol.Resumed(self.recovery.generation, {}))
            steps, history = self.state
            place = self.recovery.place
            self.state = (steps + 1, hash((history, self.recovery.generation, place.size)))
            if steps % 4 == 3:
                self._commit()
            if steps % 2:
                yield from self._check()

    def _commit(self) -> None:
        self.saved = self.state
        self.recovery.committed()
        self.sim.labelled(self)
        self.sim.commits(self)

    def _check(self) -> Thread:
        verdict = self.recovery.arrive()
        if verdict is Verdict.HOLD:
            until = self.sim.now + HOLD_S
            self.sim.at(until, self.poke)
            yield lambda: self.recovery.verdict() is not Verdict.HOLD or self.sim.now >= until
            if self.recovery.verdict() is Verdict.HOLD:
                self.recovery.release()
            verdict = self.recovery.verdict()
        if verdict is Verdict.STOP:
            raise WorldChanging
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self.recovery.phase is Phase.BROKEN:
            raise PeerLost(self.recovery.reason)
        if self.recovery.phase is Phase.OVER:
            raise LeaveRequested(self.recovery.reason)

    # ---- collectives -----------------------------------------------------------------------------------------------

    def _collective(
        self, purpose: str, number: int, ranks: tuple[int, ...] | None = None
    ) -> Collective:
        self._raise_if_broken()
        place = self.recovery.place
        key = (self.recovery.generation, purpose, number)
        return self.sim.collective(self, key, ranks or tuple(range(place.size)))

    def _arrive(self, collective: Collective) -> Thread:
        rank, generation = self.recovery.place.rank, self.recovery.generation
        if rank == collective.ranks[0]:
            collective.sent = self.state
        self.sim.arrives(collective, rank, self)

        def awaited() -> bool:
            broken = self.recovery.phase is not Phase.TRAINING or generation in self._failed
            return rank in collective.done or broken

        yield awaited
        if rank in collective.done:
            return
        self._perform(self.recovery.fail(generation, "connection closed by peer"))
        raise PeerLost("connection closed by peer")


def newest(worker: SimulatedWorker) -> Commit | None:
    """What it could bring into the next world."""
    here = worker.alive and worker.recovery.running and worker.recovery.phase is not Phase.OVER
    return worker.recovery.newest if here else None
