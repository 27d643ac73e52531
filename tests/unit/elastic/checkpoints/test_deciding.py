"""Which commits are written, how values are told as plain data, and what flags and variables mean."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from elastic.checkpoints import options
from elastic.checkpoints.files.manifest import CommitName, parse, superfluous
from elastic.checkpoints.plain_data import CorruptedData, NotPlain, decode, encode
from elastic.checkpoints.schedule import Schedule, Step
from elastic.errors import Invalid
from elastic.protocol.messages import Commit

atoms = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.floats(allow_nan=False),
    some.text(),
    some.binary(),
)
values = some.recursive(
    atoms,
    lambda inner: (
        some.lists(inner)
        | some.tuples(inner, inner)
        | some.dictionaries(some.text() | some.integers(), inner)
    ),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # it times what a busy machine draws
@given(values)
def test_plain_data_is_decoded_unchanged(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and repr(back) == repr(value)


def test_unsupported_types_are_refused_and_corrupted_data_is_an_error():
    with pytest.raises(NotPlain, match="builtin_function"):
        encode({"f": max})
    kept = OrderedDict(a=Counter({3: 1}), b=float("inf"), c={1, 2}, d=frozenset({3}))
    assert decode(encode(kept)) == kept
    for text in ({"~": "tuple", "v": 3}, {"~": "os.system", "v": "x"}, {"~": 1}):
        with pytest.raises(CorruptedData):
            decode(text)


def test_every_nth_commit_is_written_unless_a_write_is_in_progress():
    schedule = Schedule(10, None, 0.0)
    begun, busy = [], False
    for n in range(1, 61):
        step = schedule.at_commit(Commit(2, n), n * 0.1, leads=True, busy=busy)
        if step.ask is not None:
            assert schedule.request(2, step.ask) and step.ask - n <= 7, "not long before"
        if step.begin is not None:
            begun.append(n)
        busy = 20 <= n < 38  # it takes that long
    assert begun == [10, 20, 50, 60]


def test_timed_checkpoint_is_announced_by_rank_0_and_begun_by_all_at_the_same_commit():
    ranks = [Schedule(None, 60.0, 0.0) for _ in range(2)]
    steps = [
        ranks[0].at_commit(Commit(2, n), n * 1.0, leads=True, busy=False) for n in range(1, 61)
    ]
    assert steps[:-1] == [Step()] * 59
    asked = steps[-1].ask
    assert asked is not None and asked >= 61
    for n in range(1, 61):
        assert ranks[1].at_commit(Commit(2, n), n * 1.0, leads=False, busy=False) == Step()
    assert [each.request(2, asked) for each in ranks] == [True, True]
    for n in range(61, asked):
        for r in ranks:
            assert r.at_commit(Commit(2, n), float(n), leads=False, busy=False) == Step()
    for r in ranks:
        assert r.at_commit(Commit(2, asked), float(asked), leads=False, busy=False) == Step(
            begin=asked
        )


def test_late_announcement_is_refused_and_the_next_is_made_further_ahead():
    schedule = Schedule(None, 1.0, 0.0)
    for n in range(100):
        schedule.at_commit(Commit(2, n + 1), n * 0.01, leads=True, busy=False)
    first = schedule.at_commit(Commit(2, 101), 1.0, leads=True, busy=False).ask
    assert first is not None and not schedule.request(2, 50) and not schedule.request(1, first)
    schedule.dropped(first, 1.0, again=False)  # as where a replica differs: the time was right
    second = schedule.at_commit(Commit(2, 102), 1.01, leads=True, busy=False).ask
    assert second is not None and second - 102 <= first - 101
    schedule.dropped(second, 1.01, again=True)
    third = schedule.at_commit(Commit(2, 103), 1.02, leads=True, busy=False).ask
    assert third is not None and third - 103 > second - 102


def begun_by_time(*, hastened: bool = False) -> tuple[Schedule, int]:
    """Rank 0 has begun a checkpoint that was due; the next is due in an hour."""
    schedule = Schedule(None, 3600.0, 0.0 if hastened else -3600.0)
    schedule.at_commit(Commit(2, 1), 0.0, leads=True, busy=False)
    if hastened:
        schedule.hasten(0.5)
    asked = schedule.at_commit(Commit(2, 2), 1.0, leads=True, busy=False).ask
    assert asked is not None and schedule.request(2, asked)
    assert schedule.at_commit(Commit(2, asked), 2.0, leads=True, busy=False).begin == asked
    return schedule, asked


@pytest.mark.parametrize("hastened", [False, True])
def test_checkpoint_dropped_for_a_late_rank_is_retried_soon(hastened):
    schedule, asked = begun_by_time(hastened=hastened)
    schedule.dropped(asked, 2.1, again=True)
    assert schedule.at_commit(Commit(2, asked + 1), 3.0, leads=True, busy=False).ask is not None


def test_checkpoint_interrupted_by_a_world_change_is_retried_soon():
    schedule, _ = begun_by_time()
    assert schedule.at_commit(Commit(3, 1), 3.0, leads=True, busy=False).ask is not None


def test_completed_or_failed_checkpoint_is_not_requested_again_at_once():
    for written in (True, False):
        schedule, asked = begun_by_time()
        schedule.dropped(asked - 1, 2.1, again=True)  # an older one
        schedule.settled(asked) if written else schedule.dropped(asked, 2.1, again=False)
        for n in (1, 2, 3):
            step = schedule.at_commit(Commit(2, asked + n), 3.0 + n, leads=True, busy=False)
            assert step == Step()
        assert schedule.at_commit(Commit(3, 1), 9.0, leads=True, busy=False) == Step()


def test_drop_of_an_older_checkpoint_does_not_cancel_a_newer_request():
    """On a busy machine words come late: rank 0 has asked for another one before it knew what became of the first."""
    schedule = Schedule(3, None, 0.0)
    steps = [schedule.at_commit(Commit(2, n), n * 1.0, leads=True, busy=False) for n in (1, 2)]
    assert steps[1].ask == 3
    later = schedule.at_commit(Commit(2, 2), 9.0, leads=True, busy=False).ask
    assert later is not None and schedule.request(2, 3) and schedule.request(2, later + 3)
    schedule.dropped(3, 9.1, again=True)
    step = schedule.at_commit(Commit(2, later + 3), 10.0, leads=True, busy=False)
    assert step == Step(begin=later + 3)


def test_schedule_is_reset_in_another_world():
    schedule = Schedule(3, None, 0.0)
    for n in (1, 2):
        step = schedule.at_commit(Commit(2, n), n * 1.0, leads=True, busy=False)
    assert step.ask == 3 and schedule.request(2, 3)
    for n in (1, 2, 3, 4):
        step = schedule.at_commit(Commit(3, n), 2.0 + n, leads=False, busy=False)
        assert step == Step()


def test_checkpoint_interval_is_parsed_as_time_or_commits():
    assert options.parse_every("500commits") == (500, None)
    assert options.parse_every("10m") == (None, 600.0)
    for wrong in ("", "0s", "60", "fast", "-5s", "0commits", "nans"):
        with pytest.raises(Invalid, match="--checkpoint-every"):
            options.parse_every(wrong)
    assert options.parse_from("s3://a/b@3.450") == ("s3://a/b", "3.450")
    with pytest.raises(Invalid, match="--from"):
        options.parse_from("/folder")


def test_checkpoint_options_are_read_from_the_environment():
    assert options.read({}) is None
    found = options.read({options.DIR: "/c", options.EVERY: "5commits", options.RUN: "3"})
    assert found == options.CheckpointOptions("/c", 5, None, run=3)
    with pytest.raises(Invalid, match="ELASTIC_CHECKPOINT_KEEP"):
        options.read({options.DIR: "/c", options.KEEP: "0"})


def test_commit_names_sort_by_the_order_of_commits():
    made = [CommitName(1, 9, 5), CommitName(2, 1, 100), CommitName(2, 2, 3)]
    assert sorted(reversed(made)) == made and [parse(str(name)) for name in made] == made
    assert parse("r1-g2-c3") is None and parse("lost+found") is None


def test_old_checkpoints_are_superfluous_only_when_newer_ones_are_verified():
    names = [CommitName(1, 1, n) for n in range(1, 6)]
    assert superfluous(names, [], 1) == []
    assert superfluous(names, names[:2], 1) == names[:1]
    assert superfluous(names, names[1:4], 2) == [names[0], names[1]]
