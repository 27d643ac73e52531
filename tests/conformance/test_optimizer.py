"""DistributedOptimizer: trains like one process with the whole batch; Horovod's methods, warnings and errors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

import horovod.torch as hvd
from conformance.worlds import DEVICE, everywhere, raises, works
from harness import wording


def build(seed: int = 0, *, sparse: bool = False) -> Any:
    torch.manual_seed(seed)
    first = torch.nn.Embedding(11, 6, sparse=True) if sparse else torch.nn.Linear(5, 6)
    return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(6, 3))


def batch(number: int, *, sparse: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    if sparse:
        return torch.randint(11, (4,), generator=generator)
    return torch.randn(4, 5, generator=generator)


def sgd(model: torch.nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def wrapped(model: torch.nn.Module, optimizer: Any = None, **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        optimizer or sgd(model), named_parameters=model.named_parameters(), **options
    )


def compare(
    rank: int,
    size: int,
    told: str,
    *,
    make: Any = sgd,
    passes: int = 1,
    sparse: bool = False,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    """With the same model and optimizer that get the mean of all ranks' gradients in one process."""
    ours, reference = build(sparse=sparse), build(sparse=sparse)
    if "groups" in options and callable(options["groups"]):
        options["groups"] = options["groups"](ours)
    optimizer = wrapped(ours, make(ours), backward_passes_per_step=passes, **options)
    plain = make(reference)
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for turn in range(passes):
            numbers = [100 * step + 10 * turn + r for r in range(size)]
            ours(batch(numbers[rank], sparse=sparse)).square().mean().backward()
            for number in numbers:
                (reference(batch(number, sparse=sparse)).square().mean() / size).backward()
        optimizer.step()
        plain.step()
    for mine, wanted in zip(ours.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, wanted, rtol=tolerance, atol=tolerance), told


@everywhere()
def test_distributed_optimizer_trains_like_one_process_with_the_whole_batch(rank, size):
    compare(rank, size, "SGD")
    compare(rank, size, "momentum", make=lambda m: sgd(m, momentum=0.9, weight_decay=0.01))
    compare(rank, size, "Adam", make=lambda m: torch.optim.Adam(m.parameters(), lr=0.01))
    compare(rank, size, "three passes", passes=3)
    compare(rank, size, "predivided", gradient_predivide_factor=2.0)
    compare(rank, size, "fp16", compression=hvd.Compression.fp16, tolerance=1e-2)
    compare(rank, size, "bf16", compression=hvd.Compression.bf16, tolerance=5e-2)
    compare(rank, size, "two groups", groups=2)
    compare(
        rank,
        size,
        "listed groups",
        groups=lambda m: [list(m[0].parameters()), list(m[2].parameters())],
    )
    if DEVICE == "cpu":  # fake GPUs have no sparse tensors
        compare(rank, size, "sparse", sparse=True)
        compare(rank, size, "sparse as dense", sparse=True, sparse_as_dense=True)


@everywhere()
def test_distributed_optimizer_without_names_trains_equally_on_all_ranks(rank, size):
    model = build()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    model(batch(rank)).sum().backward()
    optimizer.step()
    weights = hvd.allgather(model[2].weight.detach().reshape(1, -1))
    assert all(torch.equal(weights[0], each) for each in weights)
    assert "allreduce.noname.0.0" in optimizer._parameter_names.values()


@everywhere()
def test_sum_adds_the_gradients_up(rank, size):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    (weight * (rank + 1)).sum().backward()
    optimizer.step()
    assert weight.tolist() == [-size * (size + 1) / 2] * 2


@everywhere()
def test_local_gradients_are_added_over_the_passes_not_divided(rank, size):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2
    )
    for _ in range(2):
        (weight * 3).sum().backward()
    optimizer.step()
    assert weight.item() == -6.0
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    (weight * 3).sum().backward()
    optimizer.step()
    assert weight.item() == -9.0


@everywhere()
def test_distributed_optimizer_keeps_the_class_and_state_of_the_wrapped_one(rank, size):
    model = build()
    inner: Any = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = wrapped(model, inner)
    assert isinstance(inner, torch.optim.Adam) and issubclass(type(optimizer), torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups is inner.param_groups
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for wanted in (0.1, 0.05, 0.025):
        assert optimizer.param_groups[0]["lr"] == wanted
        optimizer.zero_grad()
        model(batch(rank)).sum().backward()
        optimizer.step()
        scheduler.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["lr"] == 0.0125 and len(saved["state"]) == 4
    other = torch.optim.Adam(build().parameters(), lr=0.1)
    other.load_state_dict(saved)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.0125
    names = dict(model.named_parameters())
    assert {p: n for n, p in names.items()} == optimizer._parameter_names


@everywhere()
def test_gradients_may_be_clipped_between_synchronize_and_step(rank, size):
    model = build()
    optimizer = wrapped(model, sgd(model, lr=1.0))
    (model(batch(rank)).sum() * 100).backward()
    optimizer.synchronize()
    gradients = hvd.allgather(model[2].weight.grad.reshape(1, -1).clone())
    assert all(torch.equal(gradients[0], each) for each in gradients)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm > 1
    before = model[2].weight.detach().clone()
    with optimizer.skip_synchronize(), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert torch.allclose(before - model[2].weight, model[2].weight.grad)


@everywhere()
def test_step_after_synchronize_without_skip_warns(rank, size):
    model = build()
    optimizer = wrapped(model)
    model(batch(rank)).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any(wording.OPTIMIZER_STEP_CALLED_WITHOUT in str(w.message) for w in caught)


@everywhere()
def test_zero_grad_between_backward_and_step_is_refused(rank, size):
    model = build()
    optimizer = wrapped(model)
    model(batch(rank)).sum().backward()
    with raises(AssertionError, "zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model(batch(rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


@everywhere()
def test_parameter_used_by_some_ranks_only_is_averaged_over_all(rank, size):
    """The others send zeros for it, so that no rank waits; the rank changes with each step."""
    torch.manual_seed(0)
    layers: Any = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(3)])
    optimizer = wrapped(layers, sgd(layers, lr=1.0))
    for step in range(3):
        before = [layer.weight.detach().clone() for layer in layers]
        used = (rank + step) % 3
        optimizer.zero_grad()
        layers[used](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        users = [sum((r + step) % 3 == n for r in range(size)) for n in range(3)]
        for n, layer in enumerate(layers):
            moved = torch.full((2, 2), users[n] / size)
            assert torch.allclose(before[n] - layer.weight, moved), (step, n)


@everywhere()
def test_closure_of_an_optimizer_step_is_supported(rank, size):
    model = build()
    optimizer = wrapped(model)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch(rank)).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert isinstance(loss, torch.Tensor)
    weights = hvd.allgather(model[2].weight.detach().reshape(1, -1))
    assert all(torch.equal(weights[0], each) for each in weights)


@everywhere()
def test_gradient_scaler_skips_the_step_on_all_ranks_when_one_overflows(rank, size):
    """One rank's gradient overflows: all skip the step, and all lower the scale."""
    model = build()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        before = model[2].weight.detach().clone()
        optimizer.zero_grad()
        loss = model(batch(rank)).square().mean()
        if step == 1 and rank == size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(before, model[2].weight)
        assert moved == (step != 1), step
        scales = hvd.allgather(torch.tensor([scaler.get_scale()]))
        assert len(set(scales.tolist())) == 1 and scales[0] == (1024 if step == 0 else 512)


@everywhere()
def test_two_optimizers_and_models_train_concurrently(rank, size):
    """As of a generator and a discriminator; even ranks let the second one's gradients come first."""
    first, second = build(0), build(1)
    optimizers = [wrapped(first), wrapped(second)]
    for _ in range(2):
        losses = [first(batch(rank)).square().mean(), second(batch(rank + 7)).square().mean()]
        order = [0, 1] if rank % 2 else [1, 0]
        for n in order:
            losses[n].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model in (first, second):
        weights = hvd.allgather(model[2].weight.detach().reshape(1, -1))
        assert all(torch.equal(weights[0], each) for each in weights)


@everywhere()
def test_gradients_and_named_collectives_run_concurrently(rank, size):
    """A metric is in progress during the reduction of gradients."""
    model = build()
    optimizer = wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch(rank)), torch.zeros(4, 3))
        handle = hvd.allreduce_async(loss.detach(), name="loss") if rank % 2 else None
        loss.backward()
        if handle is None:
            handle = hvd.allreduce_async(loss.detach(), name="loss")
        optimizer.step()
        mean = hvd.synchronize(handle)
        assert mean.shape == () and mean > 0, step


@everywhere()
def test_training_continues_with_parameters_frozen_and_thawed(rank, size):
    model = build()
    optimizer = wrapped(model)
    for step in range(4):
        model[0].weight.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        model(batch(rank)).square().mean().backward()
        optimizer.step()
    weights = hvd.allgather(model[0].weight.detach().reshape(1, -1))
    assert all(torch.equal(weights[0], each) for each in weights)


@everywhere()
def test_invalid_arguments_of_the_optimizer_are_refused(rank, size):
    model = build()
    names = list(model.named_parameters())
    cases: dict[str, dict[str, Any]] = {
        "duplicate names": {"named_parameters": [("same", p) for _, p in names]},
        "not all are named": {"named_parameters": names[:2]},
        "no tuples": {"named_parameters": [list(pair) for pair in names]},
        "parameters without names": {"named_parameters": model.parameters()},
        "no passes": {"backward_passes_per_step": 0},
        "predivided sum": {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        "groups of something else": {"groups": [["weight"]]},
        "a negative number of groups": {"groups": -1},
        "a parameter in two groups": {"groups": [[names[0][1]], [names[0][1]]]},
    }
    for told, options in cases.items():
        try:
            hvd.DistributedOptimizer(sgd(model), **options)
        except ValueError:
            continue
        raise AssertionError(f"{told}: nothing was raised")
    works(size)
