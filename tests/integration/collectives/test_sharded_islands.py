"""DiLoCo on real ranks with models that FSDP2 shards within islands of different sizes, compared with DDP islands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic.errors import Invalid
from harness.ranks import Ranks, in_a_world

ISLANDS = ("west", "west", "east")
STEPS = 14
distributed: Any = torch.distributed


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    for started in in_a_world(len(ISLANDS)):
        started.run(enter)
        yield started
        started.run(leave)


def enter(rank: int, size: int) -> None:
    import torch.distributed.fsdp  # noqa: F401

    import elastic.torch_backend  # noqa: F401
    from elastic.diloco import island_group

    distributed.init_process_group(
        "elastic", store=distributed.HashStore(), rank=rank, world_size=size
    )
    island_group._own_name = lambda rt: ISLANDS[rank]


def leave(rank: int, size: int) -> None:
    distributed.destroy_process_group()


def network(seed: int) -> Any:
    """Return a model with a buffer, rows that two ranks do not divide, and a shard without rows."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    )


def sharded(seed: int) -> Any:
    import elastic

    model, mesh = network(seed), elastic.island_mesh("cpu")
    for module in (model[1], model):
        distributed.fsdp.fully_shard(module, mesh=mesh)
    return model


def whole(tensors: Any) -> list[torch.Tensor]:
    return [
        (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for each in tensors
    ]


def rows_of(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def train(
    rank: int, size: int, fully: bool, same_seed: bool, tokens: bool, options: dict[str, Any]
) -> dict[str, Any]:
    import elastic

    seed = 1 if same_seed else rank
    model = network(seed) if not fully else sharded(seed)
    trained = (
        model
        if fully
        else torch.nn.parallel.DistributedDataParallel(model, process_group=elastic.island_group())
    )
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = elastic.DiLoCo(trained, inner, every=6, fragments=2, **options)
    state = elastic.TorchState(diloco=diloco, step=0)
    outer: list[list[torch.Tensor]] = []

    @elastic.run
    def steps(state: Any) -> None:
        while state.step < STEPS:
            points = torch.randn(
                8, 4, generator=torch.Generator().manual_seed(100 * state.step + rank)
            )
            inner.zero_grad()
            (trained(points) - points.sum(1, keepdim=True)).square().mean().backward()
            inner.step()
            diloco.step(8 if tokens else None)
            state.step += 1
            state.commit()
            outer.append(whole(diloco.outer))

    steps(state)
    committed = whole(diloco.inner), list(diloco.merged)
    with torch.no_grad():
        for each in diloco.inner:
            rows_of(each).add_(1)
    diloco.rounds.merged[0] += 1
    state.step += 1
    state.restore()
    restored = whole(diloco.inner), list(diloco.merged)
    held = sum(
        rows_of(each).numel()
        for parameter in diloco.outer
        for each in (parameter, diloco.outer_optimizer.state[parameter]["momentum_buffer"])
    )
    return {
        "outer": outer,
        "inner": committed[0],
        "restored": all(map(torch.equal, committed[0], restored[0]))
        and committed[1] == restored[1]
        and state.step == STEPS,
        "merged": committed[1],
        "sent": diloco.bytes_sent,
        "held": held,
    }


@pytest.mark.parametrize(
    ("tokens", "options"),
    [(False, {}), (True, {"delay": 2, "dtype": torch.bfloat16})],
    ids=["whole rounds", "weighted in bfloat16"],
)
def test_sharded_islands_merge_as_islands_of_ddp(ranks, tokens, options):
    found = ranks.run(train, True, True, tokens, options)
    plain = ranks.run(train, False, True, tokens, options)
    for one, other in zip(found, plain, strict=True):
        assert one["merged"] == other["merged"] and min(one["merged"]) > 0
        assert one["sent"] == other["sent"]
        assert one["restored"] and other["restored"]
        for step, (mine, theirs) in enumerate(zip(one["outer"], other["outer"], strict=True)):
            for a, b in zip(mine, theirs, strict=True):
                assert torch.allclose(a, b, rtol=1e-2 if options else 1e-5, atol=1e-5), step
    # Each rank holds its rows of the outer parameters and of their momentum only.
    assert found[0]["held"] + found[1]["held"] == found[2]["held"] == plain[0]["held"]


def test_all_ranks_have_bitwise_equal_outer_parameters_from_different_initial_ones(ranks):
    first, *others = ranks.run(train, True, False, False, {"delay": 1})
    assert not torch.equal(first["outer"][0][0], first["outer"][-1][0])
    for other in others:
        for mine, theirs in zip(first["outer"], other["outer"], strict=True):
            assert all(map(torch.equal, mine, theirs))


def merge_changes_in_bfloat16(rank: int, size: int) -> list[torch.Tensor]:
    import elastic

    torch.manual_seed(1)
    model = torch.nn.Linear(7, 23, dtype=torch.bfloat16)
    distributed.fsdp.fully_shard(model, mesh=elastic.island_mesh("cpu"))
    diloco = elastic.DiLoCo(model, None, every=1)
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + rank)
        with torch.no_grad():
            for each in diloco.inner:
                rows = rows_of(each)
                rows.add_(torch.randn(rows.shape, generator=generator))
        diloco.step()
    return whole(diloco.outer)


def test_outer_parameters_of_16_bit_models_are_bitwise_equal_in_islands_of_different_sizes(ranks):
    first, *others = ranks.run(merge_changes_in_bfloat16)
    assert all(all(map(torch.equal, first, other)) for other in others)


def refused(rank: int, size: int) -> list[str]:
    import elastic

    found = []

    def attempt(build: Any) -> None:
        try:
            build()
        except Invalid as error:
            found.append(type(error).__name__)

    def build(**options: Any) -> Any:
        model = sharded(1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return elastic.DiLoCo(model, inner, every=4, **options)

    def ignored() -> None:
        model = network(1)
        distributed.fsdp.fully_shard(
            model, mesh=elastic.island_mesh("cpu"), ignored_params={model[1].weight}
        )
        elastic.DiLoCo(model, None, every=4)

    def fused() -> None:
        model = sharded(1)
        outer = torch.optim.AdamW(model.parameters(), fused=True)
        elastic.DiLoCo(model, None, outer, every=4)

    attempt(lambda: build(dtype=torch.int8))
    attempt(lambda: build(grace_s=1.0))
    attempt(ignored)
    attempt(fused)
    attempt(lambda: elastic.TorchState(diloco=build(), least_shards=1))
    attempt(lambda: elastic.TorchState(diloco=build(), copies=-1))
    attempt(lambda: elastic.TorchState(one=build(), two=build()))
    elastic.TorchState(diloco=build(), copies=2)
    return found


def test_unsupported_options_are_refused_before_training(ranks):
    assert ranks.run(refused) == [["Invalid"] * 7] * len(ISLANDS)
