"""The backend of torch.distributed on real ranks: every collective compared with Gloo's, its works, and refusals.

Each case is a function of a process group. It is called with ours and with Gloo's, and must give the same.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from elastic.errors import CollectiveFailed, Invalid
from harness import ranks as harness
from harness.ranks import Ranks, in_a_world, on_all

distributed: Any = torch.distributed  # its stubs lack what these tests need
Group = Any
DTYPES = [
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
MOVED = [*DTYPES, torch.bool]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.nightly), 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Ranks]:
    for started in in_a_world(request.param):
        started.run(enter, str(tmp_path_factory.mktemp("store") / "store"))
        yield started
        started.run(leave)


def enter(rank: int, size: int, path: str) -> None:
    import elastic.torch_backend  # noqa: F401

    store = distributed.FileStore(path, size)
    distributed.init_process_group("elastic", store=store, rank=rank, world_size=size)
    harness.kept["gloo"] = distributed.new_group(backend="gloo")


def leave(rank: int, size: int) -> None:
    distributed.destroy_process_group()


def values(rank: int, shape: Any, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    whole = torch.randint(1, 4, tuple(shape), generator=generator)
    return whole > 1 if dtype is torch.bool else whole.to(dtype)


# ---- the cases: functions of a group, its rank and its size ------------------------------------------------------


def allreduce_dtypes(group: Group, rank: int, size: int) -> Any:
    found = []
    for dtype, op in itertools.product(DTYPES, ["SUM", "PRODUCT", "MIN", "MAX"]):
        tensor = values(rank, (3, 5), dtype)
        distributed.all_reduce(tensor, getattr(ReduceOp, op), group=group)
        found.append(tensor)
    return found


def allreduce_bits(group: Group, rank: int, size: int) -> Any:
    found = []
    for dtype, op in itertools.product(
        [torch.uint8, torch.int32, torch.int64], ["BAND", "BOR", "BXOR"]
    ):
        tensor = values(rank, (7,), dtype)
        distributed.all_reduce(tensor, getattr(ReduceOp, op), group=group)
        found.append(tensor)
    return found


def allreduce_complex(group: Group, rank: int, size: int) -> Any:
    tensor = torch.complex(values(rank, (4,), torch.float32), values(rank, (4,), torch.float32, 1))
    distributed.all_reduce(tensor, group=group)
    return tensor


def allreduce_layouts(group: Group, rank: int, size: int) -> Any:
    whole = values(rank, (6, 4), torch.float32)
    turned, nothing, scalar = whole.clone().t(), torch.empty(0), torch.tensor(float(rank))
    for each in (turned, nothing, scalar):
        distributed.all_reduce(each, group=group)
    return turned, nothing, scalar


def allreduce_sparse(group: Group, rank: int, size: int) -> Any:
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[rank, 2 * rank + 1]]), torch.tensor([1.0, 2.0]), (2 * size,)
    )
    distributed.all_reduce(tensor, group=group)
    return tensor.to_dense()


def allreduce_coalesced(group: Group, rank: int, size: int) -> Any:
    tensors = [
        values(rank, shape, torch.float32, seed) for seed, shape in enumerate([(3,), (2, 2), ()])
    ]
    distributed.all_reduce_coalesced(tensors, group=group)
    return tensors


def broadcasts(group: Group, rank: int, size: int) -> Any:
    found = []
    for dtype, root in itertools.product(MOVED, range(size)):
        tensor = values(rank, (2, 3), dtype)
        distributed.broadcast(tensor, src=root, group=group)
        turned = values(rank, (2, 3), dtype, 1).t()
        distributed.broadcast(turned, src=root, group=group)
        found += [tensor, turned]
    return found


def reduces(group: Group, rank: int, size: int) -> Any:
    found = []
    for root, op in itertools.product(range(size), [ReduceOp.SUM, ReduceOp.MAX]):
        tensor = values(rank, (5,), torch.float32)
        distributed.reduce(tensor, root, op, group=group)
        found += [tensor] if rank == root else []
    return found


def allgathers(group: Group, rank: int, size: int) -> Any:
    found = []
    for dtype in MOVED:
        outputs = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        distributed.all_gather(outputs, values(rank, (3, 2), dtype).t(), group=group)
        one = torch.empty(2 * size, 3, dtype=dtype)
        distributed.all_gather_into_tensor(one, values(rank, (2, 3), dtype), group=group)
        found += [*outputs, one]
    turned = [torch.zeros(3, 2).t() for _ in range(size)]
    distributed.all_gather(turned, values(rank, (2, 3), torch.float32), group=group)
    return [*found, *turned]


def gathers(group: Group, rank: int, size: int) -> Any:
    found = []
    for dtype, root in itertools.product(MOVED, range(size)):
        outputs = [torch.empty(4, dtype=dtype) for _ in range(size)] if rank == root else None
        distributed.gather(values(rank, (4,), dtype), outputs, dst=root, group=group)
        found += outputs or []
    return found


def scatters(group: Group, rank: int, size: int) -> Any:
    found = []
    for dtype, root in itertools.product(MOVED, range(size)):
        inputs = [values(each, (4,), dtype, root) for each in range(size)] if rank == root else None
        output = torch.zeros(4, dtype=dtype)
        distributed.scatter(output, inputs, src=root, group=group)
        found.append(output)
    return found


def reduce_scatters(group: Group, rank: int, size: int) -> Any:
    found = []
    # Gloo of torch 2.8 adds up, whatever the operation.
    wrong = torch.__version__ < (2, 9)  # type: ignore[operator]
    for dtype, op in itertools.product(DTYPES, [ReduceOp.SUM, *([] if wrong else [ReduceOp.MAX])]):
        inputs = [values(rank, (2, 2), dtype, each) for each in range(size)]
        output, whole = torch.zeros(2, 2, dtype=dtype), torch.zeros(2, 2, dtype=dtype)
        distributed.reduce_scatter(output, inputs, op, group=group)
        distributed.reduce_scatter_tensor(whole, torch.cat(inputs), op, group=group)
        found += [output, whole]
    return found


def alltoalls(group: Group, rank: int, size: int) -> Any:
    found = []
    for dtype in MOVED:
        output = torch.empty(size, 3, dtype=dtype)
        distributed.all_to_all_single(output, values(rank, (size, 3), dtype), group=group)
        sent = [each + 1 for each in range(size)]
        received = [rank + 1] * size
        uneven = torch.empty(sum(received), 2, dtype=dtype)
        distributed.all_to_all_single(
            uneven, values(rank, (sum(sent), 2), dtype), received, sent, group=group
        )
        found += [output, uneven]
    nothing = torch.empty(0)
    distributed.all_to_all_single(nothing, torch.empty(0), group=group)
    return found


def messages(group: Group, rank: int, size: int) -> Any:
    found = []
    for dtype in MOVED:
        if rank == 0:
            works = [
                distributed.isend(values(tag, (3, 2), dtype), to, group=group, tag=tag)
                for to, tag in itertools.product(range(1, size), (7, 3))
            ]
            for work in works:
                work.wait()
        else:
            for tag in (3, 7):  # in another order than they were sent
                tensor = torch.zeros(3, 2, dtype=dtype)
                assert distributed.recv(tensor, 0, group=group, tag=tag) == 0
                found.append(tensor)
    if rank == 0:
        senders = []
        for _ in range(1, size):
            tensor = torch.zeros(1)
            source = distributed.recv(tensor, group=group)
            senders.append(source)
            assert tensor.item() == source
        assert sorted(senders) == list(range(1, size))
    else:
        distributed.send(torch.tensor([float(rank)]), 0, group=group)
    return found


def messages_in_a_ring(group: Group, rank: int, size: int) -> Any:
    got = torch.zeros(1000)
    works = distributed.batch_isend_irecv(
        [
            distributed.P2POp(
                distributed.isend, torch.full((1000,), float(rank)), (rank + 1) % size, group
            ),
            distributed.P2POp(distributed.irecv, got, (rank - 1) % size, group),
        ]
    )
    for work in works:
        work.wait()
    return got


def objects(group: Group, rank: int, size: int) -> Any:
    everyones: list[Any] = [None] * size
    distributed.all_gather_object(everyones, {"rank": rank}, group=group)
    given: list[Any] = [None] * size if rank == 0 else None  # type: ignore[assignment]
    distributed.gather_object("x" * rank, given, dst=0, group=group)
    sent = [{"a": 1}, "b"] if rank == size - 1 else [None, None]
    distributed.broadcast_object_list(sent, src=size - 1, group=group)
    mine: list[Any] = [None]
    distributed.scatter_object_list(
        mine, list(range(size)) if rank == 0 else None, src=0, group=group
    )
    return everyones, given, sent, mine


def works(group: Group, rank: int, size: int) -> Any:
    tensors = [torch.full((10_000,), float(rank + number)) for number in range(4)]
    under_way = [distributed.all_reduce(each, group=group, async_op=True) for each in tensors]
    future = under_way[2].get_future().then(lambda done: done.value()[0] + 1)
    more = future.wait()
    for work in under_way:
        work.wait()
        assert work.is_completed()
    turned = torch.full((30, 20), float(rank)).t()
    distributed.all_reduce(turned, group=group, async_op=True)  # nobody waits for it
    distributed.barrier(group=group)
    while not bool((turned == sum(range(size))).all()):
        pass
    return tensors, more, turned


def coalesced(group: Group, rank: int, size: int) -> Any:
    tensors = [torch.full((3,), float(rank + number)) for number in range(3)]
    with distributed._coalescing_manager(group, async_ops=True) as manager:
        for each in tensors:
            distributed.all_reduce(each, group=group)
    manager.wait()
    return tensors


CASES: list[Callable[[Group, int, int], Any]] = [
    allreduce_dtypes, allreduce_bits, allreduce_complex, allreduce_layouts, allreduce_sparse, allreduce_coalesced,
    broadcasts, reduces, allgathers, gathers, scatters, reduce_scatters, alltoalls, messages, messages_in_a_ring,
    objects, works, coalesced,
]  # fmt: skip


def compare(rank: int, size: int, case: Callable[[Group, int, int], Any]) -> None:
    ours = case(distributed.group.WORLD, rank, size)
    gloos = case(harness.kept["gloo"], rank, size)
    same(ours, gloos)


def same(ours: Any, gloos: Any) -> None:
    if isinstance(ours, (list, tuple)):
        for one, other in zip(ours, gloos, strict=True):
            same(one, other)
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, gloos, rtol=0, atol=0)
    else:
        assert ours == gloos


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_collectives_match_gloo(ranks: Ranks, case: Callable[[Group, int, int], Any]):
    ranks.run(compare, case)


# ---- what Gloo does not have, or not so --------------------------------------------------------------------------


@on_all
def test_collectives_accept_a_column_of_a_matrix(rank: int, size: int):
    """Gloo takes the memory that comes first in it."""
    matrix = torch.zeros(3, 4)
    column = matrix[:, 1].fill_(rank)
    distributed.all_reduce(column)
    assert column.tolist() == [sum(range(size))] * 3
    distributed.broadcast(column.fill_(rank), 1)
    assert column.tolist() == [1] * 3
    distributed.scatter(column, [torch.full((3,), 7.0)] * size if rank == 0 else None, src=0)
    distributed.reduce_scatter(column, [matrix[:, 1].clone()] * size)
    assert column.tolist() == [7.0 * size] * 3
    assert matrix.sum() == 21 * size


@on_all
def test_dtypes_unsupported_by_gloo_are_gathered_and_scattered(rank: int, size: int):
    for dtype in (torch.complex64, torch.int16, torch.float8_e4m3fn):
        mine = torch.full((3,), float(rank)).to(dtype)
        outputs = [torch.zeros(3).to(dtype) for _ in range(size)]
        distributed.all_gather(outputs, mine)
        assert [each.float()[0].item() for each in outputs] == list(range(size))
        distributed.gather(mine, outputs if rank == 0 else None)
        distributed.scatter(mine, outputs if rank == 0 else None)
        assert mine.float().tolist() == [rank] * 3


@on_all
def test_averages_are_supported_for_every_dtype(rank: int, size: int):
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        tensor = torch.full((3,), rank, dtype=dtype)
        distributed.all_reduce(tensor, ReduceOp.AVG)
        assert torch.equal(tensor, torch.full((3,), (size - 1) / 2, dtype=dtype))
    whole = torch.tensor([rank * 10])
    distributed.all_reduce(whole, ReduceOp.AVG)
    assert whole.item() == 10 * sum(range(size)) // size
    mine, rows = torch.empty(2), torch.full((2 * size,), float(rank))
    distributed.reduce_scatter_tensor(mine, rows, ReduceOp.AVG)
    assert torch.equal(mine, torch.full((2,), (size - 1) / 2))


@on_all
def test_premultiplied_sum_is_supported(rank: int, size: int):
    for factor in (0.5, torch.tensor([0.5])):
        tensor = torch.full((3,), float(rank))
        distributed.all_reduce(tensor, distributed._make_nccl_premul_sum(factor))
        assert torch.equal(tensor, torch.full((3,), sum(range(size)) / 2))


@on_all
def test_bools_and_wide_integers_are_summed(rank: int, size: int):
    flags = torch.tensor([rank == 0, False, True])
    distributed.all_reduce(flags)
    assert flags.tolist() == [True, False, True]
    distributed.all_reduce(flags := torch.tensor([rank == 0, True]), ReduceOp.PRODUCT)
    assert flags.tolist() == [False, True]
    distributed.all_reduce(short := torch.tensor([300], dtype=torch.int16))
    assert short.item() == 300 * size


@on_all
def test_all_to_all_exchanges_lists_of_uneven_tensors(rank: int, size: int):
    inputs = [torch.full((each + 1,), 10.0 * rank + each) for each in range(size)]
    outputs = [torch.zeros(rank + 1) for _ in range(size)]
    distributed.all_to_all(outputs, inputs)
    assert [each.tolist() for each in outputs] == [
        [10.0 * each + rank] * (rank + 1) for each in range(size)
    ]


@on_all
def test_functional_collectives_and_a_device_mesh_are_supported(rank: int, size: int):
    from torch.distributed import _functional_collectives as functional

    world = distributed.group.WORLD
    total = functional.all_reduce(torch.full((2,), float(rank)), "sum", world)
    assert torch.equal(functional.wait_tensor(total), torch.full((2,), float(sum(range(size)))))
    rows = functional.all_gather_tensor(torch.tensor([[rank]]), 0, world)
    assert functional.wait_tensor(rows).flatten().tolist() == list(range(size))
    part = functional.reduce_scatter_tensor(torch.ones(2 * size), "avg", 0, world)
    assert torch.equal(functional.wait_tensor(part), torch.ones(2))
    swapped = functional.all_to_all_single(torch.full((size,), float(rank)), None, None, world)
    assert functional.wait_tensor(swapped).tolist() == list(map(float, range(size)))
    given = functional.broadcast(torch.tensor([float(rank)]), 1, world)
    assert functional.wait_tensor(given).item() == 1.0
    mesh = distributed.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    assert mesh.get_local_rank("data") == rank


@on_all
def test_threads_of_each_rank_use_separate_groups(rank: int, size: int):
    groups = [distributed.new_group() for _ in range(3)]
    wrong: list[Any] = []

    def add(group: Group, number: int) -> None:
        for turn in range(50):
            tensor = torch.full((100,), float(rank + number + turn))
            distributed.all_reduce(tensor, group=group)
            wanted = sum(range(size)) + size * (number + turn)
            if not bool((tensor == wanted).all()):
                wrong.append((number, turn, tensor[0].item()))

    running = [
        threading.Thread(target=add, args=each) for each in zip(groups, range(3), strict=True)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong
    for group in groups:
        distributed.destroy_process_group(group)


@on_all
def test_subgroups_of_the_world_run_collectives(rank: int, size: int):
    pair = distributed.new_group([0, size - 1])
    if rank in (0, size - 1):
        tensor = torch.tensor([float(rank)])
        distributed.all_reduce(tensor, group=pair)
        assert tensor.item() == size - 1
        assert distributed.get_world_size(pair) == 2
        assert distributed.get_rank(pair) == (0 if rank == 0 else 1)
        distributed.broadcast(tensor.fill_(rank), src=size - 1, group=pair)
        assert tensor.item() == size - 1
        if rank == 0:
            distributed.send(torch.tensor([5.0]), size - 1, group=pair)
        else:
            distributed.recv(tensor, 0, group=pair)
            assert tensor.item() == 5.0
    alone = distributed.new_group([1])
    if rank == 1:
        distributed.all_reduce(mine := torch.tensor([3.0]), ReduceOp.AVG, group=alone)
        assert mine.item() == 3.0
    distributed.barrier()


@on_all
def test_two_ranks_communicate_in_a_subgroup_without_the_remaining_ranks(rank: int, size: int):
    group = distributed.new_group()
    if rank == 0:
        distributed.send(torch.tensor([7.0]), 1, group=group)
    elif rank == 1:
        distributed.recv(tensor := torch.zeros(1), 0, group=group)
        assert tensor.item() == 7.0
    distributed.barrier()


@on_all
def test_tensors_of_small_and_large_sizes_are_reduced_and_gathered(rank: int, size: int):
    for count in (1, 1000, 3_000_001):
        tensor = torch.full((count,), float(rank + 1))
        distributed.all_reduce(tensor)
        assert bool((tensor == size * (size + 1) / 2).all())
        rows = torch.empty(size, count)
        distributed.all_gather_into_tensor(rows, torch.full((count,), float(rank)))
        assert torch.equal(rows.flatten(), torch.arange(float(size)).repeat_interleave(count))


@on_all
def test_large_parts_are_gathered_scattered_and_reduced_correctly(rank: int, size: int):
    count, root = 100_000, size - 1
    mine = torch.full((count,), float(rank))
    outputs = [torch.zeros(count) for _ in range(size)] if rank == root else None
    distributed.gather(mine, outputs, dst=root)
    assert outputs is None or [each.unique().tolist() for each in outputs] == [
        [r] for r in range(size)
    ]
    distributed.scatter(mine.fill_(-1), outputs, src=root)
    assert mine.unique().tolist() == [rank]
    part = torch.zeros(count)
    distributed.reduce_scatter_tensor(part, torch.arange(float(size)).repeat_interleave(count))
    assert part.unique().tolist() == [rank * size]


@on_all
def test_invalid_tensors_and_operations_are_refused_before_any_message_is_sent(
    rank: int, size: int
):
    tensor = torch.ones(2)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: distributed.all_gather([torch.ones(2)], tensor), f"{size} tensors"),
        (lambda: distributed.all_gather([torch.ones(3)] * size, tensor), "different numbers"),
        (lambda: distributed.all_gather([torch.ones(2).double()] * size, tensor), "dtype|type"),
        (lambda: distributed.all_gather_into_tensor(torch.ones(5 * size), tensor), "need"),
        (lambda: distributed.reduce_scatter_tensor(tensor, torch.ones(3)), f"need {2 * size}"),
        (
            lambda: distributed.all_to_all_single(torch.ones(7), torch.ones(7)),
            "can't be divided evenly",
        ),
        (lambda: distributed.all_reduce(tensor, ReduceOp.BOR), "BOR is not defined"),
        (lambda: distributed.all_reduce(torch.tensor([True]), ReduceOp.AVG), "AVG is not defined"),
    ]
    for call, text in refused:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
            call()
    distributed.barrier()


@on_all
def test_process_group_can_be_destroyed_and_created_again(rank: int, size: int):
    group = distributed.new_group()
    distributed.all_reduce(torch.ones(1), group=group)
    distributed.destroy_process_group(group)
    again = distributed.new_group()
    distributed.all_reduce(tensor := torch.ones(1), group=again)
    assert tensor.item() == size
    distributed.destroy_process_group(again)


def enter_as(rank: int, size: int, path: str) -> str:
    import elastic.torch_backend  # noqa: F401

    try:
        store = distributed.FileStore(path, size)
        distributed.init_process_group(
            "elastic", store=store, rank=size - 1 - rank, world_size=size
        )
    except Invalid as error:
        return str(error)
    return ""


def test_wrong_rank_number_and_a_skipped_collective_raise_an_error(tmp_path: Path):
    for ranks in in_a_world(2):
        said = ranks.run(enter_as, str(tmp_path / "first"))
        assert "rank 1 of 2" in said[0] and "rank 0 of" in said[0]
        ranks.run(enter, str(tmp_path / "second"))
        ranks.start(skip)
        assert ranks.result(0) == (True, 1)


def skip(rank: int, size: int) -> tuple[bool, int | None]:
    distributed.barrier()
    if rank == 1:
        return False, None
    try:
        distributed.all_reduce(torch.ones(3), async_op=True).wait(timedelta(seconds=0.5))
    except CollectiveFailed as error:
        return error.late, error.rank
    return False, None


def test_different_collectives_are_named_with_ranks_and_lines_on_all_ranks(tmp_path: Path):
    for ranks in in_a_world(3):
        ranks.run(enter, str(tmp_path / "store"))
        for said, line in ranks.run(call_another):
            place = rf" \S+ \S+\.py:{line}\b"
            assert re.search(f"ranks 0, 2: allreduce{place}", said), said
            assert re.search(f"rank 1: barrier{place}", said), said


def call_another(rank: int, size: int) -> tuple[str, int]:
    frame = inspect.currentframe()
    line = 0 if frame is None else frame.f_lineno + 2
    try:
        distributed.barrier() if rank == 1 else distributed.all_reduce(torch.ones(3))
    except CollectiveFailed as error:
        return str(error), line
    return "", line


def test_a_monitored_barrier_names_the_missing_rank(tmp_path: Path):
    for ranks in in_a_world(2):
        ranks.run(enter, str(tmp_path / "store"))
        ranks.start(miss_a_monitored_barrier)
        assert "Rank 1 " in str(ranks.result(0))


def miss_a_monitored_barrier(rank: int, size: int) -> str:
    distributed.group.WORLD.monitored_barrier(timedelta(seconds=30))
    if rank == 1:
        return ""
    try:
        distributed.group.WORLD.monitored_barrier(timedelta(seconds=0.3))
    except CollectiveFailed as error:
        return str(error)
    return ""


def test_collectives_in_hook_callbacks_have_one_order_when_a_rank_is_slow(ranks: Ranks):
    found = ranks.run(gradients_of_a_hook_that_reduces_twice)
    for ours, wanted in found:
        assert all(map(torch.equal, ours, wanted))


def gradients_of_a_hook_that_reduces_twice(rank: int, size: int) -> Any:
    """As PowerSGD's: buckets of one size, and a collective in the callback of another."""

    def hook(_, bucket):
        first = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()

        def again(future: torch.futures.Future[Any]) -> Any:
            twice = future.value()[0].clone()
            return distributed.all_reduce(twice, async_op=True).get_future().wait()[0]

        return first.then(again)

    def slow(gradient: torch.Tensor) -> None:
        if rank == 0:
            time.sleep(0.1)  # the others have begun all that they can

    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4))).double()
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-3)
    ddp.register_comm_hook(None, hook)
    x = torch.full((1, 32), rank + 1.0, dtype=torch.float64)
    for _ in range(2):  # buckets are built anew after the first
        model.zero_grad()
        hidden = x
        for layer in model:
            hidden = layer(hidden)
        alone = torch.autograd.grad(hidden.sum(), list(model.parameters()))
        for each in alone:
            distributed.all_reduce(each)
        handle = model[1].register_forward_hook(
            lambda *given: given[-1].register_hook(slow) and None
        )
        ddp(x).sum().backward()
        handle.remove()
    return [each.grad for each in model.parameters()], [each * size for each in alone]


def test_the_hook_of_c_plus_plus_averages(ranks: Ranks):
    found = ranks.run(average_with_a_hook)
    assert found == [sum(range(1, ranks.size + 1)) / ranks.size] * ranks.size


def average_with_a_hook(rank: int, size: int) -> float:
    network = torch.nn.Linear(1, 1, bias=False)
    model: Any = torch.nn.parallel.DistributedDataParallel(network)
    model._register_builtin_comm_hook(distributed.BuiltinCommHookType.FP16_COMPRESS)
    model(torch.tensor([[rank + 1.0]])).sum().backward()
    assert network.weight.grad is not None
    return network.weight.grad.item()


def test_ddp_buckets_are_allocated_in_memory_shared_by_all_ranks_of_the_host(ranks: Ranks):
    assert ranks.run(train_and_look_at_buckets) == [[]] * ranks.size


def train_and_look_at_buckets(rank: int, size: int) -> list[str]:
    """Return what is wrong."""
    from elastic.collectives.shared_memory import arena

    mine = arena.mine()
    assert mine is not None
    lent = mine.lent
    network: Any = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 50))
    model: Any = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.005)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as averages

    amiss, seen = [], []

    def hook(group, bucket):
        buffer = bucket.buffer()
        seen.append(buffer.nbytes)
        if mine.offset_of(buffer.data_ptr(), buffer.nbytes) is None:
            amiss.append(f"a bucket of {buffer.nbytes} bytes")
        return averages(group, bucket)

    model.register_comm_hook(None, hook)
    for _ in range(3):  # the buckets of the first pass, and those in the order that it has shown
        model.zero_grad()
        model(torch.full((2, 30), rank + 1.0)).sum().backward()
    want = network[0].weight.grad.clone()
    network.zero_grad()
    for each in range(size):
        network(torch.full((2, 30), each + 1.0)).sum().backward()
    if not torch.allclose(want * size, network[0].weight.grad):
        amiss.append("gradients that are no averages")
    if len(set(seen)) < 3:
        amiss.append(f"buckets of {sorted(set(seen))} bytes alone")
    del model, hook
    torch.distributed.barrier()  # with which the group lets go of what it carried before
    deadline = time.monotonic() + 20.0
    while mine.lent != lent and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)  # a thread that completes futures lets go of the last
    if mine.lent != lent:
        amiss.append(f"{mine.lent - lent} bytes that are lent for ever")
    return amiss
