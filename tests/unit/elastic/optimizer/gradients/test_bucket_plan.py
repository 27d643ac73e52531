"""Which gradients travel together: golden plans for small cases, and what holds for every plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.optimizer.gradients.bucket_plan import (
    Bucket,
    Gradient,
    expected_order,
    plan,
    seen_order,
    split,
)

MB = 1 << 20


def floats(*megabytes: float, kind: str = "float32 cpu") -> list[Gradient]:
    return [Gradient(kind, int(size * MB / 4), 4) for size in megabytes]


def members(buckets: list[Bucket]) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in buckets]


def test_last_declared_gradients_are_in_the_first_and_smallest_bucket():
    items = floats(10, 10, 10, 10, 2)
    assert members(plan(items, first_bytes=MB, full_bytes=20 * MB)) == [(4,), (3, 2), (1, 0)]


def test_bucket_ends_with_its_own_layer():
    weight, bias = floats(19, 0.01)
    items = [weight, bias, weight, bias, weight, bias]
    assert members(plan(items, full_bytes=16 * MB)) == [(5, 4), (3, 2), (1, 0)]


def test_buckets_contain_one_kind_and_are_ordered_by_completion():
    half = floats(1, 1, kind="float16 cpu")
    items = [floats(1)[0], half[0], floats(1)[0], half[1]]
    assert members(plan(items, first_bytes=100 * MB)) == [(3, 1), (2, 0)]


def test_smallest_gradients_are_placed_first_and_aligned():
    (bucket,) = plan([Gradient("a", 3, 4), Gradient("a", 0, 4), Gradient("a", 17, 4)])
    assert bucket == Bucket("a", (1, 0, 2), (0, 16, 32), 64)


def test_group_is_one_bucket_for_any_size():
    items = floats(30, 30, 30, 30)
    assert members(plan(items, groups=[[0, 2]])) == [(3,), (1,), (2, 0)]


def test_group_of_two_kinds_is_reduced_in_two_pieces():
    items = [*floats(1), *floats(1, kind="float16 cpu")]
    assert members(plan(items, groups=[[0, 1]])) == [(1,), (0,)]


def test_observed_order_overrides_the_declared_order():
    items = floats(10, 10, 10, 2, 10)
    order = (3, 0, 4, 1, 2)
    buckets = plan(items, order=order, first_bytes=MB, full_bytes=20 * MB)
    assert members(buckets) == [(3,), (0, 4), (1, 2)]


def test_observed_order_is_completed_by_the_declared_order():
    assert seen_order([3, 1], 5) == (3, 1, 0, 2, 4)
    assert seen_order([2, 0, 2, 1], 3) == (2, 0, 1)
    assert seen_order([], 3) is None
    assert expected_order(3) == (2, 1, 0)


def test_empty_plan_has_no_bucket():
    assert plan([]) == []


def test_items_are_split_into_runs_of_nearly_equal_length():
    assert split(7, 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert split(2, 5) == [[0], [1]]
    assert split(0, 3) == []


sizes = st.lists(
    st.builds(Gradient, st.sampled_from(["a", "b"]), st.integers(0, 5000), st.sampled_from([2, 4])),
    max_size=40,
)


@given(sizes, st.randoms(), st.integers(0, 20_000), st.integers(0, 20_000))
def test_every_item_is_in_one_bucket_without_overlap(items, random, first_bytes, full_bytes):
    order = list(expected_order(len(items)))
    assert plan(items, first_bytes=first_bytes) == plan(items, first_bytes=first_bytes, order=order)
    random.shuffle(order)
    buckets = plan(items, order=order, first_bytes=first_bytes, full_bytes=full_bytes)
    assert sorted(i for bucket in buckets for i in bucket.members) == list(range(len(items)))
    last = [max(map(order.index, bucket.members)) for bucket in buckets]
    assert last == sorted(last)
    for bucket in buckets:
        ends = 0
        for member, offset in zip(bucket.members, bucket.offsets, strict=True):
            assert items[member].kind == bucket.kind
            assert offset >= ends
            ends = offset + items[member].elements
        assert ends <= bucket.elements
