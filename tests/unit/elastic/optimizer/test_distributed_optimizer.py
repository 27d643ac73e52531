"""DistributedOptimizer in one process: against a twin that always sends what we send, and among threads."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch

from elastic.api.compression import Compression
from elastic.collectives.interface import Op
from elastic.collectives.single_rank import LocalCollectives
from elastic.errors import Invalid, NotInitialized, PeerLost, StateMismatch
from elastic.negotiation.process_sets import ProcessSet
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients import gradient_reducer
from elastic.protocol import messages
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from harness.golden import raises, recorded, warns
from harness.small_worlds import (
    MirroredGroup,
    Rounding,
    backward,
    net,
    sgd,
    small,
    take_steps,
    train_once,
)


def values(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def grads(model) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


# ---- like the optimizer that was wrapped ---------------------------------------------------------


class OutOfMemory(Exception):
    """Raised within backward."""


def backward_cut_short(model, optimizer) -> None:
    """A backward pass that fails when all its gradients are under way."""

    def fail(_: torch.Tensor) -> None:
        if optimizer._reducer._launched == len(optimizer._reducer._plan.buckets):
            raise OutOfMemory

    handles = [each.register_post_accumulate_grad_hook(fail) for each in model.parameters()]
    with pytest.raises(OutOfMemory):
        backward(model)
    for handle in handles:
        handle.remove()


def test_distributed_optimizer_has_the_class_and_shares_the_state_of_the_wrapped_one(world):
    model = net(3, 2)
    plain: Any = torch.optim.Adam(model.parameters(), lr=0.5)
    wrapped = DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(wrapped, torch.optim.Adam)
    assert type(wrapped).__name__ == "Adam"
    assert "horovod" in str(type(wrapped))  # by which frameworks tell that it is wrapped
    assert wrapped.param_groups is plain.param_groups
    assert wrapped.state is plain.state
    assert wrapped.defaults is plain.defaults
    assert vars(wrapped)["_parameter_names"] == {p: n for n, p in model.named_parameters()}


def test_schedulers_work_whether_made_before_or_after(world):
    model = net(3, 2)
    plain: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    wrapped = DistributedOptimizer(plain, model.named_parameters())
    after = torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.5)
    backward(model)
    wrapped.step()
    assert len(world.gradients.calls) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before.step()
        after.step()
    assert wrapped.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("steps", [True, False])
def test_schedulers_warn_only_if_the_wrapped_optimizer_has_not_stepped(world, steps):
    model = net(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(plain, 0.5) for _ in range(2)]
    wrapped = DistributedOptimizer(plain, model.named_parameters())
    schedulers += [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (plain, wrapped)]
    if steps:
        backward(model)
        wrapped.step()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for each in schedulers:
            each.step()
    assert len(raised) == (0 if steps else len(schedulers))


def test_a_scheduler_of_the_plain_optimizer_acts_on_a_state_that_was_loaded(world):
    model = net(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    wrapped = DistributedOptimizer(plain, model.named_parameters())
    train_once(model, wrapped)
    wrapped.load_state_dict(wrapped.state_dict())
    scheduler.step()
    assert wrapped.param_groups[0]["lr"] == 0.5


def test_step_hooks_run_once(world):
    model, optimizer = small(3, 2)
    ran = []
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())  # torch patches step() again here
    train_once(model, optimizer)
    assert ran == ["post"]


def test_a_copy_or_a_pickle_is_a_plain_optimizer(world):
    optimizer = sgd(net(3, 2))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.SGD
        assert twin.param_groups[0]["lr"] == 0.1


def test_a_wrapped_model_can_be_copied(world):
    model, optimizer = small(3, 2)
    backward(copy.deepcopy(model))
    assert not optimizer._reducer.pending


def test_step_counts_as_activity(world):
    model, optimizer = small(3, 2)
    backward(model)
    before = world.activity
    optimizer.step()
    assert world.activity > before


# ---- how gradients travel ------------------------------------------------------------------------


def test_first_step_compares_plans_and_later_steps_send_only_buckets(world):
    model, optimizer = small(3, 2)
    backward(model)
    assert [op for op, _ in world.gradients.calls] == ["MAX", "SUM"]
    optimizer.step()
    assert len(world.gradients.calls) == 2
    optimizer.zero_grad()
    backward(model)
    assert [op for op, _ in world.gradients.calls] == ["MAX", "SUM", "SUM"]
    optimizer.step()
    assert len(world.gradients.calls) == 3


def test_buckets_are_launched_in_plan_order_for_any_order_of_readiness(world, monkeypatch):
    monkeypatch.setattr(gradient_reducer, "FIRST_BYTES", 0)
    monkeypatch.setattr(gradient_reducer, "FULL_BYTES", 0)
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(100))
    optimizer = DistributedOptimizer(torch.optim.SGD([first, second], lr=0.1))
    (first.sum() + second.sum()).backward()
    optimizer.step()
    calls = world.gradients.calls
    del calls[:]
    optimizer.zero_grad()
    launched = []
    first.register_post_accumulate_grad_hook(lambda _: launched.append(len(calls)))
    (second.sum() + first.sum()).backward()
    assert launched == [0]
    assert [numel for _, numel in calls] == [112 + 1, 16]  # padded to 64 bytes, and the mark
    optimizer.step()


def test_gradients_become_views_and_keep_their_memory(world):
    model, optimizer = small(3, 4, 2, lr=0.0)
    train_once(model, optimizer)
    places = [parameter.grad.data_ptr() for parameter in model.parameters()]
    expected = grads(model)
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none)
        train_once(model, optimizer)
        assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places
    torch.testing.assert_close(grads(model), expected)


def test_replaced_gradient_memory_is_copied_into_the_bucket(world):
    model, optimizer = small(3, 2, lr=0.0)
    train_once(model, optimizer)
    for parameter in model.parameters():
        parameter.grad.data = torch.full_like(parameter, 5.0)
    optimizer.step()
    assert all(bool((gradient == 5.0).all()) for gradient in grads(model))


def test_divisor_is_the_size_of_the_present_world(world):
    model, optimizer = small(3, 2, lr=0.0, op=Op.SUM)
    sizes = []
    for size in (2, 3, 1, 4):
        world.become(size)
        take_steps(model, optimizer, 1)
        sizes.append(float(model[0].bias.grad[0]))
    assert sizes == [2.0, 3.0, 1.0, 4.0]


def test_world_of_one_neither_communicates_nor_copies(world):
    world.become(1)
    model, optimizer = small(3, 2)
    backward(model)
    held = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.zero_grad()
    assert all(gradient is not None for gradient in held)
    assert not optimizer._reducer._plan.buckets


def test_joining_worker_before_its_world_acts_as_a_world_of_one(world):
    world.gradients = LocalCollectives()
    model, optimizer = small(3, 2)
    backward(model)
    expected = grads(model)
    optimizer.step()
    torch.testing.assert_close(grads(model), expected)


@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
def test_reductions_other_than_average_are_not_scaled(world, op):
    model, optimizer = small(3, 2, lr=0.0, op=op)
    backward(model)
    expected = grads(model)
    optimizer.step()
    torch.testing.assert_close(grads(model), expected)
    assert world.gradients.calls[-1][0] == op.name


def test_parameters_of_any_shape_layout_and_dtype_are_reduced(world):
    scalar = torch.nn.Parameter(torch.tensor(2.0))
    image: Any = torch.nn.Conv2d(3, 4, 3)
    image = image.to(memory_format=torch.channels_last)
    double = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    turned = torch.nn.Parameter(torch.ones(3, 5).t())
    empty = torch.nn.Parameter(torch.ones(0))
    everything = [scalar, *image.parameters(), double, turned, empty]
    optimizer = DistributedOptimizer(torch.optim.SGD(everything, lr=0.0))
    for _ in range(2):
        optimizer.zero_grad()
        pixels = torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last)
        loss = image(pixels).sum() * scalar + (double.sum() + turned.sum() + empty.sum()).float()
        local = torch.autograd.grad(loss, everything, retain_graph=True)
        loss.backward()
        optimizer.step()
        for parameter, gradient in zip(everything, local, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
            assert parameter.grad.stride() == parameter.stride()


def test_groups_are_reduced_in_one_piece(world):
    model = net(3, 4, 2)
    optimizer = sgd(model, groups=[[model[0].weight, model[1].bias]])
    train_once(model, optimizer)
    assert world.gradients.calls[1:] == [("SUM", 16 + 16 + 1), ("SUM", 16 + 16)]
    world.become(2)
    counted = sgd(net(3, 4, 2), groups=4)
    backward(counted_model := net(3, 4, 2))
    assert counted_model is not None
    counted.step()
    assert len(world.gradients.calls) == 1 + 4


def test_fp16_compression_returns_float32_gradients(world):
    model, optimizer = small(3, 2, lr=0.0, compression=Compression.fp16)
    for _ in range(2):
        take_steps(model, optimizer, 1, scale=3.0)
        assert model[0].bias.grad.dtype is torch.float32
        assert model[0].bias.grad.tolist() == [3.0, 3.0]


def test_custom_compression_is_applied_to_each_gradient(world):
    model, optimizer = small(3, 2, lr=0.0, compression=Rounding)
    for _ in range(2):
        take_steps(model, optimizer, 1, scale=3.2)
        assert model[0].bias.grad.tolist() == [3.0, 3.0]
        assert [numel for _, numel in world.gradients.calls[-2:]] == [2, 6]


# ---- passes, missing gradients, changing parameters ----------------------------------------------


def test_passes_are_accumulated_and_reduced_once(world):
    model, optimizer = small(3, 2, lr=0.0, backward_passes_per_step=3)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            backward(model)
        optimizer.step()
        assert model[0].bias.grad.tolist() == [3.0, 3.0]
    assert [op for op, _ in world.gradients.calls] == ["MAX", "SUM", "SUM"]
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    optimizer.zero_grad()
    backward(model)
    assert len(world.gradients.calls) == 4
    optimizer.step()
    with raises(Invalid):
        optimizer.set_backward_passes_per_step(0)


def test_an_unfinished_accumulation_can_be_stepped(world):
    model, optimizer = small(3, 2, lr=0.0, backward_passes_per_step=3)
    train_once(model, optimizer)
    assert model[0].bias.grad.tolist() == [1.0, 1.0]


def test_one_backward_pass_too_many_raises_with_the_option_to_set(world):
    model = net(3, 2)
    sgd_ = sgd(model)
    backward(model)
    with pytest.raises(AssertionError, match="set backward_passes_per_step"):
        backward(model)
    assert sgd_._reducer.pending


def test_two_optimizers_of_one_model_are_named_in_the_error(world):
    model = net(3, 2)
    old, new = sgd(model), sgd(model)
    backward(model)
    new.step()
    with pytest.raises(AssertionError, match=r"two DistributedOptimizers hold 0\.(weight|bias)"):
        backward(model)
    del old


class Copying:
    """A compression of a script, of any dtype."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.clone(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("length", [2, 70_000])
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Copying])
def test_complex_gradients_are_averaged(threads, dtype, length, compression):
    def rank(number: int) -> None:
        phase = torch.nn.Parameter(torch.ones(length, dtype=dtype))
        scale = torch.nn.Parameter(torch.ones(3))
        named = [("phase", phase), ("scale", scale)]
        plain = torch.optim.SGD([phase, scale], lr=0.5)
        optimizer = DistributedOptimizer(plain, named, compression=compression)
        for _ in range(2):
            optimizer.zero_grad()
            (phase * (1 + 4j * number)).real.sum().backward()
            optimizer.step()
            assert phase.grad is not None
            assert torch.equal(phase.grad, torch.full((length,), 1 - 2j, dtype=dtype))
        assert torch.equal(phase.detach(), torch.full((length,), 2j, dtype=dtype))
        assert scale.grad is not None and not scale.grad.any()

    threads(2, rank)


def test_gradients_of_gradients_are_refused(world):
    model, optimizer = small(3, 2)
    with pytest.raises(AssertionError, match="create_graph"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(1, 3)).square().sum().backward(create_graph=True)
    optimizer._reset_passes()
    for parameter in model.parameters():
        parameter.grad = None


def test_zero_grad_is_refused_while_gradients_travel(world):
    model, optimizer = small(3, 2)
    backward(model)
    with raises(AssertionError):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_load_state_dict_resets_the_counted_passes(world):
    model, optimizer = small(3, 2, backward_passes_per_step=2)
    backward(model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer._reducer.pending
    backward(model)
    train_once(model, optimizer)


def test_freezing_and_thawing_makes_a_new_plan(world):
    model = net(3, 4, 2)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = sgd(model)
    sent = []
    for frozen in (True, False, False, True, True):
        for parameter in model[0].parameters():
            parameter.requires_grad_(not frozen)
        before = len(world.gradients.calls)
        take_steps(model, optimizer, 1)
        sent.append([numel for op, numel in world.gradients.calls[before:] if op == "SUM"])
        assert (model[0].weight.grad is None) == frozen
    # A change is told with the plan that all have.
    assert sent == [[33], [33, 65], [65], [65], [33]]


def test_added_parameter_group_is_reduced(world):
    model, late = net(3, 2), net(3, 1)
    optimizer = sgd(model, lr=0.0)
    train_once(model, optimizer)
    optimizer.add_param_group({"params": list(late.parameters())})
    assert optimizer._parameter_names[late[0].weight] == "allreduce.noname.1.0"
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        backward(late)
        optimizer.step()
    assert world.gradients.calls[-1] == ("SUM", 65)


def test_a_changed_dtype_makes_a_new_plan(world):
    model, optimizer = small(3, 2, lr=0.0)
    train_once(model, optimizer)
    model.double()
    optimizer.zero_grad()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert model[0].bias.grad.tolist() == [1.0, 1.0]


def test_deleted_optimizer_removes_its_hooks(world):
    model = net(3, 2)
    first = sgd(model)
    backward(model)
    first.step()
    del first
    gc.collect()
    second = sgd(model)
    for _ in range(2):
        take_steps(model, second, 1)
    assert [op for op, _ in world.gradients.calls] == ["MAX", "SUM", "MAX", "SUM", "SUM"]


def test_all_parameters_may_be_frozen(world):
    model, optimizer = small(3, 2)
    model.requires_grad_(False)
    optimizer.step()
    assert [numel for op, numel in world.gradients.calls if op == "SUM"] == [1]  # somebody may thaw


# ---- sparse gradients ----------------------------------------------------------------------------


def embed(rank: int, **options):
    table: Any = torch.nn.Embedding(10, 2, sparse=True)
    torch.nn.init.ones_(table.weight)
    head = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(head.weight)
    both = [*table.parameters(), *head.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(both, lr=0.0), **options)
    for step in range(3):
        optimizer.zero_grad()
        words = [[1, 2], [2, 3, 3]][rank] if step else [1, 2]
        if rank == 0 or step != 1:  # rank 1 has no gradient in one step
            head(table(torch.tensor(words))).sum().backward()
        optimizer.step()
    return table.weight.grad


def test_sparse_gradients_are_gathered(threads):
    for gradient in threads(2, embed):
        assert gradient.is_sparse
        assert gradient.to_dense()[:5, 0].tolist() == [0.0, 0.5, 1.0, 1.0, 0.0]


def test_sparse_gradients_can_be_made_dense(threads):
    for gradient in threads(2, lambda rank: embed(rank, sparse_as_dense=True)):
        assert gradient.is_sparse  # again: an optimizer may take no other
        assert gradient.to_dense()[:5, 0].tolist() == [0.0, 0.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Rounding])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_optimizer_that_accepts_only_sparse_gradients_gets_sparse_ones(
    world, compression, set_to_none
):
    table: Any = torch.nn.Embedding(10, 2, sparse=True)
    plain: Any = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(plain, sparse_as_dense=True, compression=compression)
    for _ in range(3):
        optimizer.zero_grad(set_to_none)
        table(torch.tensor([1, 2, 2])).sum().backward()
        optimizer.step()
        rows = table.weight.grad.to_dense()[:4, 0].tolist()
        assert rows == [0.0, 1.0, 2.0, 0.0]


def test_rank_without_a_gradient_gets_a_sparse_gradient(threads):
    def train(rank):
        table: Any = torch.nn.Embedding(10, 2, sparse=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.0))
        if rank == 0:
            table(torch.tensor([4])).sum().backward()
        optimizer.step()
        return table.weight.grad.coalesce().indices().tolist()

    assert threads(2, train) == [[[4]], [[4]]]


def test_sparse_gradients_have_no_minimum(threads):
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        threads(2, lambda rank: embed(rank, op=Op.MIN))


# ---- synchronize, clipping, closures, scalers ----------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("bad", [0, 1], ids=["the first step", "a later one"])
def test_all_ranks_skip_a_step_in_which_one_found_infinities(threads, clips, bad):
    def train(rank):
        model, optimizer = small(3, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scales = []
        for step in range(3):
            optimizer.zero_grad()
            sample = float("inf") if (rank, step) == (1, bad) else 1.0 + rank
            scaler.scale(model(torch.full((1, 3), sample)).sum()).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert all(bool(value.isfinite().all()) for value in values(model))
        return scales, [value.tolist() for value in values(model)]

    first, second = threads(2, train)
    assert first == second
    assert first[0] == [8.0] * bad + [4.0] * (3 - bad)


def test_gradient_scaler_with_unscaling_and_clipping_trains_equally_on_all_ranks(threads):
    def train(rank):
        model, optimizer = small(3, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 3), float(rank))).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return [value.tolist() for value in values(model)]

    first, second = threads(2, train)
    assert first == second


@pytest.mark.slow
def test_compiled_models_train_like_plain_models(world):
    model, plain = net(3, 4, 2), net(3, 4, 2)
    compiled = torch.compile(model, backend="aot_eager")
    ours, theirs = sgd(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for run, optimizer in ((compiled, ours), (plain, theirs)):
            optimizer.zero_grad()
            run(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(values(model), values(plain))


# ---- when the world breaks -----------------------------------------------------------------------


def test_a_hook_that_cannot_launch_marks_the_world_broken_and_step_raises(world):
    model, optimizer = small(3, 2)
    train_once(model, optimizer)
    world.gradients.failure = "connection reset"
    optimizer.zero_grad()
    backward(model)
    assert world.broken
    recorded("messages", world.reason)
    with raises(PeerLost):
        optimizer.step()


def test_broken_world_launches_no_bucket(world):
    model, optimizer = small(3, 2)
    train_once(model, optimizer)
    world.mark_broken(1, "a word from the driver")
    before = len(world.gradients.calls)
    backward(model)
    assert len(world.gradients.calls) == before
    with raises(PeerLost):
        optimizer.synchronize()


def test_training_continues_in_the_new_world_after_a_restore(world):
    model, optimizer = small(3, 2, lr=0.0)
    train_once(model, optimizer)
    optimizer.zero_grad()
    backward_cut_short(model, optimizer)  # launched
    world.gradients.failure = "rank 1 is gone"
    with pytest.raises(PeerLost):
        optimizer.step()
    optimizer._reset_passes()
    held = [parameter.grad for parameter in model.parameters()]
    assert held == [None, None]  # neither local nor reduced
    world.become(2)
    train_once(model, optimizer)
    assert model[0].bias.grad.tolist() == [1.0, 1.0]
    assert [op for op, _ in world.gradients.calls] == ["MAX", "SUM"]


def test_buffers_that_old_works_may_write_are_not_used_again(world):
    model, optimizer = small(3, 2, lr=0.0)
    train_once(model, optimizer)
    place = model[0].bias.grad.data_ptr()
    kept = model[0].bias.grad
    old = world.gradients
    for holding in (False, True):
        optimizer.zero_grad()
        backward_cut_short(model, optimizer)
        old.holding = holding
        optimizer._reset_passes()
        world.become(2)
        take_steps(model, optimizer, 1)
        assert (model[0].bias.grad.data_ptr() == place) is not holding
        old = world.gradients
    assert kept is not None


@pytest.mark.parametrize("inside", [False, True], ids=["scaled outside", "scaled inside"])
def test_rebuilt_buckets_in_one_world_average_like_the_previous_ones(world, inside):
    world.become(2, group=MirroredGroup(2, scales_inside=inside))
    model, optimizer = small(3, 2, lr=0.0)
    train_once(model, optimizer)
    optimizer.zero_grad()
    backward_cut_short(model, optimizer)
    world.gradients.holding = True  # the others are late with this step, which is abandoned here
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    backward(model)
    world.gradients.holding = False
    optimizer.step()
    assert model[0].bias.grad.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.slow
def test_step_may_be_called_in_a_compiled_function(world):
    model, optimizer = small(3, 2, lr=0.0)

    @torch.compile(backend="eager")
    def step():
        optimizer.step()

    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        step()
        assert model[0].bias.grad.tolist() == [1.0, 1.0]


def test_a_new_world_without_a_restore_loses_no_gradient(world):
    model, optimizer = small(3, 2, lr=0.0)
    train_once(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    world.become(2)  # a planned change: nothing is rolled back
    train_once(model, optimizer)
    assert model[0].bias.grad.tolist() == [1.0, 1.0]


def test_zero_grad_is_allowed_again_in_a_new_world(world):
    model, optimizer = small(3, 2)
    backward(model)
    world.become(2)
    optimizer.zero_grad()


def test_different_models_are_refused_on_every_rank(threads):
    def train(rank):
        model, optimizer = small(3, 2 + rank)
        backward(model)
        with pytest.raises(StateMismatch, match=r"0\.weight float32 \[3, 3\].*\brank 1,.*\[2, 3\]"):
            optimizer.step()
        return "refused"

    assert threads(2, train) == ["refused"] * 2


def test_another_order_of_equal_parameters_is_refused(threads):
    def train(rank):
        named = [(name, torch.nn.Parameter(torch.ones(2))) for name in ("a", "b")]
        named = named[:: 1 if rank else -1]
        optimizer = DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named)
        with pytest.raises(StateMismatch):
            optimizer.step()

    threads(2, train)


def test_parameter_without_a_gradient_gets_zeros_for_any_size_of_an_elastic_world(world):
    """Else weight decay and momentum would act on it in a world of two and not in a world of one."""
    for size in (2, 1):
        world.become(size)
        model, optimizer = small(2, 2, 1)
        model[0](torch.ones(2)).sum().backward()
        optimizer.synchronize()
        assert all(torch.equal(g, torch.zeros_like(g)) for g in grads(model)[-2:])


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"backward_passes_per_step": 0},
        {"backward_passes_per_step": 1.5},
        {"gradient_predivide_factor": float("nan")},
        {"compression": "fp16"},
        {"compression": Compression},
        {"groups": True},
        {"gradient_predivide_factor": 2.0, "op": Op.SUM},
        {"gradient_predivide_factor": -1.0},
        {"op": 17},
        {"groups": -1},
        {"groups": "all"},
        {"groups": [1, 2]},
        {"groups": [["weight"]]},
        {"process_set": object()},
        {"process_set": ProcessSet([0, 1])},
    ],
)
def test_bad_options_are_refused(world, options):
    with raises(ValueError):
        sgd(net(3, 2), **options)


def test_bad_names_and_groups_are_refused(world):
    one, two = net(3, 2), net(3, 2)
    both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with raises(ValueError):
        DistributedOptimizer(both, [*one.named_parameters(), *two.named_parameters()])
    with raises(ValueError):
        DistributedOptimizer(both, one.named_parameters())
    with raises(ValueError):
        DistributedOptimizer(both, list(one.parameters()))
    model = net(3, 2)
    with raises(ValueError):
        sgd(model, groups=[[model[0].bias], [model[0].bias]])


def test_only_a_plain_optimizer_can_be_wrapped(world):
    with raises(ValueError):
        DistributedOptimizer(sgd(net(3, 2)))
    with raises(ValueError):
        DistributedOptimizer(net(3, 2))


def test_num_groups_is_deprecated(world):
    with warns(DeprecationWarning):
        sgd(net(3, 2), num_groups=2)


def test_distributed_optimizer_before_init_raises_not_initialized(monkeypatch):
    def nothing():
        raise NotInitialized("call init() first")

    monkeypatch.setattr(lifecycle, "current", nothing)
    with pytest.raises(NotInitialized, match=r"init\(\)"):
        sgd(net(3, 2))


# ---- as users write it ---------------------------------------------------------------------------


def test_the_threshold_of_fusion_sets_the_size_of_buckets(world):
    sent = {}
    for threshold in (None, 0, 100):
        world.env = worker_settings.read(
            {} if threshold is None else {"HOROVOD_FUSION_THRESHOLD": str(threshold)}
        )
        world.become(2)
        model, optimizer = small(3, 4, 2)
        train_once(model, optimizer)
        sent[threshold] = [numel for op, numel in world.gradients.calls if op == "SUM"]
    assert sent == {None: [64 + 1], 0: [16 + 1, 16, 16, 16], 100: [32 + 1, 32]}


def test_thresholds_that_differ_are_refused(threads):
    def train(rank):
        world = lifecycle.current()
        world.env = worker_settings.read({"HOROVOD_FUSION_THRESHOLD": str(100 * rank)})
        model, optimizer = small(3, 2)
        backward(model)
        with pytest.raises(StateMismatch):
            optimizer.step()

    threads(2, train)


def test_a_state_can_be_saved_and_loaded_into_another_run(world):
    def adam(model, lr):
        plain = torch.optim.Adam(model.parameters(), lr=lr)
        return DistributedOptimizer(plain, model.named_parameters())

    model, other = net(3, 2), net(3, 2)
    ours, theirs = adam(model, 0.1), adam(other, 0.5)
    backward(model)
    ours.step()
    saved = copy.deepcopy((model.state_dict(), ours.state_dict()))
    plain = torch.optim.Adam(net(3, 2).parameters())
    plain.load_state_dict(saved[1])  # and it is nobody's but Adam's
    other.load_state_dict(saved[0])
    theirs.load_state_dict(saved[1])
    assert theirs.param_groups[0]["lr"] == 0.1
    for each, optimizer in ((model, ours), (other, theirs)):
        take_steps(each, optimizer, 1)
    torch.testing.assert_close(values(other), values(model))


def test_each_group_of_parameters_keeps_its_options(world):
    model, plain = net(3, 4, 2), net(3, 4, 2)

    def grouped(each):
        slow = {"params": each[0].parameters(), "lr": 0.01}
        return torch.optim.SGD(
            [slow, {"params": each[1].parameters(), "weight_decay": 0.1}], lr=0.1, momentum=0.9
        )

    ours, theirs = DistributedOptimizer(grouped(model), model.named_parameters()), grouped(plain)
    scheduler = torch.optim.lr_scheduler.LambdaLR(ours, [lambda _: 0.5, lambda _: 1.0])
    theirs.param_groups[0]["lr"] *= 0.5
    for _ in range(3):
        for each, optimizer in ((model, ours), (plain, theirs)):
            take_steps(each, optimizer, 1)
        scheduler.step()
    torch.testing.assert_close(values(model), values(plain))


def test_adversarial_models_train_with_alternating_freezing(world):
    """One learns to judge what the other makes; while that one learns, the judge is frozen. No plan changes by it."""

    def play(wrap):
        maker, judge = net(3, 3), net(3, 1)
        makers, judges = wrap(maker), wrap(judge)
        for _ in range(3):
            judge.requires_grad_(True)
            judges.zero_grad()
            judge(maker(torch.ones(1, 3)).detach()).sum().backward()
            judges.step()
            judge.requires_grad_(False)
            makers.zero_grad()
            judge(maker(torch.ones(1, 3))).sum().backward()
            makers.step()
        return values(maker) + values(judge)

    ours = play(sgd)
    assert [op for op, _ in world.gradients.calls].count("MAX") == 2
    theirs = play(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(ours, theirs)


def test_several_backwards_count_as_one_pass_each(world):
    """Two losses, one after the other: as many passes as there are backwards."""
    model, plain = net(3, 2), net(3, 2)
    ours = sgd(model, backward_passes_per_step=2)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for each, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            backward(each)
            backward(each, scale=0.5)
            optimizer.step()
    torch.testing.assert_close(values(model), values(plain))


def test_removed_process_set_raises_in_the_step(threads):
    def train(rank):
        pair = ProcessSet([0, 1])
        pair._entry.number = 1
        model, optimizer = small(3, 2, process_set=pair)
        train_once(model, optimizer)
        pair._entry.number, pair._entry.removed = 0, True
        optimizer.zero_grad()
        backward(model)  # raises nothing, as nobody could handle it there
        with pytest.raises(ValueError, match=r"\[0, 1\].*\bremoved\b"):
            optimizer.step()

    threads(2, train)


def test_first_step_of_a_world_sends_one_message_besides_the_gradients(world):
    """Where ranks are far from each other, each message is a step's time."""

    class Telling(MirroredGroup):
        def broadcast(self, tensor, root):
            self.calls.append(("broadcast", tensor.numel()))
            return super().broadcast(tensor, root)

    model, optimizer = small(3, 2, lr=0.0)
    for _ in range(2):
        group = Telling(2)
        world.become(2, group=group)
        train_once(model, optimizer)
        optimizer.zero_grad()
        assert [name for name, _ in group.calls] == ["MAX", "SUM"]


# ---- parameters that change on some ranks only ---------------------------------------------------


def freezing(rank: int, freezes: dict[tuple[int, int], bool], steps: int = 6) -> Any:
    """Trains; ``freezes``: rank and step at which the first layer is frozen or thawed. Its values, and gradients."""
    model, optimizer = small(3, 2, 1, lr=0.01)
    if (rank, -1) in freezes:
        model[0].requires_grad_(False)
    for step in range(steps):
        if (rank, step) in freezes:
            model[0].requires_grad_(not freezes[rank, step])
        take_steps(model, optimizer, 1, scale=1.0 + rank)
    return [each.tolist() for each in values(model)], model[0].bias.grad


def test_rank_that_freezes_alone_adds_zeros_and_applies_the_reduced_gradients(threads):
    (first, gradient), (second, other) = threads(2, lambda rank: freezing(rank, {(0, 3): True}))
    assert first == second
    assert gradient.tolist() == other.tolist() != [0.0, 0.0]


def test_parameter_thawed_on_one_rank_is_trained_on_all(threads):
    def train(rank):
        return freezing(rank, {(0, -1): True, (1, -1): True, (1, 3): False})

    (first, _), (second, _) = threads(2, train)
    assert first == second != freezing_nothing(threads)


def freezing_nothing(threads) -> Any:
    return threads(2, lambda rank: freezing(rank, {(0, -1): True, (1, -1): True}))[0][0]


def test_thawed_parameter_is_reduced_in_the_same_step_and_all_gradients_once(threads):
    def train(rank):
        model, optimizer = small(3, 2, 1, lr=0.0, op=Op.SUM)
        for step in range(3):
            model[0].requires_grad_(step > 0)
            take_steps(model, optimizer, 1, scale=1.0 + rank)
            if step == 1:
                return [each.tolist() for each in grads(model)]
        return None

    model = net(3, 2, 1)
    backward(model, scale=3.0)
    expected = [each.tolist() for each in grads(model)]
    assert threads(2, train) == [expected] * 2


def test_parameter_frozen_on_all_ranks_has_no_gradient(threads):
    freezes = {(0, 2): True, (1, 4): True}
    results = threads(2, lambda rank: freezing(rank, freezes))
    assert [gradient for _, gradient in results] == [None, None]
    assert results[0][0] == results[1][0]


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_grown_parameter_is_reduced_only_when_grown_on_all_ranks(threads, who):
    def train(rank):
        model, optimizer = small(3, 2, lr=0.1)
        for step in range(3):
            if step == 1 and rank in who:
                for parameter in model.parameters():
                    parameter.data = torch.cat([parameter.data, parameter.data])
            optimizer.zero_grad()
            if step == 1 and len(who) == 1:
                with pytest.raises(StateMismatch, match=r"0\.weight float32 \[.*\brank 1"):
                    train_once(model, optimizer, scale=1.0 + rank)
                return None
            train_once(model, optimizer, scale=1.0 + rank)
        return model[0].bias.grad.tolist()

    assert threads(2, train) == ([[1.5] * 4] * 2 if len(who) == 2 else [None, None])


def test_the_first_option_that_differs_is_named_with_both_values(threads):
    def train(rank):
        _, optimizer = small(3, 2, compression=Compression.fp16 if rank else Compression.none)
        with pytest.raises(StateMismatch, match=r"compression\b.*\bfp16\b.*\brank 1"):
            optimizer.step()

    threads(3, train)


def test_joining_ranks_with_different_options_fail_with_state_mismatch(threads):
    """Whatever the driver compared: those that have trained go on without them."""

    def train(rank):
        model = net(3, 2)
        own: Any = lifecycle.current()
        own.world = messages.World(1, own.place, messages.Address("", 0), 2, None, "")
        optimizer = sgd(model, op=Op.SUM if rank == 2 else Op.AVERAGE)
        with pytest.raises(StateMismatch if rank == 2 else PeerLost, match=r"\bSUM\b.*\brank 2"):
            optimizer.step()

    threads(3, train)
