"""A job of many ranks in one process that trains on a loader under test while its world changes; no time passes.

Everything except the world is real: states, commits, restores, optimizers, loaders, and loader workers if a schedule
has any. The model records the samples: it has one weight per sample, and a step subtracts 1 from the weights of its
samples. After E epochs, every committed weight is -E unless a sample was missed or counted twice.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader

from elastic.data import DataLoader, ShardedFiles, from_torch
from elastic.data.committed_batches import DataProgress
from elastic.data.sample_partition import Position, SamplePartition
from elastic.data.sample_sources import Loaded, Source
from elastic.protocol.messages import Place
from elastic.runtime import lifecycle
from elastic.state import TorchState

SetAttr = Callable[[Any, str, Any], None]  # as monkeypatch.setattr
Make = Callable[[int, dict[str, Any]], DataLoader]
END = object()


class Numbers(IterableDataset[int]):
    """A stream of numbers that divides itself between loader workers."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self._length, step))


class Skipping(Numbers):
    def skip(self, count: int) -> range:
        return range(count, self._length)


class Reversed(SequentialSampler):
    """A sampler of the script: the last sample first."""

    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self)))


class Uneven:
    """A batch sampler of the script: batches of 1, 2, 3, 1, 2, ... samples in a random order."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[list[int]]:
        order, at = torch.randperm(self._length).tolist(), 0
        while at < self._length:
            size = 1 + at % 3
            yield order[at : at + size]
            at += size


def files(length: int, read: Callable[[range], Any]) -> ShardedFiles:
    """Of 1 to 7 samples."""
    cuts = [range(at, min(length, at + 1 + at % 7)) for at in _starts(length)]
    return ShardedFiles(cuts, read)


def _starts(length: int) -> Iterator[int]:
    at = 0
    while at < length:
        yield at
        at += 1 + at % 7


def distributed(length: int, options: dict[str, Any]) -> DataLoader:
    dataset: Any = range(length)
    sampler: Any = DistributedSampler(dataset, num_replicas=3, rank=1, seed=options.pop("seed"))
    batch, workers = options.pop("batch_size"), options.pop("num_workers")
    loader: Any = TorchLoader(dataset, batch, sampler=sampler, num_workers=workers)
    return from_torch(loader, **options)


KINDS: dict[str, Make] = {
    "map-style": lambda n, o: DataLoader(range(n), **o),
    "shuffled": lambda n, o: DataLoader(range(n), shuffle=True, **o),
    "a seed for each sample": lambda n, o: DataLoader(
        range(n), shuffle=True, sample_seeds=True, **o
    ),
    "a global batch": lambda n, o: DataLoader(
        range(n), shuffle=True, global_batch_size=6 * o.pop("batch_size"), **o
    ),
    "shards": lambda n, o: DataLoader(
        range(n), shuffle=True, global_batch_size=5 * o.pop("batch_size"), shards=5, **o
    ),
    "a stream": lambda n, o: DataLoader(Numbers(n), **o),
    "a stream that skips": lambda n, o: DataLoader(Skipping(n), **o),
    "a stream in shards": lambda n, o: DataLoader(
        Numbers(n), global_batch_size=5 * o.pop("batch_size"), shards=5, **o
    ),
    "files with an index": lambda n, o: DataLoader(files(n, list), shuffle=True, **o),
    "files read forward": lambda n, o: DataLoader(files(n, iter), shuffle=True, **o),
    "a sampler": lambda n, o: DataLoader(range(n), sampler=Reversed(range(n)), **o),
    "a batch sampler": lambda n, o: DataLoader(
        range(n), batch_sampler=Uneven(n), **_without(o, "batch_size")
    ),
    "torch's batch sampler": lambda n, o: DataLoader(
        range(n),
        batch_sampler=BatchSampler(range(n), o["batch_size"], False),
        **_without(o, "batch_size"),
    ),
    "no batches": lambda n, o: DataLoader(range(n), batch_size=None, **_without(o, "batch_size")),
    "a DistributedSampler": distributed,
}


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


@dataclass(frozen=True)
class Event:
    """After this number of steps the world is lost, or changes as planned, and has another size."""

    step: int
    lost: bool
    size: int
    staying: int  # at most this many members stay, at least one


@dataclass(frozen=True)
class Schedule:
    """One random job."""

    seed: int
    kind: str
    length: int
    epochs: int
    size: int
    batch: int
    workers: int
    persistent: bool
    read_ahead: int
    optimizer: bool
    accumulate: int
    commit_every: int  # batches
    events: list[Event] = field(default_factory=list)


def drawn(seed: int, *, most_workers: int = 0) -> Schedule:
    """Draw a schedule from a seed. With loader workers, which take time to start, jobs are smaller."""
    rng = random.Random(seed)
    kinds, small = list(KINDS), most_workers > 0
    workers = rng.randint(0, most_workers)
    optimizer = rng.random() < 0.8
    steps = sorted(rng.sample(range(1, 12 if small else 40), rng.randint(1, 3 if small else 6)))
    return Schedule(
        seed=seed,
        kind=kinds[seed % len(kinds)],
        length=rng.choice(
            [1, 2, 3, 5, 7, 12, 20] if small else [1, 2, 3, 5, 7, 12, 20, 33, 50, 64]
        ),
        epochs=rng.randint(1, 2 if small else 3),
        size=rng.randint(1, 2 if small else 5),
        batch=rng.randint(1, 4),
        workers=workers,
        persistent=workers > 0 and rng.random() < 0.5,
        read_ahead=rng.randint(0, 6),
        optimizer=optimizer,
        accumulate=rng.randint(1, 3) if optimizer else 1,
        commit_every=rng.randint(1, 4),
        events=[
            Event(step, rng.random() < 0.6, rng.randint(1, 2 if small else 6), rng.randint(1, 5))
            for step in steps
        ],
    )


class ReadAhead:
    """Prefetches batches, as loader workers do."""

    def __init__(self, source: Source, batches: int) -> None:
        self._source = source
        self._batches = batches
        self.seeded = source.seeded

    def length(self, epoch: int) -> int | None:
        return self._source.length(epoch)

    def ids(self, epoch: int, places: range) -> list[int]:
        return self._source.ids(epoch, places)

    def load(self, epoch: int, dealing: SamplePartition, step: range, part: int) -> Any:
        return self._source.load(epoch, dealing, step, part)

    def begin(
        self, position: Position, dealing: SamplePartition, mine: list[int]
    ) -> Iterator[Loaded]:
        return self._loaded(self._source.begin(position, dealing, mine))

    def _loaded(self, batches: Iterator[Loaded]) -> Iterator[Loaded]:
        ahead = list(islice(batches, self._batches))
        for each in batches:
            ahead.append(each)
            yield ahead.pop(0)
        yield from ahead


class Member:
    """The process of a rank."""

    def __init__(self, schedule: Schedule) -> None:
        options = {"batch_size": schedule.batch, "num_workers": schedule.workers, "seed": 5}
        options["persistent_workers"] = schedule.persistent
        self.loader = KINDS[schedule.kind](schedule.length, options)
        self.loader._source = ReadAhead(self.loader._source, schedule.read_ahead)
        self.model = torch.nn.ParameterList([torch.zeros(schedule.length, dtype=torch.float64)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        kept = {"optimizer": self.optimizer} if schedule.optimizer else {}
        self.state = TorchState(self.model, loader=self.loader, epoch=0, **kept)

    @property
    def weights(self) -> torch.Tensor:
        weights: torch.Tensor = self.model[0]
        return weights

    def end(self) -> None:
        """End the process with its loader workers."""
        del self.loader._source

    def take_over(self, other: Member) -> None:
        """Return the state that a newcomer receives."""
        with torch.no_grad():
            self.weights.copy_(other.weights)
        self.loader.load_state_dict(pickle.loads(pickle.dumps(other.loader.state_dict())))
        self.state.epoch = other.state.epoch
        self.state.save()
        self.state.reset()


class DataJob:
    """Runs one schedule. Raises AssertionError if ranks differ, or if a sample does not count once per epoch."""

    def __init__(self, schedule: Schedule, setattr: Callable[[Any, str, Any], None]) -> None:
        self.schedule = schedule
        self._rng = random.Random(schedule.seed)
        self._rank, self._generation, self._steps = 0, 1, 0
        self._size = schedule.size
        self._events = list(schedule.events)
        self._batches = 0  # since the last optimizer step
        setattr(lifecycle, "position", self._position)
        self.members = [self._as(rank, Member, schedule) for rank in range(schedule.size)]
        self.changes = 0

    def run(self) -> None:
        """Train all epochs, and check the commits."""
        for member in self.members:
            member.state.save()
        while self.members[0].state.epoch < self.schedule.epochs:
            if self._pass():
                self._epoch_over()
        for member in self.members:
            member.state.restore()
            self._check(member)
            member.end()

    # ---- the script ------------------------------------------------------------------------------

    def _pass(self) -> bool:
        """Return whether the pass reached its end."""
        epoch = self.members[0].state.epoch
        for rank, member in enumerate(self.members):
            self._as(rank, member.loader.set_epoch, epoch)
        iterators = [self._as(r, iter, m.loader) for r, m in enumerate(self.members)]
        while True:
            batches = [self._as(rank, next, it, END) for rank, it in enumerate(iterators)]
            over = [batch is END for batch in batches]
            assert all(over) or not any(over), f"ranks take different numbers of steps: {over}"
            if all(over):
                return True
            for rank, (member, batch) in enumerate(zip(self.members, batches, strict=True)):
                self._as(rank, self._backward, member, batch)
            self._batches += 1
            self._steps += 1
            early = self._rng.random() < 0.2 and self.schedule.optimizer
            if early:  # before the step that these batches lead to
                self._commit()
            if self._batches >= self.schedule.accumulate:
                self._step()
            if self._steps % self.schedule.commit_every == 0:
                self._commit()
            if self._events and self._steps >= self._events[0].step:
                self._change(self._events.pop(0))
                return False

    def _backward(self, member: Member, batch: Any) -> None:
        if self.schedule.kind.endswith("shards"):
            for each in batch:
                member.weights[ids_of(each)].sum().backward()
        else:
            member.weights[ids_of(batch)].sum().backward()

    def _step(self) -> None:
        self._batches = 0
        gradients = [m.weights.grad for m in self.members if m.weights.grad is not None]
        total = sum(gradients, torch.zeros_like(self.members[0].weights))
        for member in self.members:
            member.weights.grad = None
            if self.schedule.optimizer:
                member.weights.grad = total.clone()
                member.optimizer.step()
                member.optimizer.zero_grad()
            else:
                with torch.no_grad():
                    member.weights.sub_(total)

    def _epoch_over(self) -> None:
        self._step()
        for member in self.members:
            member.state.epoch += 1
        self._commit()

    # ---- the world -------------------------------------------------------------------------------

    def _commit(self) -> None:
        saved = []
        for rank, member in enumerate(self.members):
            self._as(rank, member.state.save)
            saved.append(self._as(rank, member.loader.state_dict))
            assert len(pickle.dumps(saved[-1])) < 4096
        assert all(each == saved[0] for each in saved), saved

    def _change(self, event: Event) -> None:
        """Remaining ranks keep their state; the first of them sends it to newcomers."""
        self.changes += 1
        if not event.lost:
            self._commit()
        staying = self._rng.sample(self.members, min(event.staying, event.size, len(self.members)))
        self._generation += 1
        self._size = event.size
        for rank, member in enumerate(staying):
            if event.lost:
                self._as(rank, member.state.restore)
            self._as(rank, member.state.on_reset)
        for member in self.members:
            if member not in staying:
                member.end()
        self.members = staying
        for rank in range(len(staying), event.size):
            self.members.append(self._as(rank, Member, self.schedule))
            self._as(rank, self.members[-1].take_over, staying[0])
        self._batches = 0 if event.lost else self._batches
        if any(member.weights.grad is None for member in self.members):
            self._batches = 0

    def _position(self) -> tuple[Place, int]:
        return Place(self._rank, self._size, 0, 1, self._rank, self._size), self._generation

    def _as(self, rank: int, call: Callable[..., Any], *arguments: Any) -> Any:
        self._rank = rank
        return call(*arguments)

    def _check(self, member: Member) -> None:
        epochs = self.schedule.epochs
        wrong = {
            sample: -count
            for sample, count in enumerate(member.weights.tolist())
            if count != -epochs
        }
        assert not wrong, f"in {epochs} epochs these samples count so often: {wrong}"


def ids_of(batch: Any) -> torch.Tensor:
    """Return the numbers of a batch's samples."""
    if isinstance(batch, dict):
        batch = batch["id"]
    return torch.as_tensor(batch).reshape(-1)


# ---- an injected bug -------------------------------------------------------------------------------------------------


def position_by_rank(setattr: SetAttr) -> None:
    """Each rank counts only its own samples."""

    def hand(self: DataProgress, consumed: int, real: Any = DataProgress.hand) -> None:
        found = lifecycle.position()
        assert found is not None
        advance = consumed - self.position.consumed
        real(self, self.position.consumed + max(1, advance // found[0].size))

    setattr(DataProgress, "hand", hand)
