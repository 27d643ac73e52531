"""Process sets on real ranks: beyond tests/conformance, and sets whose members are killed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from elastic.runtime import lifecycle
from harness import ranks as processes
from harness import wording
from harness.history import RETURN, SCRIPTS
from harness.job import Job
from horovod.common.process_sets import get_process_set_ids_and_ranks

SIZE = 3
FIRST, LAST = [0, 1], [1, 2]  # they share rank 1


def begin(rank: int, size: int, address: Any) -> None:
    """Static sets, registered as scripts do; more may follow."""
    from harness.scripts import light  # noqa: F401

    lifecycle.init_static(rank, size, address)
    processes.kept["first"], processes.kept["last"] = hvd.ProcessSet(FIRST), hvd.ProcessSet(LAST)
    hvd.init(process_sets=[processes.kept["first"], processes.kept["last"]])
    hvd.init(process_sets="dynamic")


ranks = processes.fixture(SIZE, enter=begin)


def in_order(rank: int, size: int) -> None:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == size
    assert sorted(get_process_set_ids_and_ranks()) == [0, 1, 2]


on_all = functools.partial(processes.on_all, after=in_order)


def mine(rank: int) -> list[hvd.ProcessSet]:
    return [each for each in (processes.kept["first"], processes.kept["last"]) if each.included()]


# ---- what collectives compute --------------------------------------------------------------------


@on_all
def test_collectives_of_several_sets_match_in_any_order(rank, size):
    order = torch.randperm(20, generator=torch.Generator().manual_seed(rank)).tolist()
    handles = {
        (ps.process_set_id, i): hvd.allreduce_async(
            torch.full((3,), float(i)), name=f"many {i}", op=hvd.Sum, process_set=ps
        )
        for i in order
        for ps in [*mine(rank), hvd.global_process_set]
    }
    for (number, i), handle in handles.items():
        members = size if number == 0 else 2
        assert hvd.synchronize(handle).tolist() == [float(i * members)] * 3


# ---- gradients -----------------------------------------------------------------------------------


def grad_of(tensor: torch.Tensor) -> Any:
    assert tensor.grad is not None
    return tensor.grad.tolist()


@on_all
def test_backward_passes_match_by_the_names_of_the_forward(rank, size):
    """Ranks go through two graphs in different orders: without names the gradients would meet the wrong ones."""
    one = torch.ones(2, requires_grad=True)
    two = torch.ones(2, requires_grad=True)
    sums = [
        hvd.allreduce(one, name="one", op=hvd.Sum).sum(),
        (10 * hvd.allreduce(two, name="two", op=hvd.Sum)).sum(),
    ]
    with ThreadPoolExecutor(2) as pool:  # each waits for the other ranks' backward of the same name
        list(pool.map(lambda loss: loss.backward(), sums if rank else sums[::-1]))
    assert (grad_of(one), grad_of(two)) == ([3.0] * 2, [30.0] * 2)


@on_all
def test_grouped_collectives_skip_tensors_without_gradients(rank, size):
    floats = torch.ones(2, requires_grad=True)
    numbers = torch.full((2,), rank)
    flags = torch.tensor([True])
    total, count = hvd.grouped_allreduce([floats, numbers], name="mixed", op=hvd.Sum)
    assert count.tolist() == [3, 3] and not count.requires_grad
    gathered = hvd.grouped_allgather([flags, floats, torch.ones(1)], name="mixed")
    (total.sum() + gathered[1].sum()).backward()
    assert grad_of(floats) == [4.0] * 2  # three of the sum, one of the average
    part = hvd.grouped_reducescatter([floats.detach().expand(3, 2), numbers.expand(3, 2)])
    assert [each.tolist() for each in part] == [[[1.0, 1.0]], [[1, 1]]]


@on_all
def test_collectives_without_a_pending_gradient_record_no_graph(rank, size):
    tensor = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(tensor).requires_grad
    assert not hvd.allgather(torch.ones(2)).requires_grad
    twice = hvd.allreduce(tensor, name="twice", op=hvd.Sum)
    (twice * twice).sum().backward()  # used twice: one backward with the sum of both
    assert grad_of(tensor) == [2.0 * size * size] * 2
    complex_ones = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    hvd.allgather(complex_ones).abs().sum().backward()
    assert grad_of(complex_ones) == [1.0 + 0j] * 2


@on_all
def test_collectives_support_second_order_gradients(rank, size):
    cases: list[tuple[Callable[[Any], Any], float]] = [
        (lambda t: hvd.allreduce(t, name="a", op=hvd.Sum), 6.0 * size**3),
        (lambda t: hvd.broadcast(t, 1, name="b"), 6.0 / size if rank == 1 else 0.0),
        (lambda t: hvd.alltoall(t, name="c"), 6.0),
    ]
    for function, expected in cases:
        tensor = torch.ones(size, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(tensor).pow(3).sum(), tensor, create_graph=True)
        gradient.sum().backward()
        assert grad_of(tensor) == [expected] * size


# ---- objects and parameters ----------------------------------------------------------------------


@on_all
def test_objects_and_parameters_are_sent_within_a_process_set(rank, size):
    for ps in mine(rank):
        low, high = ps.ranks
        assert hvd.broadcast_object({"from": rank}, high, "settings", ps) == {"from": high}
        assert hvd.broadcast_object(None, low, process_set=ps) is None
        assert hvd.allgather_object([rank] * rank, process_set=ps) == [[low] * low, [high] * high]
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + rank, momentum=0.9)
        hvd.broadcast_parameters(model.state_dict(), high, process_set=ps)
        assert (model.weight == high).all()
        hvd.broadcast_optimizer_state(optimizer, high, process_set=ps)
        assert optimizer.param_groups[0]["lr"] == 1.0 + high
    big = bytes(3 << 20) + bytes([rank])
    assert hvd.broadcast_object(big if rank == 2 else None, 2)[-1] == 2
    assert [each[-1] for each in hvd.allgather_object(big[-(1 << 20) * (rank + 1) :])] == [0, 1, 2]


# ---- changes and refusals ------------------------------------------------------------------------


@on_all
def test_process_set_calls_that_differ_raise_an_error_on_all_ranks(rank, size):
    with pytest.raises(ValueError, match=r"ranks 0, 2 .*\[0\].*rank 1 .*\[1"):
        hvd.add_process_set([1] if rank == 1 else [0])
    with pytest.raises(ValueError, match=r"rank 0 .*\[0, 1\].*ranks 1, 2 "):
        hvd.remove_process_set(processes.kept["first"]) if rank == 0 else hvd.add_process_set([0])
    with pytest.raises(ValueError, match="0 to 2"):
        hvd.add_process_set([0, 3])
    with pytest.raises(ValueError, match="use global_process_set"):
        hvd.add_process_set(range(size))


# ---- in an elastic job ---------------------------------------------------------------------------

STEPS = 14


def records(job: Job) -> list[dict[str, Any]]:
    found = []
    for path in sorted((job.folder / "history").glob("*.jsonl")):
        whole, _, _ = path.read_text().rpartition("\n")
        found += [json.loads(line) for line in whole.splitlines()]
    return found


@pytest.mark.forked
def test_process_sets_survive_the_loss_of_members(job):
    """Three workers die in the middle of a set's collective; those who take their ranks take their places.

    Slots 2 and 3 at once, so that sets lose ranks until the world has grown again; then slot 1. Newcomers are promised
    another size than the script started with, and make other lists of it.
    """
    training = job(
        f"-np 4 --min-np 2 {RETURN}",
        ["python", SCRIPTS / "sets_in_use.py"],
        env={
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
            "STEPS": str(STEPS),
            "DIE": "2,3 3,3 1,8",
            "HOLD": "6 4;11 4",
        },
    )
    training.succeed(120)
    training.wait_for(wording.PROCESS_SET_REGISTERED_RANKS)
    found = records(training)
    last = [each for each in found if each["step"] == STEPS - 1]
    assert {(each["rank"], each["size"]) for each in last} == {(rank, 4) for rank in range(4)}
    assert {each["worker"].partition("#")[2] for each in last} == {"1", "2"}
    # Everybody's sets are the same at every step of every world, and so is what they add up to.
    for each in found:
        fellows = [o for o in found if o["generation"] == each["generation"]]
        assert all(o["sets"] == each["sets"] for o in fellows), (each, fellows)
        size = each["size"]
        expected = {
            "first": [0, 1],
            "even": [r for r in (0, 2) if r < size],
            "odd": [r for r in (1, 3) if r < size],
            "late": [r for r in (1, 2, 3) if r < size],
        }
        for name, members in expected.items():
            assert each["seen"].get(name, members) == members, each
            assert (name in each["seen"]) == (each["rank"] in members), each
    assert min(each["size"] for each in found) < 4
