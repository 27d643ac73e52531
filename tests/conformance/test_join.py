"""join for uneven numbers of batches, barrier, poll and synchronize."""

import time

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, raises, works
from harness.waiting import wait_until

# ---- join ------------------------------------------------------------------------------------------------------------


@everywhere()
def test_a_rank_that_joined_contributes_zeros(rank, size):
    """Rank r has r + 1 steps. An average divides by the number of all ranks, also of those without data."""
    for turn in range(3):  # names are cached by then
        for step in range(rank + 1):
            there = [r for r in range(size) if r >= step]
            told = f"round {turn}, step {step}"
            total = hvd.allreduce(torch.full((3,), float(rank + 1)), op=hvd.Sum, name=f"s{step}")
            assert (total == sum(r + 1 for r in there)).all(), told
            mean = hvd.allreduce(torch.full((2, 2), float(rank + 1)), name=f"m{step}")
            assert torch.allclose(mean, torch.tensor(sum(r + 1 for r in there) / size)), told
        last = hvd.join()
        assert isinstance(last, int) and last == size - 1, turn
        works(size)


@everywhere()
def test_average_after_a_join_is_divided_exactly(rank, size):
    """As in Horovod's own test of join: multiplication by 1/3 is off by a bit for one in three of these."""
    for dtype in (torch.float32, torch.float64):
        numbers = torch.arange(-100, 100, dtype=dtype)
        if rank != 0:
            found = hvd.allreduce(numbers, name=f"without one {dtype}")
            assert torch.equal(found, numbers * (size - 1) / size)
            (grouped,) = hvd.grouped_allreduce([numbers], name=f"group without one {dtype}")
            assert torch.equal(grouped, found)
        hvd.join()
    works(size)


@everywhere()
def test_gradients_after_a_join_are_divided_exactly(rank, size):
    model = torch.nn.Linear(200, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters()
    )
    numbers = torch.arange(-100, 100, dtype=torch.float32)
    for there in (size, size - 1):
        if there == size or rank != 0:
            optimizer.zero_grad()
            model(numbers.view(1, -1)).sum().backward()
            optimizer.synchronize()
            gradient = model.weight.grad
            assert gradient is not None
            assert torch.equal(gradient[0], numbers * there / size)
            with optimizer.skip_synchronize():
                optimizer.step()
    hvd.join()
    works(size)


@everywhere()
def test_every_rank_can_be_the_last(rank, size):
    for last in range(size):
        if rank == last:
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="alone")[0] == 1
        assert hvd.join() == last
    works(size)


@everywhere()
def test_joined_ranks_contribute_zeros_to_tensors_of_unknown_dtype_and_shape(rank, size):
    """Of any dtype and shape, grouped too, and without a name."""
    if rank == 0:
        for dtype in (torch.float64, torch.float16, torch.int32, torch.uint8):
            result = hvd.allreduce(torch.ones(3, 2, dtype=dtype), op=hvd.Sum, name=f"only {dtype}")
            assert result.dtype == dtype and (result == 1).all()
        first, second = hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum)
        assert first.tolist() == [1, 1] and second.tolist() == [1, 1, 1]
        share = hvd.allreduce(torch.ones(2, dtype=torch.float64), op=hvd.Average)
        assert share.tolist() == [1 / size] * 2
    assert hvd.join() == 0
    works(size)


@everywhere()
def test_collectives_in_flight_complete_when_ranks_join(rank, size):
    handles = [hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name=f"w{n}") for n in range(20)]
    hvd.join()
    assert all((hvd.synchronize(h) == size).all() for h in handles)


@everywhere()
def test_only_allreduce_works_after_a_rank_has_joined(rank, size):
    if rank == 0:
        assert hvd.join() == size - 1
    else:
        for call in (
            lambda: hvd.allgather(torch.ones(2), name="j"),
            lambda: hvd.broadcast(torch.ones(2), 1, name="j"),
            lambda: hvd.alltoall(torch.ones(2 * size), name="j"),
            lambda: hvd.reducescatter(torch.ones(2 * size), name="j"),
        ):
            with raises(hvd.HorovodInternalError, "join"):
                call()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="go on").item() == size - 1
        # In rank order, so that the last rank is known.
        for r in range(1, rank):
            hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"wait for {r}")
        assert hvd.join() == size - 1
    works(size)


@everywhere()
def test_mismatch_among_ranks_that_have_not_joined_raises_an_error(rank, size):
    """With a single remaining rank there is nothing to differ from."""
    if rank == 0 or size == 2:
        hvd.join()
    else:
        with raises(hvd.HorovodInternalError, "[Rr]ank"):
            hvd.allreduce(torch.ones(1 + rank), name="left")
        hvd.join()
    works(size)


@everywhere()
def test_training_with_uneven_batches_ends_with_equal_weights(rank, size):
    """The optimizer's gradients of ranks that are out of data are zeros too; all end with equal weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for _ in range(2 + rank):
        optimizer.zero_grad()
        model(torch.ones(3, 4) * (rank + 1)).sum().backward()
        optimizer.step()
    assert hvd.join() == size - 1
    # Those that joined early have older weights; the last rank's are the newest.
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    weights = hvd.allgather(model.weight.detach().reshape(1, -1))
    assert all(torch.equal(weights[0], each) for each in weights)
    works(size)


# ---- barrier ---------------------------------------------------------------------------------------------------------


@everywhere()
def test_barrier_releases_no_rank_before_the_last_has_entered(rank, size):
    """By the machine's clock; each rank is late once."""
    for late in range(size):
        if rank == late:
            time.sleep(0.05)
        came = time.monotonic()
        hvd.barrier()
        left = time.monotonic()
        times = hvd.allgather(torch.tensor([[came, left]], dtype=torch.float64))
        assert times[:, 1].min() >= times[:, 0].max(), (late, times.tolist())


@everywhere()
def test_a_barrier_does_not_wait_for_collectives_that_are_not_complete(rank, size):
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="part") if rank == 0 else None
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="part")
    assert hvd.synchronize(handle).item() == size


# ---- poll and synchronize --------------------------------------------------------------------------------------------


@everywhere()
def test_poll_is_false_until_the_other_ranks_have_arrived(rank, size):
    handle = None
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="polled")
        assert isinstance(handle, int)
        assert not hvd.poll(handle), "nobody else has submitted it"
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="polled")
    wait_until(lambda: hvd.poll(handle), "its end", 5.0)
    assert hvd.poll(handle), "and it stays true"
    assert hvd.synchronize(handle).tolist() == [size, size]


@everywhere()
def test_handles_can_be_synchronized_in_any_order(rank, size):
    handles = [hvd.allreduce_async(torch.full((3,), float(n)), op=hvd.Sum) for n in range(10)]
    order = sorted(range(10), key=lambda n: (n * 7 + rank * 3) % 10)
    for n in order:
        assert hvd.synchronize(handles[n])[0].item() == n * size
    assert len(set(handles)) == 10


@everywhere()
def test_dropped_tensors_of_in_flight_collectives_are_kept_until_synchronize(rank, size):
    """The caller releases its tensor: the collective keeps it."""
    handles = [
        hvd.allreduce_async_(torch.full((1000,), float(n)), op=hvd.Sum, name=f"dropped {n}")
        for n in range(50)
    ]
    for n, handle in enumerate(handles):
        assert (hvd.synchronize(handle) == n * size).all()
