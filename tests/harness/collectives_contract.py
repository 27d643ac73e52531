"""Contract of every implementation of collectives. Subclass it and define how to create a world."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elastic.collectives.interface import Collectives, Op
from elastic.errors import CollectiveFailed
from harness.groups import at_once

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EVERY = [*INTEGERS, *FLOATS, torch.bool, torch.complex64]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LONGEST = 150_000
WAKE_S = 2.0  # generous: milliseconds are measured

REFERENCE: dict[Op, Callable[[Any, Any], Any]] = {
    Op.SUM: operator.add,
    Op.PRODUCT: operator.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}


def small(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers that differ between ranks, and whose sums and products are exact in every dtype."""
    return ((torch.arange(length) + 2 * rank) % 3 + 1).to(dtype)


class CollectivesContract:
    """Base of the tests, which run every rank in a separate thread: ``self.on_all(world, function)``."""

    longest = LONGEST  # elements, of many pieces

    def make(self) -> list[Collectives]:
        raise NotImplementedError

    @pytest.fixture
    def world(self) -> Iterator[list[Collectives]]:
        groups = self.make()
        yield groups
        for group in groups:
            group.abort()
        for group in groups:
            group.close()

    def on_all(self, world: list[Collectives], function: Callable[[Collectives], Any]) -> list[Any]:
        return at_once(function, world)

    @pytest.mark.parametrize("op", list(REFERENCE))
    def test_allreduce_is_exact_for_small_numbers(self, world, op):
        for dtype in (*INTEGERS, *FLOATS):
            self.is_exact(world, dtype, op, (0, 1, 7, 1000, self.longest))

    def is_exact(self, world, dtype, op, lengths):
        def reduced(group):
            tensors = [small(group.rank, length, dtype) for length in lengths]
            works = [group.allreduce(tensor, op) for tensor in tensors]
            for work in works:
                work.wait()
            return tensors

        wide = torch.float64 if dtype.is_floating_point else torch.int64
        expected = [  # of 8 ranks, int8 wraps around
            functools.reduce(REFERENCE[op], [small(r, length, wide) for r in range(len(world))]).to(
                dtype
            )
            for length in lengths
        ]
        for results in self.on_all(world, reduced):
            for result, wanted in zip(results, expected, strict=True):
                assert result.dtype == dtype
                assert torch.equal(result, wanted), dtype

    def test_min_and_max_have_the_same_bits_for_any_order_of_ranks(self, world):
        """A single NaN is the result, and -0.0 is less than 0.0."""
        for dtype, op in itertools.product(FLOATS, (Op.MIN, Op.MAX)):
            self.has_the_same_bits(world, dtype, op)

    def has_the_same_bits(self, world, dtype, op):
        least = torch.finfo(dtype).smallest_normal
        ordered = [-math.inf, -2.0, -least, -0.0, 0.0, least, 1.0, math.inf]
        numbers = torch.tensor([*ordered, math.nan, -math.nan], dtype=dtype)
        draws = [
            torch.randint(len(numbers), (1999,), generator=torch.Generator().manual_seed(rank))
            for rank in range(len(world))
        ]
        drawn = torch.stack(draws)
        chosen = drawn.amin(0) if op is Op.MIN else drawn.amax(0)
        chosen[(drawn >= len(ordered)).any(0)] = len(ordered)
        bits = BITS[dtype.itemsize]
        wanted = numbers[chosen].view(bits)

        def reduced(group):
            tensor = numbers[draws[group.rank]]
            group.allreduce(tensor, op).wait()
            return tensor.view(bits)

        for result in self.on_all(world, reduced):
            assert torch.equal(result, wanted), (dtype, op)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_sums_are_close_to_double_precision(self, world, dtype):
        inputs = [
            torch.rand(10_001, generator=torch.Generator().manual_seed(r)).to(dtype)
            for r in range(len(world))
        ]
        expected = functools.reduce(operator.add, [each.double() for each in inputs])

        def summed(group):
            tensor = inputs[group.rank].clone()
            group.allreduce(tensor, Op.SUM).wait()
            return tensor

        results = self.on_all(world, summed)
        error = torch.finfo(dtype).eps * len(world) * len(world)
        for result in results:
            assert torch.equal(result, results[0])  # bit-identical on every rank
            assert torch.allclose(result.double(), expected, rtol=0, atol=error)

    def test_the_result_can_be_scaled_and_integers_never_are(self, world):
        for dtype, op in itertools.product((torch.int16, torch.int64, *FLOATS), REFERENCE):
            self.is_scaled(world, dtype, op)

    def is_scaled(self, world, dtype, op):
        def reduced(group):
            tensors = [small(group.rank, length, dtype) for length in (0, 1, 1000)]
            for tensor in tensors:
                group.allreduce(tensor, op, 0.25).wait()
            return tensors

        scale = 0.25 if dtype.is_floating_point else 1.0
        for results in self.on_all(world, reduced):
            for result in results:
                inputs = [small(r, len(result), torch.float64) for r in range(len(world))]
                expected = functools.reduce(REFERENCE[op], inputs) * scale
                assert result.dtype == dtype
                assert torch.equal(result.double(), expected), (dtype, op)

    def test_an_average_is_the_sum_divided_to_the_last_bit(self, world):
        """Multiplication by 1/3 is inexact for one in three of these."""

        def divided(group):
            results = []
            for dtype, length in itertools.product((torch.float32, torch.float64), (7, 5_000)):
                numbers = torch.arange(length, dtype=dtype) % 4099  # their sums are exact
                for divisor in (3, 4, 7):
                    tensor = numbers * (1 + group.rank)
                    group.allreduce(tensor, Op.SUM, divisor=divisor).wait()
                    results.append((numbers, divisor, tensor))
            return results

        ranks = len(world) * (len(world) + 1) // 2
        for results in self.on_all(world, divided):
            for numbers, divisor, result in results:
                assert torch.equal(result, numbers * ranks / divisor), (result.dtype, divisor)

    def test_scaled_result_is_scaled_once_for_any_number_of_waits(self, world):
        def reduced(group):
            tensor = torch.ones(5)
            work = group.allreduce(tensor, Op.SUM, scale=0.5)
            while not work.within(WAKE_S):
                pass
            work.wait()
            work.wait()
            return tensor.tolist()

        assert self.on_all(world, reduced) == [[len(world) / 2] * 5] * len(world)

    def test_a_group_that_scales_inside_overflows_no_halves(self, world):
        if not world[0].scales_inside:
            pytest.skip("callers scale halves before they are added up")

        def reduced(group):
            tensor = torch.full((100,), 60_000.0, dtype=torch.float16)
            group.allreduce(tensor, Op.SUM, 1 / len(world)).wait()
            return tensor.tolist()

        assert self.on_all(world, reduced) == [[60_000.0] * 100] * len(world)

    def test_integer_sums_wrap_around(self, world):
        def summed(group):
            tensor = torch.full((5,), 20_000, dtype=torch.int16)
            group.allreduce(tensor, Op.SUM).wait()
            return tensor

        expected = torch.tensor([20_000 * len(world)]).to(torch.int16)
        assert all((result == expected).all() for result in self.on_all(world, summed))

    def test_unsupported_reductions_are_refused_without_breaking_the_group(self, world):
        def refused(group):
            with pytest.raises(TypeError, match="bool"):
                group.allreduce(torch.ones(3, dtype=torch.bool), Op.SUM)
            for op in (Op.AVERAGE, Op.ADASUM):
                with pytest.raises(ValueError, match="SUM"):
                    group.allreduce(torch.ones(3), op)
            group.barrier().wait()

        self.on_all(world, refused)

    def test_broadcast_sends_any_dtype_from_any_root(self, world):
        def received(group):
            wrong = []
            shapes: list[tuple[int, ...]] = [(), (0,), (7,), (3, 5)]
            for dtype, root, shape in itertools.product(EVERY, range(group.size), shapes):
                tensor = torch.zeros(shape, dtype=dtype)
                if group.rank == root:
                    tensor.fill_(root + 1)
                group.broadcast(tensor, root).wait()
                if not (tensor == torch.tensor(root + 1).to(dtype)).all():
                    wrong.append((dtype, root, shape))
            return wrong

        assert self.on_all(world, received) == [[]] * len(world)

    def test_allgather_collects_the_tensors_of_all_ranks(self, world):
        for dtype in EVERY:
            self.gathers(world, dtype)

    def gathers(self, world, dtype):
        def gathered(group):
            tensor = small(group.rank, 7, dtype)
            outputs = [torch.empty(7, dtype=dtype) for _ in range(group.size)]
            group.allgather(outputs, tensor).wait()
            empty = torch.empty(0, 3, dtype=dtype)
            group.allgather([empty.clone() for _ in range(group.size)], empty).wait()
            return outputs

        for outputs in self.on_all(world, gathered):
            for rank, output in enumerate(outputs):
                assert torch.equal(output, small(rank, 7, dtype))

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float64], ids=str)
    def test_alltoall_exchanges_uneven_rows(self, world, dtype):
        size = len(world)
        counts = [
            [(2 * sender + receiver) % 3 for receiver in range(size)] for sender in range(size)
        ]

        def row(sender, receiver, number):
            return torch.tensor([sender, receiver, number]).to(dtype)

        def exchanged(group):
            sent = counts[group.rank]
            rows = [row(group.rank, r, n) for r in range(size) for n in range(sent[r])]
            tensor = torch.stack(rows) if rows else torch.empty(0, 3, dtype=dtype)
            received = [counts[sender][group.rank] for sender in range(size)]
            output = torch.empty(sum(received), 3, dtype=dtype)
            group.alltoall(output, tensor, received, sent).wait()
            expected = [row(s, group.rank, n) for s in range(size) for n in range(received[s])]
            return all(map(torch.equal, output, expected)) and len(output) == len(expected)

        assert all(self.on_all(world, exchanged))

    def test_works_may_be_awaited_in_any_order_and_repeatedly(self, world):
        def waited(group):
            tensors = [torch.full((100,), float(number)) for number in range(8)]
            works = [group.allreduce(tensor, Op.SUM) for tensor in tensors]
            for work in reversed(works):
                work.wait()
                work.wait()
            assert all(work.done() for work in works)
            return [float(tensor[0]) for tensor in tensors]

        expected = [float(number * len(world)) for number in range(8)]
        assert self.on_all(world, waited) == [expected] * len(world)

    def test_barrier_holds_until_all_ranks_have_entered(self, world):
        arrived = []

        def pass_barrier(group):
            arrived.append(group.rank)
            group.barrier().wait()
            return len(arrived)

        assert self.on_all(world, pass_barrier) == [len(world)] * len(world)

    def test_wait_may_have_a_time_limit(self, world):
        def limited(group):
            tensor = torch.ones(3)
            work = group.allreduce(tensor, Op.SUM)
            while not work.within(WAKE_S):
                pass
            work.wait()  # again, or finally: the result is in place
            return tensor.tolist()

        assert self.on_all(world, limited) == [[float(len(world))] * 3] * len(world)
        if len(world) > 1:
            work = world[0].allreduce(torch.ones(3), Op.SUM)  # which no other rank joins
            assert work.within(0.001) is False
            for group in world:
                group.abort()

    def test_abort_wakes_waiters(self, world):
        if len(world) == 1:
            pytest.skip("nobody waits in a world of one")
        group = world[0]
        work = group.allreduce(torch.ones(1_000_000), Op.SUM)  # which no other rank joins
        assert not work.done()
        aborter = threading.Timer(0.0, group.abort)
        began = time.monotonic()
        aborter.start()
        with pytest.raises(CollectiveFailed) as failed:
            work.wait()
        assert failed.value.aborted
        assert time.monotonic() - began < WAKE_S
        assert work.done() or group.drain(WAKE_S)
        aborter.join()

    def test_calls_after_an_abort_fail_at_once(self, world):
        for group in world:
            group.abort()
            group.abort()
        group = world[0]
        calls: list[Callable[[], Any]] = [
            lambda: group.allreduce(torch.ones(1), Op.SUM),
            lambda: group.broadcast(torch.ones(1), 0),
            lambda: group.allgather([torch.ones(1)] * group.size, torch.ones(1)),
            lambda: group.barrier(),
        ]
        for call in calls:
            with pytest.raises(CollectiveFailed) as failed:
                call()
            assert failed.value.aborted

    def test_failure_of_one_rank_reaches_all_ranks(self, world):
        if len(world) == 1:
            pytest.skip("nobody else in a world of one")

        def run(group):
            if group.rank == 0:
                group.abort()
                return
            with pytest.raises(CollectiveFailed):
                for _ in range(1000):
                    group.allreduce(torch.ones(10_000), Op.SUM).wait()

        began = time.monotonic()
        self.on_all(world, run)
        assert time.monotonic() - began < WAKE_S

    def test_close_returns_after_an_abort_with_work_under_way(self, world):
        works = []
        if len(world) > 1:
            works.append(world[0].allreduce(torch.ones(1000), Op.SUM))
        began = time.monotonic()
        for group in world:
            group.abort()
            assert group.drain(WAKE_S)
            group.close()
            group.close()
        assert time.monotonic() - began < WAKE_S
