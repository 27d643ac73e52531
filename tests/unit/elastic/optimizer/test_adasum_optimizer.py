"""DistributedOptimizer with op=Adasum among threads: local steps, whose deltas are added up with Adasum."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import threading
from typing import Any

import pytest
import torch

from elastic.api import ops
from elastic.api.compression import Compression
from elastic.collectives.algorithms import adasum
from elastic.collectives.interface import Op
from elastic.errors import Invalid, PeerLost
from elastic.negotiation.process_sets import ProcessSet
from elastic.optimizer.adasum_optimizer import AdasumDistributed
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.wrapped_optimizer import WrappedOptimizer
from elastic.protocol.messages import Place
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from harness.adasum import adasum_of
from harness.fakes import collectives as fake
from harness.golden import raises
from harness.groups import at_once
from harness.small_worlds import net


class World:
    """What an optimizer sees of the runtime, and the group that its deltas travel on."""

    def __init__(self, rank: int, size: int, group: Any = None, elastic: bool = False) -> None:
        self.env = worker_settings.read({})
        self.elastic, self.provisional = elastic, False
        self.activity = 0
        self.generation = 1
        self.place = Place(rank, size, rank, size, 0, 1)
        self.collectives = group
        self.reduced: list[tuple[str, list[torch.dtype]]] = []  # what travelled, by name
        self.lost = False


@pytest.fixture
def own(monkeypatch):
    """Each thread's world; Adasum goes to its group."""
    own = threading.local()

    def grouped_allreduce_(tensors, average=None, name=None, op=None):
        assert op is Op.ADASUM
        world = own.world
        if world.lost:
            raise PeerLost("rank 1 is gone")
        assert all(tensor.is_contiguous() for tensor in tensors)
        world.reduced.append((name, [tensor.dtype for tensor in tensors]))
        adasum.reduce_(world.collectives, tensors)
        return tensors

    monkeypatch.setattr(ops, "grouped_allreduce_", grouped_allreduce_)
    monkeypatch.setattr(lifecycle, "current", lambda: own.world)
    monkeypatch.setattr(lifecycle, "active", lambda: own.world)
    return own


@pytest.fixture
def threads(own):
    """Runs a function of rank and world on every rank of a world, each in a thread; returns what they return."""

    def run(size, function):
        groups = fake.world(size)

        def on_rank(rank):
            own.world = World(rank, size, groups[rank])
            try:
                return function(rank, own.world)
            except BaseException:
                groups[rank].abort()
                raise

        return at_once(on_rank, range(size))

    return run


def inputs(rank: int, step: int = 0, width: int = 3) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, rank: int, step: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(inputs(rank, step)).square().mean()
    return loss


def wrapped(model: Any, kind: Any = torch.optim.SGD, options: Any = None, **more: Any) -> Any:
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1}))
    return DistributedOptimizer(optimizer, model.named_parameters(), op=Op.ADASUM, **more)


def values(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01}),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_local_steps_are_combined_by_adasum(threads, size, kind, options):
    def train(rank, world):
        model = net(3, 4, 2)
        optimizer = wrapped(model, kind, options)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return values(model)

    # The same by hand: an ordinary optimizer for each rank, and the formula for each parameter.
    models = [net(3, 4, 2) for _ in range(size)]
    optimizers = [kind(model.parameters(), **options) for model in models]
    for step in range(3):
        before = values(models[0])
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        for index, start in enumerate(before):
            total = start + adasum_of([values(model)[index] - start for model in models]).float()
            for model in models:
                list(model.parameters())[index].data.copy_(total)
    results = threads(size, train)
    for result in results:
        torch.testing.assert_close(result, values(models[0]), rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, result, results[0]))


def test_adasum_optimizer_in_a_world_of_one_steps_like_the_plain_one(own):
    own.world = World(0, 1)
    model, plain = net(3, 2), net(3, 2)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = wrapped(model)
    for each, its in ((model, optimizer), (plain, theirs)):
        for _ in range(2):
            loss_of(each, 0).backward()  # as often as it likes
        its.step()
    assert all(map(torch.equal, values(model), values(plain)))
    assert own.world.reduced == []


def test_schedulers_of_the_plain_optimizer_observe_its_steps(own):
    own.world = World(0, 1)
    model = net(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer = DistributedOptimizer(plain, model.named_parameters(), op=Op.ADASUM)
    loss_of(model, 0).backward()
    optimizer.step()
    scheduler.step()  # a warning would raise
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_parameter_without_a_local_gradient_gets_the_step_of_its_peer(threads):
    def train(rank, world):
        model: Any = torch.nn.ModuleList([net(3, 2), net(3, 2)])
        optimizer = wrapped(model)
        loss_of(model[rank], rank).backward()
        optimizer.step()
        return values(model[0]), values(model[1])

    first, second = threads(2, train)
    for rank in range(2):
        plain = net(3, 2)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        loss_of(plain, rank).backward()
        theirs.step()
        torch.testing.assert_close(first[rank], values(plain))
        torch.testing.assert_close(second[rank], values(plain))


def test_deltas_of_a_device_are_sent_together_under_one_name(threads):
    def train(rank, world):
        model = net(3, 2)
        model[0].bias.requires_grad_(False)  # it never changes
        optimizer = wrapped(model)
        for _ in range(2):
            loss_of(model, rank).backward()
            optimizer.step()
        return world.reduced

    assert threads(2, train) == [[("adasum.0.weight", [torch.float32])] * 2] * 2


def test_compression_applies_to_deltas(threads):
    class Halving:
        """A user's own."""

        @staticmethod
        def compress(tensor):
            return (tensor / 2).half(), tensor.dtype

        @staticmethod
        def decompress(tensor, context):
            return tensor.to(context) * 2

    def train(rank, world, compression=Compression.none):
        model = net(3, 2)
        optimizer = wrapped(model, compression=compression)
        loss_of(model, rank).backward()
        optimizer.step()
        return values(model), world.reduced[0][1]

    exact, _ = threads(2, train)[0]
    for compression, dtype in [
        (Compression.fp16, torch.float16),
        (Compression.bf16, torch.bfloat16),
        (Halving, torch.float16),
    ]:
        for result, sent in threads(2, functools.partial(train, compression=compression)):
            assert sent == [dtype] * 2
            torch.testing.assert_close(result, exact, rtol=1e-2, atol=1e-2)
            assert result[0].dtype == torch.float32


def test_memory_formats_sparse_gradients_and_complex_parameters_are_supported(threads):
    def train(rank, world):
        convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        embedding = torch.nn.Embedding(6, 2, sparse=True)
        wave = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        parameters = [convolution.weight, embedding.weight, wave]
        with torch.no_grad():
            convolution.weight.fill_(0.5)
            embedding.weight.fill_(0.5)
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=Op.ADASUM)
        convolution.weight.grad = torch.full_like(convolution.weight, 1.0)
        embedding(torch.tensor([rank])).sum().backward()
        wave.grad = torch.full_like(wave, 1j)
        optimizer.step()
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
        return [parameter.detach() for parameter in parameters]

    for convolution, embedding, wave in threads(2, train):
        assert convolution.eq(-0.5).all()  # equal deltas are averaged
        assert embedding.tolist() == [[-0.5] * 2] * 2 + [[0.5] * 2] * 4  # orthogonal ones added
        assert wave.tolist() == [1 - 1j] * 3


def test_sparse_as_dense_enables_optimizers_that_require_dense_gradients(threads):
    def train(rank, world):
        embedding = torch.nn.Embedding(6, 2, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        optimizer = wrapped(embedding, torch.optim.Adam, {"lr": 0.5}, sparse_as_dense=True)
        embedding(torch.tensor([1])).sum().backward()
        optimizer.step()
        return embedding.weight.detach()

    for weight in threads(2, train):
        torch.testing.assert_close(weight[1], torch.tensor([0.5, 0.5]))
        assert weight[0].tolist() == [1.0, 1.0]


# ---- as an optimizer -----------------------------------------------------------------------------


def test_adasum_optimizer_keeps_the_class_and_shares_state_with_schedulers(threads):
    def use(rank, world):
        model = net(3, 2)
        user = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(user, model.named_parameters(), op=Op.ADASUM)
        assert isinstance(optimizer, torch.optim.SGD) and isinstance(optimizer, WrappedOptimizer)
        assert type(optimizer).__name__ == "SGD"
        assert optimizer.param_groups is user.param_groups and optimizer.state is user.state
        assert set(optimizer._parameter_names.values()) == {"0.weight", "0.bias"}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        called = []
        optimizer.register_step_post_hook(lambda *_: called.append(True))
        loss_of(model, rank).backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert called == [True]
        optimizer.load_state_dict(optimizer.state_dict())
        copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        assert [type(each) for each in copies] == [torch.optim.SGD] * 2
        optimizer.synchronize()
        with pytest.raises(AssertionError, match="op=Adasum"), optimizer.skip_synchronize():
            pass
        with pytest.raises(Invalid, match=r"\bonce\b"):
            DistributedOptimizer(optimizer, op=Op.ADASUM)
        return world.activity

    assert threads(2, use) == [1, 1]


def test_closures_are_run_as_often_as_the_optimizer_requires(threads):
    def train(rank, world, kind=None, options=None):
        model = net(3, 2)
        optimizer = wrapped(model, kind, options)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, rank)
            loss.backward()
            return loss.detach()

        first, second = (optimizer.step(closure).item() for _ in range(2))
        return first, second, values(model)

    for kind, options in [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 5}),
    ]:
        (a0, b0, model0), (a1, b1, model1) = threads(
            2, functools.partial(train, kind=kind, options=options)
        )
        assert b0 + b1 < a0 + a1
        assert all(map(torch.equal, model0, model1))


def test_passes_are_counted_and_may_be_changed(threads):
    def train(rank, world):
        model = net(3, 2)
        optimizer = wrapped(model, backward_passes_per_step=2)
        assert optimizer.backward_passes_per_step == 2
        for passes in (2, 1, 2):
            optimizer.zero_grad()
            for _ in range(passes):
                loss_of(model, rank).backward()
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank).backward()
        optimizer.zero_grad()  # a gradient that is thrown away does not count
        for _ in range(2):
            loss_of(model, rank).backward()
        with pytest.raises(AssertionError, match=r"(weight|bias)\b.*\bbackward_passes_per_step\b"):
            loss_of(model, rank).backward()
        optimizer.set_backward_passes_per_step(4)
        for _ in range(4):
            loss_of(model, rank).backward()

    threads(2, train)


def test_parameters_may_be_added(threads):
    def train(rank, world):
        model, other = net(3, 2), net(3, 2)
        optimizer = wrapped(model)
        optimizer.add_param_group({"params": list(other.parameters())})
        loss_of(other, rank).backward()
        with pytest.raises(AssertionError, match="increase"):
            loss_of(other, rank).backward()
        optimizer._reset_passes()
        optimizer.step()
        return values(other)

    first, second = threads(2, train)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], net(3, 2)[0].weight)


def test_rank_with_overflowed_gradients_contributes_no_delta(threads):
    def train(rank, world, unscale=False, fused=False):
        model = net(3, 2)
        options = {"lr": 0.1, "fused": fused}
        optimizer = wrapped(model, torch.optim.SGD, options)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            if rank == 1 and step == 0:
                model[0].bias.grad[0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step == 0:
                first = values(model)
        return first, values(model), scaler.get_scale()

    plain = net(3, 2)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_of(plain, 0).backward()
    theirs.step()
    for unscale, fused in itertools.product([False, True], repeat=2):
        results = threads(2, functools.partial(train, unscale=unscale, fused=fused))
        for first, last, _ in results:
            torch.testing.assert_close(first, values(plain))
            assert all(map(torch.equal, last, results[0][1]))
            assert not torch.equal(last[0], first[0])
        assert [scale for *_, scale in results] == [8.0, 4.0]


# ---- what can go wrong ---------------------------------------------------------------------------


def test_broken_world_restores_the_parameters_of_the_step(own):
    own.world = World(0, 2, fake.world(2)[0], elastic=True)
    model = net(3, 2)
    optimizer = wrapped(model)
    before = values(model)
    loss_of(model, 0).backward()
    own.world.lost = True
    with pytest.raises(PeerLost):
        optimizer.step()
    assert all(map(torch.equal, values(model), before))
    assert own.world.activity == 1
    optimizer._reset_passes()  # as a restore does
    loss_of(model, 0).backward()


def test_passes_are_counted_from_zero_in_a_new_world(own):
    own.world = World(0, 2, fake.world(2)[0], elastic=True)
    model = net(3, 2)
    optimizer = wrapped(model)
    loss_of(model, 0).backward()
    own.world.generation = 2
    loss_of(model, 0).backward()
    own.world = World(0, 1, elastic=True)
    optimizer.step()


def test_error_inside_the_step_restores_the_parameters(own):
    own.world = World(0, 2, fake.world(2)[0])
    model = net(3, 2)
    optimizer = wrapped(model)
    before = values(model)

    def closure():
        with torch.no_grad():
            model[0].weight.add_(1.0)
        raise RuntimeError("out of memory")

    with raises(RuntimeError):
        optimizer.step(closure)
    assert all(map(torch.equal, values(model), before))


def test_number_of_ranks_is_checked_before_the_step(own):
    own.world = World(0, 3)
    with raises(ValueError):
        wrapped(net(3, 2))
    own.world = World(0, 3, elastic=True)  # which may be 4 when it begins
    model = net(3, 2)
    optimizer = wrapped(model)
    before = values(model)
    loss_of(model, 0).backward()
    with raises(ValueError):
        optimizer.step()
    assert all(map(torch.equal, values(model), before))


def test_unsupported_arguments_of_adasum_are_refused(own):
    own.world = World(0, 2)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        wrapped(net(3, 2), gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="process_set"):
        wrapped(net(3, 2), process_set=ProcessSet([0, 1]))
    assert issubclass(AdasumDistributed, WrappedOptimizer)
