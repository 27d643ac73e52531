"""DiLoCo on two ranks, and on two islands of two, beside a reference that is written out by hand."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

import elastic
from elastic.api.broadcasting import broadcast_object
from elastic.diloco import diloco as diloco_module
from elastic.diloco import island_group
from elastic.negotiation import submission
from harness.ranks import Ranks, in_a_world


@pytest.fixture(scope="module", name="pair")
def pair_of_ranks() -> Iterator[Ranks]:
    yield from in_a_world(2)


@pytest.fixture(scope="module", name="four")
def four_ranks() -> Iterator[Ranks]:
    yield from in_a_world(4)


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batch(number: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * number + step))


def inner_step(model: Any, optimizer: Any, rank: int, step: int) -> None:
    points = batch(rank, step)
    optimizer.zero_grad()
    (model(points) - points.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def reference(
    rounds: int, rate: float, momentum: float, shares: tuple[float, float] = (0.5, 0.5)
) -> list[torch.Tensor]:
    pairs = [network() for _ in range(2)]
    outer = [each.detach().clone() for each in pairs[0][0].parameters()]
    velocity = [torch.zeros_like(each) for each in outer]
    for round_ in range(rounds):
        for rank, (model, optimizer) in enumerate(pairs):
            for step in range(3 * round_, 3 * round_ + 3):
                inner_step(model, optimizer, rank, step)
        inner = [list(model.parameters()) for model, _ in pairs]
        with torch.no_grad():
            for i, value in enumerate(outer):
                mean = value - (shares[0] * inner[0][i] + shares[1] * inner[1][i])
                velocity[i] = momentum * velocity[i] + mean
                value -= rate * (mean + momentum * velocity[i])
                for each in inner:
                    each[i].copy_(value)
    return outer


def run_diloco(rank: int, size: int, kind: str) -> tuple[list[torch.Tensor], int]:
    model, optimizer = network()
    made = (
        elastic.LocalSGD(model, optimizer, every=3)
        if kind == "local"
        else elastic.DiLoCo(model, optimizer, every=3)
    )
    for step in range(9):
        inner_step(model, optimizer, rank, step)
        made.step()
    return [each.detach().clone() for each in model.parameters()], made.round


@pytest.mark.parametrize(("kind", "rate", "momentum"), [("local", 1.0, 0.0), ("diloco", 0.7, 0.9)])
def test_two_workers_equal_the_reference(pair, kind, rate, momentum):
    (first, rounds), (second, _) = pair.run(run_diloco, kind)
    assert rounds == 3
    for one, other, wanted in zip(first, second, reference(3, rate, momentum), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-4)


def run_weighted(rank: int, size: int, dtype: Any) -> list[torch.Tensor]:
    model, optimizer = network()
    made = elastic.DiLoCo(model, optimizer, every=3, dtype=dtype)
    for step in range(9):
        inner_step(model, optimizer, rank, step)
        made.step(tokens=[1, 3][rank] * (step % 3))
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize(("dtype", "atol"), [(None, 1e-5), (torch.bfloat16, 0.01)])
def test_mean_is_weighted_by_the_tokens_of_a_round(pair, dtype, atol):
    first, second = pair.run(run_weighted, dtype)
    for one, other, wanted in zip(first, second, reference(3, 0.7, 0.9, (0.25, 0.75)), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, atol=atol, rtol=1e-4)


def run_partly_weighted(rank: int, size: int, dtype: Any) -> str:
    model, _ = network()
    made = elastic.DiLoCo(model, None, every=1, dtype=dtype)
    try:
        made.step(tokens=4 if rank else None)
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(("dtype", "error"), [(None, "TensorMismatch"), (torch.int8, "Invalid")])
def test_token_weight_given_by_one_rank_only_raises_an_error_on_both_ranks(dtype, error):
    for pair in in_a_world(2):
        assert pair.run(run_partly_weighted, dtype) == [error, error]


def on_two_hosts(rank: int) -> None:
    there: Any = island_group
    there.socket = SimpleNamespace(gethostname=lambda: f"host{rank % 2}")


def run_islands(
    rank: int, size: int, dtype: Any, tokens: bool, forget: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    on_two_hosts(rank)
    model, optimizer = network()
    replica = torch.nn.parallel.DistributedDataParallel(model, process_group=elastic.island_group())
    made = elastic.DiLoCo(replica, optimizer, every=3, dtype=dtype)
    for step in range(9):
        points = batch(rank % 2, step)[rank // 2 :: 2]
        optimizer.zero_grad()
        outputs = (model if forget else replica)(points)
        (outputs - points.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        made.step([1, 6, 1, 0][rank] if tokens else None)
    outer, inner = ([each.detach().clone() for each in found] for found in (made.outer, made.inner))
    return outer, inner, made.bytes_sent


@pytest.mark.parametrize(
    ("tokens", "shares"), [(False, (0.5, 0.5)), (True, (0.25, 0.75))], ids=["equal", "weighted"]
)
def test_two_islands_of_two_equal_two_workers_with_twice_the_batch(four, tokens, shares):
    results = four.run(run_islands, None, tokens)
    wanted = reference(3, 0.7, 0.9, shares)
    for outer, inner, _ in results:
        assert all(map(torch.equal, outer, results[0][0]))
        assert all(map(torch.equal, outer, inner))
        for one, other in zip(outer, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    # Ranks 0 and 1 lead the islands.
    assert [sent > 0 for _, _, sent in results] == [True, True, False, False]


def test_quantized_islands_have_bitwise_equal_outer_parameters(four):
    results = four.run(run_islands, "int4", True)
    for outer, _, _ in results:
        assert all(map(torch.equal, outer, results[0][0]))


def run_diverging(rank: int, size: int) -> str:
    try:
        run_islands(rank, size, None, False, forget=True)
    except Exception as error:
        return type(error).__name__
    return ""


def test_workers_of_an_island_that_differ_raise_an_error_at_the_first_exchange(four):
    assert four.run(run_diverging) == ["StateMismatch"] * 4


def run_averaging_optimizer(rank: int, size: int) -> str:
    model, optimizer = network()
    try:
        elastic.DiLoCo(model, elastic.DistributedOptimizer(optimizer), every=1)
    except elastic.ElasticError as error:
        return type(error).__name__
    return ""


def test_inner_optimizer_that_averages_gradients_is_refused(pair):
    assert pair.run(run_averaging_optimizer) == ["Invalid"] * 2


def run_streaming(rank: int, size: int, dtype: Any) -> tuple[list[torch.Tensor], list[int], int]:
    model, optimizer = network()
    made = elastic.DiLoCo(model, optimizer, every=6, fragments=3, delay=1, dtype=dtype)
    for step in range(20):
        inner_step(model, optimizer, rank, step)
        made.step()
    return [each.detach().clone() for each in made.outer], made.merged, made.bytes_sent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, "int4"])
def test_streamed_outer_parameters_are_bitwise_equal(pair, dtype):
    (first, merged, _), (second, _, _) = pair.run(run_streaming, dtype)
    assert merged == [3, 3, 3]
    assert all(map(torch.equal, first, second))


def run_quantized(rank: int, size: int) -> tuple[list[torch.Tensor], ...]:
    model, optimizer = network()
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = elastic.DiLoCo(model, optimizer, outer, every=3, dtype="int4")
    before = [each.detach().clone() for each in made.outer]
    for step in range(3):
        inner_step(model, optimizer, rank, step)
        if step == 2:
            inner = [each.detach().clone() for each in made.inner]
        made.step()
    return before, inner, [each.detach().clone() for each in made.outer], made._residuals


def test_mean_of_quantized_changes_is_the_exact_mean_minus_the_mean_residual(pair):
    (before, first, outer, errors), (_, second, theirs, other_errors) = pair.run(run_quantized)
    assert all(map(torch.equal, outer, theirs))

    def flat(tensors):
        return torch.cat([each.reshape(-1) for each in tensors])

    change = flat(before) - (flat(first) + flat(second)) / 2
    owed = (errors[0] + other_errors[0]) / 2
    assert owed.any()
    torch.testing.assert_close(flat(before) - flat(outer), change - owed, atol=1e-6, rtol=0.0)


def torn(rank: int) -> elastic.DiLoCo:
    """Return a DiLoCo after four steps, whose merge after the third has failed on rank 0 only."""
    model, optimizer = network()
    made = elastic.DiLoCo(model, optimizer, every=3)
    before = [each.detach().clone() for each in made.outer]
    for step in range(4):
        inner_step(model, optimizer, rank, step)
        made.step()
    if rank == 0:  # as if its collective had broken: no merge, and it is owed
        with torch.no_grad():
            for each, value in zip(made.outer, before, strict=True):
                each.copy_(value)
        made.outer_optimizer.state.clear()
        made.take_shared({"position": 4, "merged": [0], "pending": (0, 3, 3)})
    made.take_shared(made.rounds.shared())  # both enter another world
    return made


def state_of(made: elastic.DiLoCo) -> tuple[list[torch.Tensor], list[int], list[torch.Tensor]]:
    outer, inner = ([each.detach().clone() for each in found] for found in (made.outer, made.inner))
    return outer, made.merged, inner


def run_torn(rank: int, size: int) -> tuple[list[torch.Tensor], list[int], list[torch.Tensor]]:
    made = torn(rank)
    assert made.inner_optimizer is not None
    for step in range(4, 6):
        inner_step(made.model, made.inner_optimizer, rank, step)
        made.step()
    return state_of(made)


def run_torn_at_the_end(
    rank: int, size: int, by_run: bool
) -> tuple[list[torch.Tensor], list[int], list[torch.Tensor]]:
    made = torn(rank)
    state = elastic.TorchState(diloco=made)
    if by_run:
        elastic.run(lambda state: None)(state)
    else:
        state.reconcile()
    return state_of(made)


@pytest.mark.parametrize("by_run", [True, False])
def test_rank_whose_last_merge_broke_gets_the_parameters_of_its_peer_without_a_further_step(
    pair, by_run
):
    (first, merged, _), (second, theirs, _) = pair.run(run_torn_at_the_end, by_run)
    assert merged == theirs == [1]
    assert all(map(torch.equal, first, second))


def test_rank_whose_collective_broke_adopts_the_merge_of_its_peer(pair):
    (first, merged, inner), (second, theirs, _) = pair.run(run_torn)
    assert merged == theirs == [2]
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, inner))


def run_apart(rank: int, size: int, behind: str) -> tuple[list[torch.Tensor], int, int]:
    """Interrupt a merge that some ranks have applied, and complete it in the next world.

    Args:
        behind: "island": ranks 0 and 2 have not applied it, and rank 0 has received its mean. "member": rank 2 has not
            applied it, as if its collective had broken.
    """
    on_two_hosts(rank)
    model, optimizer = network()
    replica = torch.nn.parallel.DistributedDataParallel(model, process_group=elastic.island_group())
    made = elastic.DiLoCo(replica, optimizer, every=4, delay=2)
    before = [each.detach().clone() for each in made.outer]
    own = rank % 2 == 0
    for step in range(5 if own and behind == "island" else 6):
        inner_step(replica, optimizer, rank % 2, step)
        made.step()
        if step >= 3 and made._in_flight:
            until = time.monotonic() + 60.0
            while made._in_flight and time.monotonic() < until:
                made._receive_early()
    if behind == "member" and rank == 2:
        with torch.no_grad():
            for each, value in zip(made.outer, before, strict=True):
                each.copy_(value)
        made.outer_optimizer.state.clear()
        made.rounds.merged = [0]
    made.rounds._world = None  # as in another world
    shared = create_autospec(broadcast_object, side_effect=AssertionError)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diloco_module, "broadcast_object", shared)
        elastic.TorchState(diloco=made).reconcile()
    values = [
        *made.outer,
        *(each["momentum_buffer"] for each in made.outer_optimizer.state.values()),
    ]
    return [each.detach().clone() for each in values], made.round, made.position


@pytest.mark.parametrize("behind", ["island", "member"])
def test_ranks_without_a_merge_complete_it_without_a_transfer_from_the_other_island(four, behind):
    results = four.run(run_apart, behind)
    for values, rounds, position in results:
        assert (rounds, position) == (1, 6)
        assert all(map(torch.equal, values, results[1][0]))


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def await_decisions(made: elastic.DiLoCo, count: int) -> None:
    """Wait, while this rank's script does nothing, until merges are decided without it."""
    exchange: Any = made._exchange
    with exchange._changed:
        assert exchange._changed.wait_for(lambda: exchange.decisions(0).decided >= count, 60.0)


def run_late(rank: int, size: int, dtype: Any, tokens: int) -> dict[str, Any]:
    """Rank 1 takes one inner step while rank 0 takes five, and both take part in the third merge."""
    model, optimizer = network()
    made = elastic.DiLoCo(
        model,
        optimizer,
        torch.optim.SGD(model.parameters(), lr=1.0),
        every=2,
        dtype=dtype,
        grace_s=0.05,
        quorum=1,
    )
    made.reconcile()
    found: dict[str, Any] = {"changes": []}

    def step() -> None:
        inner_step(model, optimizer, rank, made.own_steps)
        found["changes"].append(flat(made.outer) - flat(made.inner))
        made.step(tokens * (2 * rank + 1) if tokens else None)
        found["changes"].append(flat(made.outer) - flat(made.inner))

    step()
    submission.barrier()  # Rank 1 has taken its step before rank 0 sends a change.
    if rank == 0:
        for _ in range(4):
            step()
    else:
        await_decisions(made, 2)
        step()
        found["merged"] = sum(made.merged)
    submission.barrier()
    exchange: Any = made._exchange
    exchange._grace_s = 60.0
    found["before"] = flat(made.outer)
    found["owed"] = flat(made._residuals) if made._residuals else torch.zeros(1)
    while sum(made.merged) < 3:
        step()
    return found | {
        "outer": flat(made.outer),
        "absent": made.rounds.absent,
        "position": made.position,
        "own": made.own_steps,
        "tokens": made.rounds.tokens,
        "residual": flat(made._residuals) if made._residuals else torch.zeros(1),
    }


@pytest.mark.parametrize(
    ("dtype", "tokens", "atol"),
    [(None, 0, 1e-6), (torch.bfloat16, 5, 2e-3), ("int4", 0, 1e-6), (torch.int8, 5, 1e-6)],
)
def test_late_rank_keeps_its_change_until_the_next_merge(dtype, tokens, atol):
    for pair in in_a_world(2):
        first, second = pair.run(run_late, dtype, tokens)
        assert torch.equal(first["outer"], second["outer"])
        assert first["absent"] == second["absent"] == {0: ("1",), 1: ("1",), 2: ()}
        assert first["position"] == second["position"] == 6
        assert first["tokens"] == second["tokens"] == [0.0]
        # Two merges changed the outer parameters, and not the change of the late rank.
        assert second["merged"] == 2
        kept, moved = second["changes"][2:4]
        assert kept.abs().max() > 0.01
        torch.testing.assert_close(moved, kept, atol=1e-6, rtol=0.0)
        # All of its inner steps are in the third mean.
        share = 3 * second["own"] / (3 * second["own"] + 2) if tokens else 0.5
        mean = torch.zeros_like(first["outer"])
        for found, part in ((first, 1 - share), (second, share)):
            mean += part * (found["changes"][-2] + found["owed"] - found["residual"])
        torch.testing.assert_close(first["before"] - first["outer"], mean, atol=atol, rtol=0.0)
