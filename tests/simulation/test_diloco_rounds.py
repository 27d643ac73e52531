"""Rounds of DiLoCo with drawn losses and joins: all workers make the same collectives and apply the same merges.

Workers take inner steps at their own pace. A collective completes once all members of its world have started it. The
loss of a worker breaks all collectives of its world, but one that all members had started may have completed on some
of the survivors. A survivor enters the next world at its next commit.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from elastic.diloco.rounds import Action, ApplyMean, CompareReports, Rounds, StartMean, TakeMerges
from elastic.diloco.schedule import RoundSchedule

SEEDS = 1000
LAST = 60  # position at which training ends


@dataclass
class Collective:
    """One collective of a world: what each member has started and its outer parameters then, by worker."""

    started: dict[int, Action] = field(default_factory=dict)
    outer: dict[int, list[Any]] = field(default_factory=dict)


@dataclass
class World:
    number: int
    members: list[int]
    collectives: list[Collective] = field(default_factory=list)
    broken: bool = False


@dataclass
class VirtualWorker:
    number: int
    rounds: Rounds
    # Merges that the outer parameters contain, as (fragment, number of the merge, collective).
    outer: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)
    own_steps: int = 0
    calls: int = 0  # collectives started in this world
    mean: int | None = None  # index of the collective of the pending fragment
    actions: Generator[Action, Any, None] | None = None
    waits: Action | None = None  # collective whose result this worker waits for
    parked: bool = False  # waits for the next world
    entering: bool = True  # has not entered this world yet


class Simulation:
    def __init__(self, seed: int, machine: type[Rounds]) -> None:
        self.draw = random.Random(seed)
        every = self.draw.randint(1, 8)
        fragments = self.draw.randint(1, min(3, every))
        delay = self.draw.randrange(every // fragments)
        self.schedule = RoundSchedule(every, fragments, delay)
        self.machine = machine
        self.workers = {n: VirtualWorker(n, machine(self.schedule)) for n in range(3)}
        self.world = World(1, [0, 1, 2])
        self.changes = 6
        # Fragment and step of sends that a pending merge deferred to the fragment's next round.
        self.deferred: set[tuple[int, int]] = set()
        self.newcomers: list[VirtualWorker] = []

    def run(self) -> None:
        for _ in range(20_000):
            if all(self.ended(each) for each in self.workers.values()):
                break
            ready = [each for each in self.workers.values() if self.can_act(each)]
            assert ready, "all wait for each other"
            if self.changes and self.draw.random() < 0.02:
                self.changes -= 1
                self.change()
            else:
                self.act(self.draw.choice(ready))
        else:
            raise AssertionError("training does not end")
        self.check_end()

    def ended(self, worker: VirtualWorker) -> bool:
        at_end = worker.rounds.position >= LAST and not worker.entering
        return worker.actions is None and at_end and not self.world.broken

    # ---- actions of workers

    def can_act(self, worker: VirtualWorker) -> bool:
        if worker.parked or self.ended(worker):
            return False
        return worker.waits is None or self.world.broken or self.complete(worker)

    def complete(self, worker: VirtualWorker) -> bool:
        index = worker.mean if isinstance(worker.waits, ApplyMean) else worker.calls - 1
        assert index is not None
        return len(self.world.collectives[index].started) == len(self.world.members)

    def act(self, worker: VirtualWorker) -> None:
        if worker.waits is not None:
            action, worker.waits = worker.waits, None
            # Of a broken world, a collective that all had started completes on some ranks only.
            done = self.complete(worker) and (not self.world.broken or self.draw.random() < 0.5)
            if done:
                self.advance(worker, self.result(worker, action))
            else:
                self.fail(worker)
        elif worker.actions is None:
            world = self.world.number
            worker.own_steps += not worker.entering
            rounds = worker.rounds
            worker.actions = rounds.enter(world) if worker.entering else rounds.step(world)
            self.advance(worker, None)
        else:
            raise AssertionError("a worker that computes was stopped")

    def advance(self, worker: VirtualWorker, answer: Any) -> None:
        """Perform actions until one has to wait."""
        assert worker.actions is not None
        while True:
            try:
                action = worker.actions.send(answer)
            except StopIteration:
                worker.actions, worker.entering = None, False
                self.commit(worker)
                return
            answer = None
            if not isinstance(action, ApplyMean):
                if self.world.broken:
                    self.fail(worker)
                    return
                self.start(worker, action)
            if not isinstance(action, StartMean):
                worker.waits = action
                return

    def start(self, worker: VirtualWorker, action: Action) -> None:
        if worker.calls == len(self.world.collectives):
            self.world.collectives.append(Collective())
        collective = self.world.collectives[worker.calls]
        for other in collective.started.values():
            assert type(other) is type(action), (other, action)
            if isinstance(action, StartMean):
                assert other == action
            elif isinstance(action, TakeMerges):
                assert isinstance(other, TakeMerges) and other.root == action.root
        collective.started[worker.number] = action
        collective.outer[worker.number] = list(worker.outer)
        if isinstance(action, StartMean):
            worker.mean = worker.calls
        worker.calls += 1

    def result(self, worker: VirtualWorker, action: Action) -> Any:
        if isinstance(action, CompareReports):
            started = self.world.collectives[worker.calls - 1].started
            reports = [started[n] for n in self.world.members]
            return [each.report for each in reports if isinstance(each, CompareReports)]
        if isinstance(action, TakeMerges):
            if action.fragments:
                collective = self.world.collectives[worker.calls - 1]
                worker.outer = list(collective.outer[self.world.members[action.root]])
        elif isinstance(action, ApplyMean):
            assert worker.mean is not None
            merge = worker.rounds.merged[action.fragment]
            worker.outer.append((action.fragment, merge, (self.world.number, worker.mean)))
            worker.mean = None
        return None

    def fail(self, worker: VirtualWorker) -> None:
        worker.rounds.interrupted()
        sent = self.schedule.sent_at(worker.rounds.position)
        if sent is not None and worker.rounds.pending not in (None, sent):
            self.deferred.add((sent.fragment, sent.step))
        worker.actions = worker.waits = worker.mean = None
        self.commit(worker)

    def commit(self, worker: VirtualWorker) -> None:
        if self.world.broken:
            worker.parked = True
            if all(each.parked for each in self.workers.values()):
                self.form()

    # ---- changes of the world

    def change(self) -> None:
        """Lose a worker, let one join, or both at once."""
        lose = len(self.workers) > 1 and self.draw.random() < 0.6
        if lose:
            del self.workers[self.draw.choice(list(self.workers))]
        if not lose or self.draw.random() < 0.5:
            number = 100 + 10 * self.world.number + len(self.newcomers)
            self.newcomers.append(VirtualWorker(number, self.machine(self.schedule)))
        self.world.broken = True
        for each in self.workers.values():
            if each.actions is None and each.rounds.position >= LAST and not each.entering:
                each.parked = True
        if all(each.parked for each in self.workers.values()):
            self.form()

    def form(self) -> None:
        """Form the next world. Workers without the newest commit receive the state of one that has it."""
        survivors = list(self.workers.values())
        newest = max(each.rounds.position for each in survivors)
        root = self.draw.choice([each for each in survivors if each.rounds.position == newest])
        for each in [*survivors, *self.newcomers]:
            if each.rounds.position < newest:
                if each.own_steps:
                    assert all(map(int.__le__, each.rounds.merged, root.rounds.merged))
                each.rounds.take_shared(root.rounds.shared())
                each.outer = list(root.outer)
            self.workers[each.number] = each
            each.parked, each.entering, each.calls, each.mean = False, True, 0, None
        self.newcomers = []
        self.world = World(self.world.number + 1, list(self.workers))

    def check_end(self) -> None:
        workers = list(self.workers.values())
        first = workers[0]
        last = first.rounds.position
        for each in workers:
            assert each.outer == first.outer
            assert (each.rounds.position, each.rounds.merged) == (last, first.rounds.merged)
        for fragment in range(self.schedule.fragments):
            assert [merge for f, merge, _ in first.outer if f == fragment] == [
                *range(first.rounds.merged[fragment])
            ]
        owed = [0] * self.schedule.fragments
        for sent in filter(None, map(self.schedule.sent_at, range(1, last + 1))):
            owed[sent.fragment] += sent.due <= last
        for fragment, made in enumerate(first.rounds.merged):
            deferred = sum(f == fragment for f, _ in self.deferred)
            assert owed[fragment] - deferred <= made <= owed[fragment]


def test_workers_with_drawn_losses_and_joins_apply_the_same_merges_once():
    for seed in range(SEEDS):
        Simulation(seed, Rounds).run()


class ForgetsPendingMerge(Rounds):
    def interrupted(self) -> None:
        super().interrupted()
        self.pending = None


class RepeatsMergesOfOthers(Rounds):
    def _is_owed(self, sent: Any) -> bool:
        return True


class IgnoresMergesOfOthers(Rounds):
    def _meet(self) -> Generator[Action, Any, None]:
        before = list(self.merged)
        yield from super()._meet()
        self.merged = before


@pytest.mark.parametrize(
    "machine", [ForgetsPendingMerge, RepeatsMergesOfOthers, IgnoresMergesOfOthers]
)
def test_planted_bugs_are_found(machine):
    def is_found(seed: int) -> bool:
        try:
            Simulation(seed, machine).run()
        except AssertionError:
            return True
        return False

    assert any(map(is_found, range(SEEDS)))
