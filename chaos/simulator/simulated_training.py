"""Training of simulated workers, with invariants across all workers that only a simulator can check.

A state consists of a number of steps, a cursor into the samples, and a hash of the history. Two states are therefore
equal only if the same worlds produced them. A collective belongs to one generation, and completes when all ranks have
entered it. The states of all ranks must be equal. Each rank contributes the sample on which it trained. When a worker
finishes, its state must contain every sample of every epoch exactly once, except for the repeats that pad the last
round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from elastic.chaos.simulator.interface import SimulatedJob
from elastic.driver.events import PublishWorld
from elastic.protocol.messages import GRADIENTS, Commit, Launches, Worker
from elastic.runtime.recovery import Recovery

LOOK_S = 1.0  # seconds in a collective after which the wait is reported


class State(NamedTuple):
    steps: int
    history: int
    cursor: int = 0  # number of samples trained so far, over all epochs
    spoilt: frozenset[Worker] = frozenset()  # workers whose wrong gradients are part of the state

    def sample(self, rank: int, epoch: int) -> int:
        """Return the number of the sample that this rank trains next, counted over all epochs.

        The last round of an epoch is padded with repeated samples.
        """
        before = self.cursor % epoch
        left = epoch - before
        return self.cursor + rank if rank < left else self.cursor - before + rank - left

    def after(
        self, generation: int, size: int, epoch: int, wrong: frozenset[Worker] = frozenset()
    ) -> State:
        """Return the state after one more step.

        Args:
            generation: number of the world.
            size: number of workers that take part.
            epoch: number of samples in an epoch.
            wrong: workers whose gradients are wrong.
        """
        left = epoch - self.cursor % epoch
        history = hash((self.history, generation, size, *sorted(wrong)))
        cursor = self.cursor + min(size, left)
        return State(self.steps + 1, history, cursor, self.spoilt | wrong)


class Collective:
    """One collective of one generation.

    It is complete when all ranks have entered it. Each rank detects this at a different time.
    """

    __slots__ = (
        "brought", "came", "done", "key", "ranks", "reported", "samples", "sent", "since", "values",
        "wrong",
    )  # fmt: skip

    def __init__(self, key: tuple[int, str, int], ranks: tuple[int, ...]) -> None:
        self.key = key
        self.ranks = ranks
        self.came: dict[int, Process] = {}
        self.samples: dict[int, int] = {}
        self.brought: State | None = None  # state of the first rank that entered the collective
        self.sent = State(0, 0)  # state that the lowest rank sends
        self.done: set[int] = set()
        self.since: dict[int, float] = {}
        self.reported: set[int] = set()  # ranks that have reported their wait
        # values that each rank of a sharded state sends to all ranks
        self.values: dict[int, Any] = {}
        self.wrong: frozenset[Worker] = frozenset()  # workers with wrong gradients

    @property
    def complete(self) -> bool:
        return len(self.came) == len(self.ranks)


class WaitReports(Protocol):
    def waits(self, collective: Collective) -> None:
        """Report to the driver in which collective the worker waits and for how long."""


class Process(Protocol):
    """Interface of a worker that training needs. See `elastic.chaos.simulator.simulated_worker`."""

    worker: Worker
    recovery: Recovery
    state: State
    saved: State
    frozen: bool
    gpu_hangs: bool
    inside: Collective | None

    @property
    def alive(self) -> bool: ...

    def poke(self) -> None:
        """Check again whether the condition that the process waits for is true."""

    @property
    def reports(self) -> WaitReports: ...


class Training:
    """Training of one job: its worlds, its collectives, and every committed state."""

    def __init__(self, sim: SimulatedJob) -> None:
        self.sim = sim
        # number of samples per epoch, which no world size divides
        self.epoch = 61 if sim.workers < 30 else 8 * sim.workers + 1
        self.worlds: dict[int, PublishWorld] = {}
        self.ranks: dict[int, dict[Worker, int]] = {}
        self._runs: dict[int, WorldRun] = {}
        # hosts whose workers cannot reach workers on other hosts
        self.cut_off: set[str] = set()
        self._collectives: dict[tuple[int, str, int], Collective] = {}
        self._stalled: list[Collective] = []
        self._ranks_of: dict[int, tuple[int, ...]] = {}  # all ranks of a world, by its size
        self._states: dict[Commit, State] = {}
        # for each history, the previous history and the samples of its last step
        self._made: dict[int, tuple[int, list[int]]] = {}
        self.on_gpus = False
        self.hung: set[int] = set()  # generations in which NCCL hangs on all ranks
        # hashes of corrupted histories, from which training must not continue
        self._spoilt: set[int] = set()
        # for each generation, the workers that will detect closed sockets
        self._losing: dict[int, set[Worker]] = {}

    def published(self, world: PublishWorld) -> None:
        self.worlds[world.generation] = world
        self.ranks[world.generation] = {m.worker: n for n, m in enumerate(world.members)}

    def entered(self, process: Process, metadata: dict[str, str]) -> None:
        """Check that all members of a world receive the same metadata, including their own.

        Args:
            process: a worker that enters the world.
            metadata: metadata that it has sent.
        """
        world = process.recovery.world
        assert world is not None
        expected = self.worlds[world.generation].metadata
        assert world.metadata == expected, f"{process.worker} received other metadata than rank 0"
        own = world.metadata[world.place.rank] if world.metadata else metadata
        assert own == metadata, f"{process.worker} sent {metadata}, but received {own}"
        assert world.source == (world.metadata or [{}])[0], "the source is not that of rank 0"

    def run_of(self, generation: int, size: int, step_s: float) -> WorldRun:
        if generation not in self._runs:
            self._runs[generation] = WorldRun(self, generation, size, step_s)
        return self._runs[generation]

    def _everyone(self, size: int) -> tuple[int, ...]:
        if size not in self._ranks_of:
            self._ranks_of[size] = tuple(range(size))
        return self._ranks_of[size]

    # ---- collectives -----------------------------------------------------------------------------------------------

    def collective(
        self, process: Process, purpose: str, number: int, ranks: tuple[int, ...] | None
    ) -> Collective:
        generation, place = process.recovery.generation, process.recovery.place
        members = self.worlds[generation].members
        mine = self.ranks[generation].get(process.worker)
        assert mine == place.rank, (
            f"{process.worker} has the rank of another worker in generation {generation}"
        )
        assert place.size == len(members), f"{process.worker} has a wrong world size"
        key = (generation, purpose, number)
        ranks = ranks or self._everyone(place.size)
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = Collective(key, ranks)
        same = found.ranks is ranks or found.ranks == ranks
        assert same, f"{key}: {process.worker} expects {ranks}, not {found.ranks}"
        return found

    def arrives(self, collective: Collective, rank: int, process: Process) -> None:
        assert rank not in collective.came, f"{process.worker} joined {collective.key} twice"
        if not collective.came:
            self.sim.clock.after(LOOK_S, self._look, collective)
        collective.came[rank] = process
        if rank == collective.ranks[0]:
            collective.sent = process.state
        collective.since[rank] = self.sim.clock.now
        if collective.key[1] == "gradients":
            collective.brought = collective.brought or process.state
            same = process.state == collective.brought
            assert same, (
                f"{process.worker} submitted {process.state}, other ranks {collective.brought}"
            )
            collective.samples[rank] = process.state.sample(rank, self.epoch)
        if collective.complete:
            self._try_to_complete(collective)

    def _try_to_complete(self, collective: Collective) -> None:
        clock = self.sim.clock
        peers = collective.came
        if not all(peer.alive for peer in peers.values()):
            return
        if collective.key[1] == "gradients" and (
            collective.key[0] in self.hung or any(peer.gpu_hangs for peer in peers.values())
        ):
            return
        hosts = {peer.worker.host for peer in peers.values()} if self.cut_off else set()
        if len(hosts) > 1 and hosts & self.cut_off:
            self._stalled.append(collective)
            return
        if collective.key[1] == "gradients":
            self._count(collective)
        spread = clock.random.choice((0.001, 0.03))
        for rank, peer in peers.items():
            clock.after(clock.between(0.0, spread), self._done, collective, rank, peer)

    def _done(self, collective: Collective, rank: int, peer: Process) -> None:
        collective.done.add(rank)
        peer.poke()

    def _count(self, collective: Collective) -> None:
        generation, size = collective.key[0], len(collective.ranks)
        before = collective.brought
        assert before is not None
        after = before.after(generation, size, self.epoch, collective.wrong)
        self.step_made(before, after, sorted(collective.samples.values()))

    def step_made(self, before: State, after: State, samples: list[int]) -> None:
        fresh = sorted(set(range(before.cursor, after.cursor)))
        assert fresh == [s for s in samples if s >= before.cursor], (
            f"trained {samples}, not {fresh}"
        )
        self._made.setdefault(after.history, (before.history, fresh))

    def _look(self, collective: Collective) -> None:
        """Report long waits in a collective to the driver, once a second, as a real worker's link thread does."""
        waits = False
        for rank, peer in collective.came.items():
            if peer.inside is collective and rank not in collective.done:
                waits = True
                peer.reports.waits(collective)
        if waits:
            self.sim.clock.after(LOOK_S, self._look, collective)

    # ---- GPUs ------------------------------------------------------------------------------------------------------

    def launches(self, process: Process, collective: Collective) -> list[Launches]:
        """Return a waiting worker's GPU progress: how many collectives were launched, started and completed."""
        if not self.on_gpus or collective.key[1] != "gradients" or len(collective.ranks) < 2:
            return []
        launched = collective.key[2] + 1
        arrived = launched - process.gpu_hangs
        done = launched - (process.recovery.place.rank not in collective.done)
        return [Launches(GRADIENTS, len(collective.ranks), launched, arrived, done)]

    # ---- corrupted memory ------------------------------------------------------------------------------------------

    def spoils(self, process: Process) -> None:
        """Mark the worker's current and committed states as corrupted."""
        self._spoilt |= {process.state.history, process.saved.history}

    def _is_corrupted(self, history: int) -> bool:
        while history not in self._spoilt and history in self._made:
            history = self._made[history][0]
        return history in self._spoilt

    # ---- lost peers ------------------------------------------------------------------------------------------------

    def peers_lose(self, process: Process, generation: int) -> None:
        """Close a worker's connections to its peers in one generation.

        The collectives in which the peers are blocked then fail at different times.
        """
        world = self.worlds.get(generation)
        if world is None:
            return
        notified = self._losing.setdefault(generation, set())
        if len(notified) == len(world.members):
            return
        clock = self.sim.clock
        for member in world.members:
            worker = member.worker
            if worker not in notified and worker != process.worker:
                apart = worker.host in self.cut_off or process.worker.host in self.cut_off
                if apart and worker.host != process.worker.host:
                    # The network is cut between the two, so only the driver can notify this peer.
                    continue
                notified.add(worker)
                peer = self.sim.processes.get(worker)
                if peer is not None:
                    clock.after(clock.between(0.0, 0.04), peer.peer_disconnected, generation)

    def cut(self, host: str) -> None:
        self.cut_off.add(host)

    def heal(self, host: str) -> None:
        self.cut_off.discard(host)
        stalled, self._stalled = self._stalled, []
        for collective in stalled:
            self._try_to_complete(collective)

    # ---- invariants ------------------------------------------------------------------------------------------------

    def labelled(self, process: Process) -> None:
        """Check that workers with the same commit have the same state."""
        commit = process.recovery.newest
        assert commit is not None
        known = self._states.setdefault(commit, process.saved)
        assert known == process.saved, f"{process.worker} holds another state as {commit}"

    def completed(self, process: Process, steps: int) -> None:
        """Check that a worker that has returned from elastic.run has trained every sample exactly once."""
        assert process.state.steps == steps, f"{process.worker} finished after {process.state}"
        history = process.state.history
        assert not self._is_corrupted(history), (
            f"{process.worker} has finished with a corrupted state"
        )
        for worker in process.state.spoilt:
            assert worker not in self.sim.named or worker in self.sim.excused, (
                f"{process.worker} has finished with wrong gradients of {worker}, which was named"
            )
        seen: list[int] = []
        while history in self._made:
            history, samples = self._made[history]
            seen += samples
        assert sorted(seen) == list(range(process.state.cursor)), (
            f"{process.worker} has trained {len(seen)} samples, not each of {process.state.cursor} once"
        )


class WorldRun:
    """Members of one generation in lockstep: one event is one step of the whole world, whatever its size."""

    def __init__(self, training: Training, generation: int, size: int, step_s: float) -> None:
        self.training = training
        self.generation = generation
        self.size = size
        self.step_s = step_s
        self.joined: dict[Process, Callable[[], bool]] = {}
        self._due = False

    def join(self, process: Process, commits: Callable[[], bool]) -> None:
        """Add a process to the world.

        Args:
            process: the worker.
            commits: function that makes one step of this worker. It returns False if the worker must leave the
                lockstep.
        """
        self.joined[process] = commits
        if not self._due and len(self.joined) == self.size:
            self._due = True
            self.training.sim.clock.after(self.step_s, self._step)

    def leave(self, process: Process) -> None:
        self.joined.pop(process, None)

    def _step(self) -> None:
        self._due = False
        if len(self.joined) < self.size:
            return
        clock = self.training.sim.clock
        generation = self.generation
        first = next(iter(self.joined))
        before = first.state
        for process in self.joined:
            if process.frozen or not process.alive:
                # No step is possible. Check again later, until the driver has notified the other workers.
                self._due = True
                clock.after(self.step_s, self._step)
                return
            same = process.state is before or process.state == before
            assert same, f"{process.worker} trains on another state"
        epoch = self.training.epoch
        after = before.after(generation, self.size, epoch)
        samples = sorted(before.sample(rank, epoch) for rank in range(self.size))
        self.training.step_made(before, after, samples)
        stopped = []
        for process, made in self.joined.items():
            process.state = after
            if not made():
                stopped.append(process)
        for process in stopped:
            self.leave(process)
        for process in stopped:
            process.poke()
        if len(self.joined) == self.size:
            self._due = True
            clock.after(self.step_s, self._step)
