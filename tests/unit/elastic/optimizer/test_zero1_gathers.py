"""Slices of parameters that are gathered together: each element of each parameter once, within the limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.optimizer.zero1_gathers import gathers
from elastic.sharding.row_layout import rows_of

elements = st.lists(st.integers(0, 60), max_size=6).map(tuple)


@given(elements, st.integers(1, 7), st.integers(1, 20))
def test_each_shard_sends_its_own_elements_once_and_no_gather_exceeds_the_limit(
    elements: tuple[int, ...], shards: int, limit: int
):
    plan = gathers(elements, shards, limit)
    for together in plan:
        assert 0 < sum(each.end - each.begin for each in together) <= limit
    for shard in range(shards):
        sent: dict[int, list[int]] = {number: [] for number in range(len(elements))}
        for each in (each for together in plan for each in together):
            rows = each.of(shard, elements[each.parameter], shards)
            assert len(rows) <= each.end - each.begin
            sent[each.parameter] += range(*rows)
        for number, count in enumerate(elements):
            assert sent[number] == list(range(*rows_of(count, shard, shards)))
