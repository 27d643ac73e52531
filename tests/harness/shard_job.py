"""A job in shards whose ranks are threads. The next rank to run, and the place and victim of each fault, are random.

All code that affects a bit of the result is the product's: the shards, the loader, the optimizers with their buckets
and exchange, the buffer keeper, states, restores and transfers. The network is fake: groups are those of
`harness.fakes.collectives`, and an aborted collective may still write to its tensors later. The commits of a job are
compared with `Reference`, which does the same training in one loop, as defined in docs/exact.md.

The speeds of ranks are random, too, and change after each step, so that ranks have other shards in most steps.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.collectives.interface import Collectives, Op, Work
from elastic.collectives.single_rank import LocalCollectives
from elastic.data import DataLoader
from elastic.data.sample_order import shuffled
from elastic.data.sample_partition import Position, SamplePartition
from elastic.data.seeds import seed_of
from elastic.errors import CollectiveFailed, PeerLost
from elastic.exact import load_balancing
from elastic.exact.shards import Shards
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.runtime import lifecycle
from elastic.state import TorchState
from harness.small_worlds import Meeting, World

WIDTH = 6
SEED = 5
SetAttr = Callable[[Any, str, Any], None]


class Dies(BaseException):
    """End the process that reaches this place."""


# ---- training --------------------------------------------------------------------------------------------------------


class Toy(torch.nn.Module):
    """Model with numbers whose sums depend on their order; counts of samples and of shards; and a running statistic."""

    statistic: torch.Tensor

    def __init__(self, schedule: ShardSchedule) -> None:
        super().__init__()
        self.numbers = torch.nn.Parameter(torch.ones(WIDTH))
        self.more = torch.nn.Parameter(torch.ones(40, WIDTH))  # in a separate bucket
        self.samples = torch.nn.Parameter(torch.zeros(schedule.length, dtype=torch.float64))
        self.shards = torch.nn.Parameter(
            torch.zeros(schedule.steps, schedule.count, dtype=torch.float64)
        )
        self.register_buffer("statistic", torch.zeros(WIDTH))

    def loss(self, step: int, shard: int, ids: torch.Tensor, weight: float) -> torch.Tensor:
        """Draw from the generators of torch and Python. ``ids``: the samples."""
        drawn = torch.randn(WIDTH) * 10.0 ** random.randint(-3, 3)
        self.statistic.mul_(0.9).add_(drawn + ids.sum())
        found = (self.numbers * drawn).sum() + (self.more * drawn).square().mean() + ids.sum()
        counted = self.samples[ids].sum() + self.shards[step, shard]
        # The counts must be whole numbers for any loss: a step adds 1 for each.
        return found * weight + (counted - counted.detach())

    def averaged(self) -> list[torch.nn.Parameter]:
        return [self.numbers, self.more]

    def summed(self) -> list[torch.nn.Parameter]:
        return [self.samples, self.shards]


@dataclass(frozen=True)
class Change:
    """From step ``step`` on the world is lost, by the death of a rank, or it changes after a step, as planned."""

    step: int
    lost: bool
    size: int
    staying: int  # at most this many members stay; of a lost world, one less


@dataclass(frozen=True)
class ShardSchedule:
    """One random job."""

    seed: int
    count: int
    length: int
    batch: int
    steps: int
    size: int
    changes: list[Change] = field(default_factory=list)


def drawn(seed: int) -> ShardSchedule:
    rng = random.Random(seed)
    count, steps = rng.choice([1, 2, 3, 5, 8]), rng.randint(5, 9)
    at = sorted(rng.sample(range(steps - 1), rng.randint(1, min(5, steps - 1))))
    return ShardSchedule(
        seed=seed,
        count=count,
        length=2 * count * rng.choice([2, 3, 5]) + rng.choice([0, count, 2 * count - 1]),
        batch=2 * count,
        steps=steps,
        size=rng.randint(1, 5),
        changes=[
            Change(step, rng.random() < 0.7, rng.randint(1, count + 2), rng.randint(1, 4))
            for step in at
        ],
    )


class Reference:
    """Return the expected commits before each step."""

    def __init__(self, schedule: ShardSchedule) -> None:
        self.schedule = schedule
        toy = Toy(schedule)
        momentum = [torch.zeros_like(each) for each in toy.averaged()]
        at, dealing = Position(), SamplePartition(schedule.count, schedule.batch)
        self.values = [self._copied(toy, momentum)]
        self.positions = [at]
        self.losses: list[float] = []
        for step in range(schedule.steps):
            samples = dealing.step(at.consumed, schedule.length)
            order = shuffled(schedule.length, SEED, at.epoch)
            gradients, losses, kept = [], [], None
            before = toy.statistic.clone()
            for shard in range(schedule.count):
                _seed(seed_of("step", SEED, step, shard))
                part = dealing.part(samples, shard)
                ids = order[part.start : part.stop]
                loss = toy.loss(step, shard, ids, dealing.weight(samples, shard))
                gradients.append(torch.autograd.grad(loss, list(toy.parameters())))
                losses.append(float(loss.detach()))
                kept = toy.statistic.clone() if shard == 0 else kept
                toy.statistic.copy_(before)
            assert kept is not None
            toy.statistic.copy_(kept)
            sums = [self._sum(list(each)) for each in zip(*gradients, strict=True)]
            self.losses.append(self._sum(losses) / schedule.count)
            with torch.no_grad():
                for each, total in zip(toy.parameters(), sums, strict=True):
                    if each.dtype == torch.float64:
                        each.sub_(total)
                for each, total, moment in zip(toy.averaged(), sums, momentum, strict=False):
                    moment.mul_(0.9).add_(total / schedule.count)
                    each.add_(moment, alpha=-0.01)
            over = samples.stop == schedule.length
            at = Position(at.epoch + 1) if over else Position(at.epoch, samples.stop)
            self.values.append(self._copied(toy, momentum))
            self.positions.append(at)

    def _sum(self, values: list[Any]) -> Any:
        """The left half has the largest power of two that leaves something for the right half."""
        if len(values) == 1:
            return values[0]
        middle = 1
        while 2 * middle < len(values):
            middle *= 2
        return self._sum(values[:middle]) + self._sum(values[middle:])

    def _copied(self, toy: Toy, momentum: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in toy.state_dict().items()}
        names = ["momentum of numbers", "momentum of more"]
        return found | dict(zip(names, [each.clone() for each in momentum], strict=True))


@functools.lru_cache(maxsize=64)
def reference(count: int, length: int, batch: int, steps: int) -> Reference:
    return Reference(ShardSchedule(0, count, length, batch, steps, 1))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


# ---- alternating threads ---------------------------------------------------------------------------------------------


class Turns:
    """One thread for each rank, one of which runs at a time. Whenever it waits, the next one is drawn."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._own = threading.local()
        self._waits: dict[int, Callable[[], bool]] = {}
        self._turn: dict[int, threading.Semaphore] = {}
        self._all_over = threading.Semaphore(0)
        self.stuck: Callable[[], None] = lambda: None

    def run(self, functions: list[Callable[[], None]]) -> None:
        """Raise the exception of a thread."""
        errors: list[BaseException] = []

        def of_thread(number: int, function: Callable[[], None]) -> None:
            self._own.number = number
            self._turn[number].acquire()
            try:
                function()
            except BaseException as error:
                errors.append(error)
            del self._waits[number]
            self._next()

        self._turn = {number: threading.Semaphore(0) for number in range(len(functions))}
        self._waits = {number: lambda: True for number in self._turn}
        threads = [
            threading.Thread(target=of_thread, args=each, daemon=True)
            for each in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        self._next()
        self._all_over.acquire()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def wait(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let others run until ``until`` is true."""
        number = self._own.number
        self._waits[number] = until
        self._next()
        self._turn[number].acquire()

    def _next(self) -> None:
        if not self._waits:
            self._all_over.release()
            return
        ready = [number for number, until in self._waits.items() if until()]
        if not ready:
            self.stuck()
            ready = [number for number, until in self._waits.items() if until()]
            assert ready, "all ranks wait, for nothing"
        self._turn[self._rng.choice(ready)].release()


# ---- the network -----------------------------------------------------------------------------------------------------


class DrawnWork:
    """A collective in progress. After an abort, it may write into its outputs until it is `over`."""

    def __init__(self, job: ShardJob, work: Work, outputs: list[torch.Tensor]) -> None:
        self._job, self._work, self._outputs = job, work, outputs
        self.over = True

    def done(self) -> bool:
        return self.over and self._work.done()

    def within(self, timeout_s: float) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        self._job.pause(self._work.done)
        try:
            self._work.wait()
        except CollectiveFailed:
            if self._job.rng.random() < 0.8:
                self.over = False
                self._job.late.append(self)
            raise

    def write(self) -> None:
        for each in self._outputs:
            if each.is_floating_point():
                each.detach().fill_(1e6)
        self.over = True


class DrawnGroup:
    """A fake group whose waits let others run."""

    scales_inside = False

    def __init__(self, job: ShardJob, group: Collectives) -> None:
        self._job, self._group = job, group
        self.rank, self.size = group.rank, group.size

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        work = self._group.allreduce(tensor, op, scale, divisor)
        return DrawnWork(self._job, work, [tensor])

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return DrawnWork(self._job, self._group.broadcast(tensor, root), [])

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return DrawnWork(self._job, self._group.allgather(outputs, tensor), outputs)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        work = self._group.alltoall(output, tensor, received, sent)
        return DrawnWork(self._job, work, [output])

    def barrier(self) -> Work:
        return DrawnWork(self._job, self._group.barrier(), [])

    def abort(self) -> None:
        self._group.abort()

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.abort()


class DrawnWorld(World):
    """Runtime as seen by a rank."""

    def __init__(self, job: ShardJob, size: int, rank: int, meeting: Meeting) -> None:
        super().__init__(size, rank, meeting)
        self.generation = job.generation
        self._job, self._meeting = job, meeting

    def group(self, purpose: str, device: torch.device, ranks: Any = None) -> Any:
        if self.place.size == 1:
            return LocalCollectives()
        found = self._meeting.group(purpose, tuple(range(self.place.size)))
        return DrawnGroup(self._job, found[self.place.rank])


# ---- the job ---------------------------------------------------------------------------------------------------------


class Member:
    """The process of a rank. It has its own numbers until it receives those of others."""

    def __init__(self, schedule: ShardSchedule, number: int, verify: float = 0.0) -> None:
        self.toy = toy = Toy(schedule)
        with torch.no_grad():
            toy.numbers.add_(float(number))
            toy.statistic.add_(float(number))
        self.shards = shards = Shards(schedule.count, seed=SEED, verify=verify)
        self.loader = DataLoader(
            range(schedule.length),
            shuffle=True,
            seed=SEED,
            global_batch_size=schedule.batch,
            shards=shards,
        )
        self.averaged = DistributedOptimizer(
            torch.optim.SGD(toy.averaged(), lr=0.01, momentum=0.9), shards=shards
        )
        self.summed = DistributedOptimizer(
            torch.optim.SGD(toy.summed(), lr=1.0), op=Op.SUM, shards=shards
        )
        self.state = TorchState(
            toy,
            averaged=self.averaged,
            summed=self.summed,
            shards=shards,
            loader=self.loader,
            losses=[],
        )

    def values(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = dict(self.toy.state_dict())
        for name, each in zip(("numbers", "more"), self.toy.averaged(), strict=True):
            kept = self.averaged.state[each].get("momentum_buffer")
            found[f"momentum of {name}"] = torch.zeros_like(each) if kept is None else kept
        return found


class ShardJob:
    """Runs one schedule. Raises AssertionError at the first commit that differs from the reference.

    ``verify``: the share of the shards that two ranks compute.
    """

    def __init__(self, schedule: ShardSchedule, setattr: SetAttr, verify: float = 0.0) -> None:
        self.schedule = schedule
        self.verify = verify
        self.second_passes = 0
        self.rng = random.Random(schedule.seed)
        self.generation = 0
        self.late: list[DrawnWork] = []  # of older worlds, still in progress
        self.deaths = self.planned = self.rebalanced = 0
        self.members: list[Member] = []
        self._changes = list(schedule.changes)
        self._computed: Counter[tuple[int, int, int]] = Counter()  # generation, step, shard
        self._own = threading.local()
        self._turns = Turns(self.rng)
        self._meeting = Meeting()
        self._dying: tuple[int, int] | None = None  # the rank, and the remaining pauses
        setattr(load_balancing, "PERIOD", 1)
        setattr(load_balancing, "PATIENCE", 1)
        setattr(load_balancing.SpeedWindow, "median_s", property(lambda window: self._speed()))
        setattr(logging.getLogger("elastic.exact"), "disabled", True)
        setattr(lifecycle, "current", lambda: self._own.world)
        setattr(lifecycle, "active", lambda: getattr(self._own, "world", None))
        setattr(lifecycle, "position", lambda: (self._own.world.place, self._own.world.generation))

    def run(self) -> None:
        known = self.schedule
        self._reference = reference(known.count, known.length, known.batch, known.steps)
        size, staying = known.size, 0
        while True:
            self._world(size, staying)
            if self.members and self.members[0].shards.step == known.steps:
                return
            change = self._changes.pop(0)
            size, staying = change.size, change.staying

    # ---- a world -------------------------------------------------------------------------------------------------

    def _world(self, size: int, staying: int) -> None:
        """Form a world. Ranks that hold the newest commit come first; the first sends it to ranks that lack it.

        If no rank holds a commit, the job starts from the beginning.
        """
        members = self.rng.sample(self.members, min(staying, size, len(self.members)))
        newest = max((each.shards.step for each in self.members), default=0)
        if self.members and not any(each.shards.step == newest for each in members):
            holders = [each for each in self.members if each.shards.step == newest]
            members[:1] = [self.rng.choice(holders)]
        members.sort(key=lambda each: -each.shards.step)
        self.generation += 1
        self._meeting = Meeting()
        self._turns.stuck = self._meeting.abort
        present: list[Member | None] = [*members, *[None] * (size - len(members))]
        self._living: list[Member | None] = present
        complete = all(each is not None and each.shards.step == newest for each in present)
        self._sends = size > 1 and not complete
        self._draw_death(size)
        self._turns.run([functools.partial(self._on_rank, rank, size) for rank in range(size)])
        self.members = [each for each in self._living if each is not None]

    def _speed(self) -> float:
        """Seconds per shard of this rank, in this step."""
        world = self._own.world
        member = self._living[world.place.rank]
        step = 0 if member is None else member.shards.step
        key = f"{self.schedule.seed} {world.generation} {step} {world.place.rank}"
        return random.Random(key).choice([0.0, 1.0, 3.0, 9.0])

    def _draw_death(self, size: int) -> None:
        self._dying = None
        if self._changes and self._changes[0].lost and size > 1:
            self._dying = self.rng.randrange(size), self.rng.randint(0, 25)

    def _on_rank(self, rank: int, size: int) -> None:
        self._own.world = world = DrawnWorld(self, size, rank, self._meeting)
        held = self._living[rank]
        member = held or Member(
            self.schedule, 100 * rank + self.generation if rank else 0, self.verify
        )
        try:
            if self._sends:
                member.state.transfer(world.group("state", torch.device("cpu")), 0)
            if self._sends or held is None:
                member.state.save()
            self._living[rank] = member
            member.state.on_reset()
            self._train(member)
        except (CollectiveFailed, PeerLost):
            if self._living[rank] is not None:  # otherwise, it has never had any
                member.state.restore()
        except Dies:
            self.deaths += 1
            self._living[rank] = None
            self._meeting.abort()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let others run; late data may be written, and this rank may die."""
        rank = self._own.world.place.rank
        if self._dying is not None and self._dying[0] == rank and self._due():
            if self._dying[1] == 0:
                self._dying = None
                raise Dies
            self._dying = rank, self._dying[1] - 1
        self._turns.wait(until)
        if self.late and self.rng.random() < 0.15:
            self.late.pop(self.rng.randrange(len(self.late))).write()

    def _due(self) -> bool:
        return any(
            each is not None and each.shards.step >= self._changes[0].step for each in self._living
        )

    # ---- the script ----------------------------------------------------------------------------------------------

    def _train(self, member: Member) -> None:
        shards, loader, toy = member.shards, member.loader, member.toy
        while shards.step < self.schedule.steps:
            for step in loader:
                losses = []
                for ids in shards.over(step):
                    number = shards.step
                    if shards.verifying:
                        self.second_passes += 1
                    else:
                        self._compute(number, loader.shard)
                    loss = toy.loss(number, loader.shard, ids, loader.weight)
                    loss.backward()
                    losses.append(loss.detach())
                    self.pause()
                for optimizer in (member.averaged, member.summed):
                    optimizer.step()
                    optimizer.zero_grad()
                member.state.losses.append(shards.mean(losses))
                member.state.save()
                before = shards.assigned
                shards.committed()
                self.rebalanced += shards.assigned != before
                self._check(member)
                self.pause()
                if shards.step == self.schedule.steps or self._stop(member):
                    return

    def _compute(self, step: int, shard: int) -> None:
        key = self.generation, step, shard
        self._computed[key] += 1
        assert self._computed[key] == 1, f"step {step}: two ranks compute shard {shard}"

    def _stop(self, member: Member) -> bool:
        """A planned change: all stop after one step."""
        change = self._changes[0] if self._changes else None
        size = self._own.world.place.size
        if change is None or (change.lost and size > 1) or member.shards.step <= change.step:
            return False
        self.planned += 1
        return True

    def _check(self, member: Member) -> None:
        step, wanted = member.shards.step, self._reference
        found, rank = member.values(), self._own.world.place.rank
        wrong = [
            name for name, value in wanted.values[step].items() if not same(value, found[name])
        ]
        where = f"step {step - 1}, rank {rank} of {self._own.world.place.size}"
        assert not wrong, f"{where}: other bits in {', '.join(wrong)}"
        losses = member.state.losses
        assert losses == wanted.losses[:step], f"{where}: losses are {losses}"
        saved = member.loader.state_dict()
        at = Position(saved["epoch"], saved["consumed"])
        if at != wanted.positions[step]:  # of an epoch without further requests
            ended = at.consumed == self.schedule.length
            at = Position(at.epoch + 1) if ended else at
        assert at == wanted.positions[step], f"{where}: the position is {at}"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(
        one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8)
    )


def run(seed: int, setattr: SetAttr, verify: float = 0.0) -> ShardJob:
    """Raise AssertionError with the schedule."""
    job = ShardJob(drawn(seed), setattr, verify)
    try:
        job.run()
    except Exception as error:
        raise AssertionError(f"{error} in {job.schedule}") from error
    return job
