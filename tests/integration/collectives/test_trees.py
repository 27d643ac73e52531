"""Sums of partials along the tree: the same bits in shared memory, by exchange over any group, and alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic.collectives.shared_memory import arena, native_library
from elastic.exact import reduction_tree
from elastic.exact.shard_assignment import assign
from elastic.optimizer.shard_sums.partial_sums import PartialsExchange, evaluate
from elastic.protocol.messages import Address
from harness import ranks
from harness.fakes import collectives as fake
from harness.groups import World
from harness.ranks import serve_stores
from integration.collectives.test_hierarchy import connect, end
from integration.collectives.test_shared import world_of

pytestmark = pytest.mark.skipif(native_library.load() is None, reason=native_library.missing())

ELEMENTS = [1, 1000, 131_075]
SHARDS = [3, 5, 8]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.nightly), 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = world_of(request.param)
    yield made
    made.close()


def leaf(shard: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(shard)
    return torch.randn(elements, generator=drawn, dtype=torch.float64).to(dtype)


def places_of(held: Any, shards: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's partials, in the arena."""
    merges, _ = reduction_tree.schedule(held, shards)
    depth, stride = max(1, len(merges)), elements + 64
    places = arena.zeros(depth * stride, dtype).view(depth, stride)
    for shard, place, count in merges:
        value = leaf(shard, elements, dtype)
        for _ in range(count):
            place -= 1
            value = places[place, :elements] + value
        places[place, :elements] = value
    return places


def alone(shards: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    places = places_of(range(shards), shards, elements, dtype)
    partials = [reduction_tree.schedule(range(shards), shards)[1]]
    evaluate(reduction_tree.program(partials, shards), [list(places)], shards)
    return places[0, :elements].clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("shards", SHARDS)
def test_every_reduction_path_gives_the_same_bits(world, shards, dtype):
    size = len(world.groups)
    held = assign(shards, size)
    partials = [reduction_tree.schedule(each, shards)[1] for each in held]
    program = reduction_tree.program(partials, shards)
    counts = [len(each) for each in partials]
    others = fake.world(size)

    def on_rank(rank: int) -> list[torch.Tensor]:
        found = []
        for elements in ELEMENTS:
            places = places_of(held[rank], shards, elements, dtype)
            copied = places.clone()
            world.groups[rank].reduce_tree(places, elements, program, shards).wait()
            found.append(places[0, :elements].clone())
            for group in (world.groups[rank], others[rank]):
                again = list(copied.clone())
                PartialsExchange(group, again, elements, program, counts, shards).wait()
                found.append(again[0][:elements].clone())
        return found

    wanted = [each for elements in ELEMENTS for each in [alone(shards, elements, dtype)] * 3]
    for found in world.on_all(on_rank):
        assert all(
            torch.equal(bits(one), bits(two)) for one, two in zip(found, wanted, strict=True)
        )


def test_tree_reduction_outside_of_the_arena_is_refused(world):
    places = torch.zeros(1, 64)
    with pytest.raises(ValueError, match=r"arena.zeros"):
        world.groups[0].reduce_tree(places, 64, [reduction_tree.Partial(0, 0)])


# ---- two hosts, by what their ranks say of themselves ------------------------------------------------------------


four = ranks.fixture(4)


def by_exchange(rank: int, size: int, address: Address, hosts: str) -> list[bytes]:
    group = connect(rank, size, address, hosts)
    found = []
    for shards in SHARDS:
        held = assign(shards, size)
        partials = [reduction_tree.schedule(each, shards)[1] for each in held]
        program, counts = reduction_tree.program(partials, shards), [len(each) for each in partials]
        for elements in ELEMENTS:
            places = list(places_of(held[rank], shards, elements, torch.float32))
            PartialsExchange(group, places, elements, program, counts, shards).wait()
            found.append(places[0][:elements].numpy().tobytes())
    end(group)
    return found


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_hosts_of_different_sizes_give_the_same_bits(four, hosts):
    (address,) = four.run(serve_stores)[0]
    wanted = [
        alone(shards, elements, torch.float32).numpy().tobytes()
        for shards in SHARDS
        for elements in ELEMENTS
    ]
    assert all(found == wanted for found in four.run(by_exchange, address, hosts))
