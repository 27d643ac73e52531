"""Runtime for an optimizer under test: a twin that always sends the same data, or ranks as threads."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any
from unittest.mock import create_autospec

import torch

from elastic.collectives.interface import Op
from elastic.collectives.single_rank import LocalCollectives
from elastic.data import optimizer_steps
from elastic.errors import CollectiveFailed, PeerLost
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.protocol import messages
from elastic.protocol.messages import Place
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from harness.fakes import collectives as fake
from harness.groups import at_once


class MirroredGroup:
    """A group of ``size`` ranks in which every other rank sends the same as this one. ``calls`` are its reductions."""

    def __init__(self, size: int, scales_inside: bool = False) -> None:
        self.rank, self.size = 0, size
        self.scales_inside = scales_inside
        self.calls: list[tuple[str, int]] = []
        self.failure: str | None = None
        self.holding = False  # works in progress don't end

    def allreduce(self, tensor, op, scale=1.0, divisor=1):
        if self.failure:
            raise CollectiveFailed(self.failure)
        self.calls.append((op.name, tensor.numel()))
        factor = self.size if op is Op.SUM else 1
        if tensor.is_floating_point():
            factor *= scale / divisor
        return MirroredWork(self, tensor, factor)

    def broadcast(self, tensor, root):
        assert root == self.rank
        return MirroredWork(self, tensor, 1)


class MirroredWork:
    def __init__(self, group, tensor, factor) -> None:
        self.group, self.tensor, self.factor = group, tensor, factor

    def done(self) -> bool:
        return not self.group.holding

    def wait(self) -> None:
        if self.group.failure:
            raise CollectiveFailed(self.group.failure)
        if self.factor != 1:
            self.tensor.mul_(self.factor)


class Meeting:
    """Groups of a world of threads, which are created at the first request of a rank."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def group(self, purpose, members):
        with self._lock:
            if (purpose, members) not in self.made:
                self.made[purpose, members] = fake.world(len(members))
            return self.made[purpose, members]

    def abort(self):
        with self._lock:
            for group in self.made.values():
                group[0].abort()


class World:
    """Runtime as seen by an optimizer."""

    def __init__(self, size: int, rank: int = 0, group=None) -> None:
        self.elastic = True
        self.env = worker_settings.read({})
        self.provisional = False
        self.activity = 0
        self.first_not_finite = None
        self.broken = False
        self.reason = ""
        self.world: messages.World | None = None
        self.generation = 0
        self.miscomputed: list[messages.Miscomputed] = []
        self.become(size, rank, group)

    def become(self, size: int, rank: int = 0, group=None) -> None:
        """The next generation."""
        self.place = Place(rank, size, rank, size, 0, 1)
        self.generation += 1
        self.broken = False
        self.gradients = group or (MirroredGroup(size) if size > 1 else LocalCollectives())

    def group(self, purpose, device, ranks=None):
        assert (
            purpose.split()[0] in ("gradients", "buffers", "means", "parameters")
            and device.type == "cpu"
        )
        if not isinstance(self.gradients, Meeting):
            return self.gradients
        members = tuple(range(self.place.size)) if ranks is None else ranks
        if len(members) == 1:
            return LocalCollectives()
        return self.gradients.group(purpose, members)[members.index(self.place.rank)]

    def wanted(self, purpose, device_type, ranks=None):
        members = tuple(range(self.place.size)) if ranks is None else ranks
        return isinstance(self.gradients, Meeting) and (purpose, members) in self.gradients.made

    @contextlib.contextmanager
    def guard(self, name):
        if self.broken:
            raise PeerLost(self.reason)
        try:
            yield
        except CollectiveFailed as error:
            self.mark_broken(self.generation, str(error))
            raise PeerLost(str(error)) from error

    def mark_broken(self, generation, reason):
        self.broken, self.reason = True, reason

    def report_miscomputed(self, evidence):
        self.miscomputed.append(evidence)


def ranks_as_threads(monkeypatch):
    """Run a function of the rank on every rank of a world, each in a thread; return the results."""
    own = threading.local()
    monkeypatch.setattr(lifecycle, "current", lambda: own.world)

    def run(size, function):
        meeting = Meeting()

        def on_rank(rank):
            own.world = World(size, rank, meeting)
            try:
                return function(rank)
            except BaseException:
                meeting.abort()
                raise

        return at_once(on_rank, range(size))

    return run


def shard_ranks_as_threads(monkeypatch):
    """Return `ranks_as_threads` for `Shards`, which use the generators and the count of steps of a process."""
    run = ranks_as_threads(monkeypatch)
    monkeypatch.setattr(lifecycle, "active", lambda: lifecycle.current())
    monkeypatch.setattr(
        lifecycle, "position", lambda: (lifecycle.current().place, lifecycle.current().generation)
    )
    # Threads have one generator together; tests of processes draw from it.
    monkeypatch.setattr("elastic.exact.random_generators.set_seed", lambda seed: None)
    # They have one count of steps, too, and are not at the same place.
    counted = create_autospec(optimizer_steps)
    counted.count.return_value = 0
    monkeypatch.setattr("elastic.exact.shards.optimizer_steps", counted)
    return run


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def set_drawn(model: torch.nn.Module) -> None:
    """Set each parameter to numbers drawn with its index as the seed."""
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.copy_(drawn(*each.shape, seed=number))


class Rounding:
    """A user's compression to integers."""

    @staticmethod
    def compress(tensor):
        return tensor.round().to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor, context):
        return tensor.to(context)


class AllJoin:
    """Answer of the engine: all have joined once each one has requested it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.came: list[int] = []

    def start_join(self) -> int:
        self.came.append(lifecycle.current().place.rank)
        return 0

    def join_noted(self, turn: int) -> bool:
        return True

    def poll(self, turn: int) -> bool:
        return len(self.came) >= self.size

    def synchronize(self, turn: int) -> int:
        return self.came[self.size - 1]


def net(*widths: int) -> Any:  # a torch.nn.Sequential
    model = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
    with torch.no_grad():
        # no random numbers, because threads share their generator
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter))
    return model


def sgd(model: torch.nn.Module, lr: float = 0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return DistributedOptimizer(optimizer, model.named_parameters(), **options)


def small(*widths: int, **options) -> tuple[Any, Any]:
    """A model of linear layers, and the tested optimizer."""
    model = net(*widths)
    return model, sgd(model, **options)


def backward(model, scale: float = 1.0) -> None:
    width = next(model.parameters()).shape[-1]
    (model(torch.ones(1, width)).sum() * scale).backward()


def train_once(model, optimizer, scale: float = 1.0) -> None:
    backward(model, scale)
    optimizer.step()


def take_steps(model, optimizer, steps: int, scale: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        train_once(model, optimizer, scale)
