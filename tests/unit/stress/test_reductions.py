"""`reductions`: random rounds, expected results, and findings."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from elastic.collectives.interface import Op
from harness.golden import recorded
from stress.reductions.numbers import ELEMENT_BYTES, Numbers, reduced, same
from stress.reductions.plan import (
    DTYPES,
    MOST_BYTES,
    OPS,
    Call,
    Kind,
    RankReport,
    ReductionFault,
    ReductionTally,
    Round,
    draw,
    quantile,
)

KILLED = "the process of rank 1 of this group has ended"
PEACE = Round(ranks=(2, 0, 1), calls=())
KILL = replace(PEACE, fault=ReductionFault.KILL, victim=1)
FREEZE = replace(PEACE, fault=ReductionFault.FREEZE, victim=1)


def call(kind: Kind = Kind.REDUCE, **others) -> Call:
    made = Call(
        kind, "float32", "SUM", elements=6, scale=1.0, divisor=1, root=1, at=5, inside=(True,) * 3
    )
    return replace(made, **others)


# ---- random rounds ------------------------------------------------------------------------------------------------


def test_equal_seeds_draw_equal_rounds():
    one, other = (random.Random(3) for _ in range(2))
    assert [draw(one, 4, ELEMENT_BYTES) for _ in range(50)] == [
        draw(other, 4, ELEMENT_BYTES) for _ in range(50)
    ]


def test_random_rounds_cover_all_kinds_faults_and_sizes():
    pick = random.Random(1)
    rounds = [draw(pick, 4, ELEMENT_BYTES) for _ in range(3000)]
    calls = [call for each in rounds for call in each.calls]
    assert {each.fault for each in rounds} == set(ReductionFault)
    assert {len(each.ranks) for each in rounds} == {2, 3, 4}
    assert all(len(set(each.ranks)) == len(each.ranks) for each in rounds)
    assert {(each.ranks[0], each.victim) for each in rounds} == {
        (worker, rank) for worker in range(4) for rank in range(4)
    }
    assert {each.kind for each in calls} == set(Kind)
    assert {(each.dtype, each.op) for each in calls} == {(d, op) for d in DTYPES for op in OPS}
    sizes = [each.elements * ELEMENT_BYTES[each.dtype] for each in calls]
    assert min(each.elements for each in calls) == 1
    assert all(0 < each <= MOST_BYTES for each in sizes)
    assert max(sizes) > MOST_BYTES // 2
    assert sum(size % (64 << 10) == 0 for size in sizes) > 20  # at the end of a chunk
    inside = Counter("all" if all(c.inside) else "some" if any(c.inside) else "none" for c in calls)
    assert min(inside[each] for each in ("all", "some", "none")) > len(calls) / 20


# ---- expected results -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers() -> Numbers:
    return Numbers(1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_expected_reduction_is_close_to_double_precision(numbers, dtype, op):
    drawn = call(dtype=dtype, op=op, scale=0.5, elements=1000)
    result = numbers.come_out(drawn, 0)
    inputs = [numbers.put_in(drawn, rank) for rank in range(3)]
    assert not torch.equal(inputs[0], inputs[1])
    assert result.dtype == inputs[0].dtype
    if dtype.startswith("int") or dtype == "uint8":
        wide = reduced([each.long() for each in inputs], Op[op], 1.0, 1)
        assert torch.equal(result, wide.to(result.dtype))  # it wraps around, and is never scaled
    else:
        exact = reduced([each.double() for each in inputs], Op[op], 0.5, 1)
        error = 4 * torch.finfo(result.dtype).eps
        assert torch.allclose(result.double(), exact, rtol=error, atol=4 * error)


def test_expected_results_of_moves_match_the_inputs_of_peers(numbers):
    for rank in range(3):
        broadcast = call(Kind.BROADCAST)
        assert torch.equal(numbers.come_out(broadcast, rank), numbers.put_in(broadcast, 1))
        gather = call(Kind.GATHER)
        assert len(numbers.come_out(gather, rank)) == 18
        assert torch.equal(numbers.come_out(gather, rank)[6:12], numbers.put_in(gather, 1))
        scatter = call(Kind.SCATTER)
        part = numbers.put_in(scatter, 2)[6 * rank : 6 * rank + 6]
        assert torch.equal(numbers.come_out(scatter, rank)[12:], part)


def test_results_are_compared_bit_by_bit():
    ones = torch.ones(3)
    assert same(ones, ones.clone())
    assert not same(ones, torch.tensor([1.0, 1.0, 1.0 + 2**-23]))
    nan = torch.tensor([float("nan"), 1.0])
    assert same(nan, nan.clone())
    assert not same(nan, torch.tensor([1.0, 1.0]))
    assert not same(torch.tensor([1]), torch.tensor([2]))


# ---- findings -------------------------------------------------------------------------------------------------------


def found(done: Round, *told: RankReport) -> list[str]:
    tally = ReductionTally()
    tally.note(7, done, told)
    return tally.findings


def test_correct_results_and_expected_errors_are_no_findings():
    assert found(PEACE, RankReport(right=3)) == []
    assert found(KILL, RankReport(right=3, error=KILLED, ended=1, late_s=0.02)) == []
    assert found(FREEZE, RankReport(error="aborted", late_s=0.02, undrained=True)) == []


def test_each_trouble_is_a_finding():
    recorded("messages", found(PEACE, RankReport(wrong=("wrong numbers",))))
    recorded("messages", found(PEACE, RankReport(error=KILLED, ended=1)))
    recorded("messages", found(KILL, RankReport(right=1)))
    recorded("messages", found(FREEZE, RankReport(right=1)))
    recorded("messages", found(KILL, RankReport(error="aborted")))
    recorded("messages", found(KILL, RankReport(error=KILLED, ended=1, late_s=0.12)))
    recorded("messages", found(FREEZE, RankReport(error="aborted", written=True)))


def test_rounds_calls_and_findings_are_counted():
    tally = ReductionTally()
    tally.note(1, replace(PEACE, calls=(call(), call(Kind.GATHER))), [RankReport(right=2)] * 3)
    tally.note(
        2,
        KILL,
        [RankReport(error=KILLED, ended=1, late_s=0.2), RankReport(right=1, wrong=("x", "y"))],
    )
    tally.note(3, FREEZE, [RankReport(error="aborted", late_s=0.01, undrained=True, written=True)])
    assert tally.rounds == {
        ReductionFault.NONE: 1,
        ReductionFault.KILL: 1,
        ReductionFault.FREEZE: 1,
    }
    assert tally.calls == {Kind.REDUCE: 1, Kind.GATHER: 1}
    assert (tally.right, tally.wrong, tally.late, tally.undrained) == (7, 3, 1, 1)
    assert tally.errors_s == {ReductionFault.KILL: [0.2], ReductionFault.FREEZE: [0.01]}


def test_quantile_is_one_of_the_values():
    values = [float(n) for n in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 0.991, 1.0)] == [
        1,
        50,
        99,
        100,
        100,
    ]
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0], 0.99) == 3.0
