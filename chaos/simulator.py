"""Runs the real Membership and many real Recovery machines on a virtual clock. A run is a function of its seed.

    python -m elastic.chaos.simulator --seed 7 --workers 6

Messages take random times, in order on each connection; collectives complete at each rank in its own time; workers
are killed, frozen, asked to leave, raise exceptions, and hosts come and go. Safety is asserted after every event; when
the faults have stopped, the job must end within a bound. No real clock, process, socket or thread.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from elastic import protocol
from elastic.chaos import simulated_faults
from elastic.chaos.simulated_worker import Collective, SimulatedWorker, State, newest
from elastic.driver.events import (
    Action,
    BreakWorld,
    CallOffChange,
    EndJob,
    Event,
    FinishWorld,
    HostsChanged,
    KillWorker,
    LetGo,
    PrepareChange,
    PublishWorld,
    RejectWorker,
    StartWorker,
    StopMembersAt,
    TimePassed,
    WelcomeWorker,
    WorkerDisconnected,
    WorkerExited,
)
from elastic.driver.journal import describe
from elastic.driver.membership import Membership
from elastic.driver.settings import Settings
from elastic.driver.wording import event_of
from elastic.protocol import Commit, Message, Worker
from elastic.recovery import Phase

FAULTS_S = 10.0  # virtual seconds in which faults happen
LIVENESS_S = 3000.0  # virtual seconds after them in which the job must end


@dataclass
class Outcome:
    """How a run ended."""

    code: int
    reason: str
    generation: int
    virtual_s: float
    faults: list[str] = field(default_factory=list)


class Violation(AssertionError):
    """An invariant does not hold. Carries the seed and the latest events."""


class Simulation:
    """One job. ``faults`` is how many are injected; ``mild`` ones never take the last holder of the state."""

    def __init__(
        self, seed: int, *, workers: int = 5, steps: int = 200, faults: int = 8, mild: bool = False
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = steps
        self.hosts = {f"h{n}": 2 for n in range((workers + 1) // 2)}
        settings = Settings(
            np=workers, workers_min=min(2, workers), workers_max=workers, elastic=True
        )
        self.membership = Membership(settings)
        self.processes: dict[Worker, SimulatedWorker] = {}  # live ones
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._reaches: dict[
            tuple[Worker, bool], float
        ] = {}  # last arrival on each connection, by direction
        self._published: dict[int, PublishWorld] = {}
        self._collectives: dict[tuple[int, str, int], Collective] = {}
        self._states: dict[Commit, State] = {}
        self._alarm: float | None = None
        self._end: EndJob | None = None
        self._ended_at = 0.0
        self._stopping = False  # all members are to stop at one check
        self.aimed = 0  # kills that wait for a commit
        self._story: list[tuple[float, Event, list[Action]]] = []
        self.faults: list[str] = []  # those that were injected
        self.at(0.0, lambda: self.hear(HostsChanged(self.hosts)))
        kinds = simulated_faults.MILD if mild else simulated_faults.EVERY
        for _ in range(faults):
            self.at(self.between(0.0, FAULTS_S), lambda: self.random.choice(kinds)(self))
        self.at(FAULTS_S, lambda: self.hear(HostsChanged(self.hosts)))

    # ---- the clock -------------------------------------------------------------------------------------------------

    def at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def between(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def run(self) -> Outcome:
        """To the end of the job and of its workers. Raises Violation."""
        try:
            while self._events and self._events[0][0] < FAULTS_S + LIVENESS_S:
                self.now, _, happen = heapq.heappop(self._events)
                happen()
            assert self._end is not None, "the job did not end after the faults had stopped"
            return Outcome(
                self._end.code, self._end.reason, len(self._published), self._ended_at, self.faults
            )
        except AssertionError as error:
            raise Violation(f"seed {self.seed}: {error}\n{self.story(last=30)}") from error

    def story(self, last: int | None = None) -> str:
        """What the driver heard and did, readable."""
        lines = []
        for now, event, actions in self._story[-last if last else 0 :]:
            lines.append(f"{now:9.3f}  {describe(event)}")
            lines += [f"{'':9}  -> {describe(action)}" for action in actions]
        return "\n".join(lines)

    # ---- the driver's loop -----------------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        if self._end is not None:
            return
        actions = self.membership.handle(event, self.now)
        self._story.append((self.now, event, actions))
        self.membership.check()
        for action in actions:
            if isinstance(action, PublishWorld):
                self._check_published(action, [a.worker for a in actions if isinstance(a, LetGo)])
            self._do(action)
        self._alarm = self.membership.next_deadline()
        if self._alarm is not None:
            self.at(self._alarm, self._ring)

    def _ring(self) -> None:
        if self._alarm is not None and self._alarm <= self.now:
            self._alarm = None
            self.hear(TimePassed())

    def _do(self, action: Action) -> None:
        match action:
            case StartWorker(worker):
                if worker.incarnation > 1 and self.random.random() < 0.02:
                    self._post(WorkerExited(worker, 127, reason="no such program"))
                    return
                process = self.processes[worker] = SimulatedWorker(self, worker)
                self.at(self.now + self.between(0.0, 0.1), process.begin)
            case KillWorker(worker):
                self.at(self.now + self.between(0.0, 0.01), lambda: self._kill(worker))
            case BreakWorld(generation, members, reason):
                # Nobody is frozen for as long as that: then it was held where it could not be reached.
                assert "did not reach check" not in reason, reason
                self._stopping = False
                self._send(members, protocol.Broken(generation, reason))
            case PublishWorld(generation, members, store, holders, commit, reason):
                self._published[generation] = action
                for member in members:
                    world = protocol.World(generation, member.place, store, holders, commit, reason)
                    self._send([member.worker], world)
            case WelcomeWorker(worker, place, newcomer, elastic):
                self._send([worker], protocol.Welcome(place, newcomer, elastic))
            case PrepareChange(generation, change, members):
                self._send(members, protocol.Prepare(generation, change))
            case StopMembersAt(generation, change, check, members):
                self._stopping = True
                self._send(members, protocol.StopAt(generation, change, check))
            case CallOffChange(generation, change, members):
                self._stopping = False
                self._send(members, protocol.Proceed(generation, change))
            case LetGo(worker, reason):
                self._send([worker], protocol.Leave(reason))
            case RejectWorker(worker):
                raise AssertionError(f"{worker} was rejected, but all states have one layout")
            case FinishWorld(generation, members):
                self._send(members, protocol.Finish(generation))
            case EndJob(code, reason):
                self._end, self._ended_at = action, self.now
                if code:
                    self._send(list(self.processes), protocol.End(reason))

    def _kill(self, worker: Worker) -> None:
        if worker in self.processes:
            self.processes[worker].die(-9)

    # ---- the network -----------------------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self.at(self.now + self.between(0.0, 0.003), lambda: self.hear(event))

    def _arrival(self, worker: Worker, inward: bool) -> float:
        delay = self.random.choice((0.0005, 0.001, 0.02))
        time = max(self.now + self.between(0.0, delay), self._reaches.get((worker, inward), 0.0))
        self._reaches[worker, inward] = time
        return time

    def _send(self, workers: list[Worker], message: Message) -> None:
        for worker in workers:
            process = self.processes.get(worker)
            if process is not None:
                self.at(self._arrival(worker, False), partial(process.receive, message))

    def from_worker(self, process: SimulatedWorker, message: Message) -> None:
        process.outbox.append(message)

        def arrive() -> None:
            if process.outbox and process.outbox[0] is message:
                self.hear(event_of(process.worker, process.outbox.pop(0)))

        self.at(self._arrival(process.worker, True), arrive)

    def exited(self, process: SimulatedWorker, code: int) -> None:
        """The driver hears everything that it still said, then of its exit, or first that the connection is gone."""
        worker = process.worker
        del self.processes[worker]
        if self.random.random() < 0.5:
            self._post(WorkerDisconnected(worker))

        def reaped() -> None:
            while process.outbox:
                self.hear(event_of(worker, process.outbox.pop(0)))
            self.hear(WorkerExited(worker, code))

        self.at(self.now + self.between(0.0, 0.02), reaped)

    def peers_lose(self, process: SimulatedWorker, generation: int) -> None:
        """Its sockets of this generation are closed: blocked collectives fail at the others, each in its time."""
        world = self._published.get(generation)
        for member in world.members if world else []:
            peer = self.processes.get(member.worker)
            if peer is not None and peer is not process:
                self.at(self.now + self.between(0.0, 0.04), partial(peer.peer_gone, generation))

    # ---- collectives, and what must always hold --------------------------------------------------------------------

    def collective(
        self, process: SimulatedWorker, key: tuple[int, str, int], ranks: tuple[int, ...]
    ) -> Collective:
        members = self._published[key[0]].members
        place = process.recovery.place
        assert members[place.rank].worker == process.worker, f"{process.worker} has another's rank"
        assert place.size == len(members), f"{process.worker} sees a world of another size"
        found = self._collectives.setdefault(key, Collective(ranks))
        assert found.ranks == ranks, f"{key}: {process.worker} expects {ranks}, not {found.ranks}"
        return found

    def arrives(self, collective: Collective, rank: int, process: SimulatedWorker) -> None:
        assert rank not in collective.came, f"{process.worker} came twice to one collective"
        collective.came[rank] = process
        if len(collective.came) < len(collective.ranks):
            return
        if not all(peer.alive for peer in collective.came.values()):
            return

        def done(rank: int, peer: SimulatedWorker) -> None:
            collective.done.add(rank)
            peer.poke()

        spread = self.random.choice((0.001, 0.03))
        for rank, peer in collective.came.items():
            self.at(self.now + self.between(0.0, spread), partial(done, rank, peer))

    def labelled(self, process: SimulatedWorker) -> None:
        """Equal commits are equal states."""
        commit = process.recovery.newest
        assert commit is not None
        known = self._states.setdefault(commit, process.saved)
        assert known == process.saved, f"{process.worker} holds another state as {commit}"

    def commits(self, process: SimulatedWorker) -> None:
        """Where the state is at its most delicate: some have committed, and others have not."""
        if self.aimed:
            self.aimed -= 1
            self.at(self.now + self.between(0.0, 0.02), lambda: simulated_faults.kill_one(self))

    def completed(self, process: SimulatedWorker) -> None:
        assert process.state[0] == self.steps, f"{process.worker} finished after {process.state}"

    def _check_published(self, world: PublishWorld, let_go: list[Worker]) -> None:
        members = {member.worker for member in world.members}
        for process in self.processes.values():
            training = process.recovery.phase is Phase.TRAINING and process.recovery.running
            fenced = self.membership.roster.get(process.worker)
            if training and fenced is not None and not fenced.killed_for:
                assert process.worker not in members, f"{process.worker} still trains"
                assert fenced.stage.value == "dismissed", f"{process.worker} still trains"
        held = [
            (commit, process)
            for process in self.processes.values()
            if (process.worker in members or process.worker in let_go)
            and (commit := newest(process)) is not None
        ]
        if self._stopping:
            before = {member.worker for member in self._published[world.generation - 1].members}
            stopped = len(members & before)
            assert world.holders == stopped, f"{stopped} stopped, {world.holders} in one place"
            self._stopping = False
        source = self.processes.get(world.members[0].worker)
        if held and source is not None:
            commit, best = max(held, key=lambda pair: pair[0])
            assert source.saved[0] >= best.saved[0], f"commit {commit} of {best.worker} is lost"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m elastic.chaos.simulator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    flags = parser.parse_args()
    sim = Simulation(flags.seed, workers=flags.workers, steps=flags.steps, faults=flags.faults)
    outcome = sim.run()
    print(sim.story())
    print(outcome)


if __name__ == "__main__":
    main()
