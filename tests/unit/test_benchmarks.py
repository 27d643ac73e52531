"""Evaluation of benchmarks: ratios by round, limits, bounds, and the kernel's counters."""

import itertools
import struct
import sys
from pathlib import Path

import pytest

from harness.golden import raises, recorded
from stress.hosts.steps import COMMITTED, ENTERED, Note, WorkerNotes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """As when one of them is run: they import each other by their names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").exists():
            del sys.modules[name]


def test_disturbed_round_does_not_change_the_ratio():
    import measurements

    ours, theirs = [1.0, 1.0, 9.0, 1.0], [2.0, 2.0, 18.0, 2.0]
    assert measurements.ratio(ours, theirs) == measurements.Spread(0.5, 0.5, 0.5)


def test_a_spread_is_the_median_and_the_quartiles():
    import measurements

    found = measurements.spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.median, found.high) == (1.5, 3.0, 4.5)
    assert found.times(10).text(0) == "30 (15 .. 45)"
    assert measurements.spread([7.0]) == measurements.Spread(7.0, 7.0, 7.0)


def test_order_of_measurements_is_balanced():
    import measurements

    assert [measurements.order("ab", turn) for turn in range(4)] == [
        [*"ab"],
        [*"ba"],
        [*"ba"],
        [*"ab"],
    ]
    turns = [measurements.order("abcd", turn) for turn in range(8)]
    for name in "abcd":
        assert sorted(turn.index(name) for turn in turns) == [0, 0, 1, 1, 2, 2, 3, 3]
    after = [(turn[place], turn[place + 1]) for turn in turns for place in range(3)]
    assert after.count(("a", "b")) == after.count(("b", "a")) == 3


@pytest.mark.parametrize(
    ("value", "at_least"),
    [(0.87, False), (0.91, False), (0.9, False), (0.9001, False), (0.91, True), (0.87, True)],
)
def test_mark_is_reported_with_sufficient_digits(value, at_least):
    import measurements

    recorded("messages", measurements.Mark("a step", 0.9, value, at_least).sentence())


def test_sizes_are_formatted_with_units():
    import measurements

    assert [measurements.size_text(size) for size in (64 << 10, 1 << 20, 256 << 20)] == [
        "64 KB",
        "1 MB",
        "256 MB",
    ]


def test_marks_exist_only_for_configured_sizes():
    import allreduce
    import measurements

    even = measurements.Spread(1.0, 1.0, 1.0)
    answers = [
        allreduce.Answer(2, size, "shared", True, {}, measurements.Spread(6.0, 7.0, 8.0), even)
        for size in (64 << 10, 1 << 20, 10 << 20, 100 << 20)
    ]
    recorded("messages", [mark.sentence() for mark in allreduce.marks_of(answers)])


def test_pss_is_read_from_the_line_of_that_name():
    import memory

    rollup = "55d-7ff ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPss:   120 kB\nPss_Dirty: 5 kB\n"
    assert memory.pss(rollup) == 120 << 10
    with raises(ValueError):
        memory.pss("Rss: 900 kB\n")


def test_memory_beyond_ddp_is_counted_in_snapshots():
    import memory

    def jobs(*trained, snapshot=0):
        return [memory.Taken(0.0, each, snapshot) for each in trained]

    answer = memory.Answer("mlp", 2, jobs(260.0, 250.0, 900.0, snapshot=100), jobs(150.0, 160.0))
    assert answer.more == 105.0
    recorded("messages", answer.mark().sentence())


def test_ring_by_host_crosses_each_link_once_and_a_dealt_ring_with_every_rank():
    import hierarchy

    by_host = [hierarchy.host_of(rank, "hosts", 4, 2) for rank in range(8)]
    dealt = [hierarchy.host_of(rank, "dealt", 4, 2) for rank in range(8)]
    assert by_host == [0, 0, 1, 1, 2, 2, 3, 3]
    assert dealt == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (hierarchy.leaving(by_host), hierarchy.leaving(dealt)) == (1, 2)
    assert hierarchy.leaving([0, 0]) == 0


def test_link_rate_and_time_bound_are_computed():
    import hierarchy

    assert hierarchy.bits_per_s("100mbit") == 1e8
    # Of 4 hosts each sends three quarters to reduce, and three quarters to spread the result.
    assert hierarchy.bound_s(4, 100_000_000, 1e9) == pytest.approx(1.2)


def test_traffic_is_read_from_the_tcp_info_of_the_kernel():
    import elasticity

    info = bytearray(256)
    struct.pack_into("=QQ", info, 120, 1000, 3000)  # bytes acknowledged, received
    struct.pack_into("=II", info, 152, 3, 1)  # segments with data in, out
    found = elasticity.traffic_of(bytes(info))
    assert found == elasticity.Traffic(messages_out=1, bytes_out=1000, messages_in=3, bytes_in=3000)


def test_idle_traffic_is_subtracted_from_the_cost_of_a_step():
    import elasticity
    import measurements

    even = measurements.Spread(1.0, 1.0, 1.0)
    training, idle = elasticity.Traffic(30, 900, 10, 100), elasticity.Traffic(15, 450, 5, 50)
    answer = elasticity.Answer("tiny", 2, {}, {}, even, 100, training, idle)
    assert answer.messages_per_step == (40 - 20) / (100 * 2)
    assert [mark.met for mark in elasticity.marks_of(answer)] == [True, False]


def test_trace_is_compressed_and_its_nodes_are_scaled_to_slots():
    import goodput

    lines = [f"0,add,node{n}" for n in range(4)]
    lines += ["60000,remove,node0", "60000,remove,node1", "120000,remove,node2"]
    lines += ["180000,remove,node3", "240000,add,node9"]
    found = goodput.of_trace(lines, compress=60.0, slots=2)
    assert [(each.at, each.slots) for each in found] == [(0.0, 2), (1.0, 1), (3.0, 0), (4.0, 1)]


def test_drawn_trace_loses_all_slots_at_most_as_often_as_requested():
    import goodput

    for seed in range(20):
        moments = goodput.drawn(seed, 300.0, 4, all_gone=2)
        assert sum(each.slots == 0 for each in moments) <= 2
        assert all(b.at > a.at for a, b in itertools.pairwise(moments))
        assert all(0 <= each.slots <= 4 for each in moments) and moments[-1].slots > 0
    assert goodput.drawn(3, 300.0, 4, 2) == goodput.drawn(3, 300.0, 4, 2)


def test_filled_slots_are_the_share_of_slots_with_a_worker():
    import goodput

    slots = [(0.0, 4), (10.0, 2), (20.0, 0)]
    assert goodput.filled(slots, [(-5.0, 4)]) == 1.0
    worlds = [(-5.0, 4), (2.0, 3), (6.0, 4), (15.0, 1)]
    assert goodput.filled(slots, worlds) == pytest.approx((40 - 4 + 20 - 5) / 60)


def test_trained_time_counts_only_first_executions_of_steps():
    import goodput

    steps = [(0.1 * n, n) for n in range(1, 11)]  # until 1.0
    steps += [(3.0, 9), (3.1, 10), (3.2, 11), (3.3, 12)]  # two again
    times = goodput.first_times(steps)
    assert len(times) == 12
    # 0.9 s until the loss; of the 2.2 s from there to step 11 five usual gaps; one more step.
    assert goodput.trained_s(times, 0.0, 3.3) == pytest.approx(0.9 + 0.5 + 0.1)
    assert goodput.trained_s(times, 0.0, 0.5) == pytest.approx(0.4)


def test_peak_is_the_window_with_the_most_bytes():
    import link_counter

    samples = link_counter.samples_of("0.00 100\n0.05 100\n0.10 400\n0.15 900\n0.30 950\n0.3")
    assert samples == [(0.0, 100), (0.05, 100), (0.1, 400), (0.15, 900), (0.3, 950)]
    assert link_counter.peak(samples, 0.1) == 800
    assert link_counter.peak(samples, 0.05) == 500
    assert link_counter.peak(samples, 1.0) == 850
    assert link_counter.peak(samples[:1], 1.0) == 0


def test_sent_bytes_are_read_for_the_named_interface():
    import link_counter

    text = "Inter-|   Receive\n face |bytes\n    lo: 7 1 0 0 0 0 0 0 7 1\n  eth0: 90 2 0 0 0 0 0 0 321 4\n"
    assert link_counter.sent_bytes(text) == 321
    with raises(ValueError):
        link_counter.sent_bytes(text, "eth1")


def test_stalls_are_the_gaps_around_a_world_change():
    import diloco_faults
    from diloco_faults import JOIN, RANK_0, WORKER, Fault

    notes = [Note(0.0, ENTERED, 0, 2)]
    notes += [Note(0.1 * step, COMMITTED, step, 2) for step in range(1, 5)]
    notes += [Note(0.45, ENTERED, 4, 1), Note(0.65, COMMITTED, 5, 1), Note(0.75, COMMITTED, 6, 1)]
    notes += [Note(0.8, ENTERED, 6, 2), Note(1.75, COMMITTED, 7, 2)]
    faults = [Fault(RANK_0, 0.42), Fault(WORKER, 2.0)]
    rounds = [
        [{"what": "entered", "lost": 0}, {"what": "merged", "merges": 1, "digest": "x"}],
        [{"what": "entered", "lost": 2}, {"what": "merged", "merges": 1, "digest": "y"}],
        [{"what": "merged", "merges": 2, "digest": "z"}],
    ]
    worker = WorkerNotes("a", notes)
    found = diloco_faults.result_of([worker, WorkerNotes("b", notes[:2])], faults, rounds, 2)
    assert [(e.what, e.size, round(e.stalled_ms), round(e.step_ms)) for e in found.stalls] == [
        (RANK_0, 1, 250, 100),
        (JOIN, 2, 1000, 100),
    ]
    assert (found.lost, found.merges, found.differing) == (2, 2, 1)
    assert found.goodput == pytest.approx(1 - 1.05 / 1.65)


def test_losses_with_several_learning_rates_then_the_lowest_of_each_training_counts():
    from diloco import Loss, loss_marks

    losses = {
        ("synchronous", 3e-3): 2.5,
        ("streamed", 3e-3): 2.6,
        ("synchronous", 6e-3): 2.0,
        ("streamed", 6e-3): 2.1,
        ("synchronous", 12e-3): 2.4,
        ("streamed", 12e-3): 2.01,
    }
    (mark,) = loss_marks([Loss(*key, loss) for key, loss in losses.items()])
    assert (mark.wanted, mark.value, mark.met) == (1.01, 2.01 / 2.0, True)


def _trained(host: str, *, begin: float, end: float, step_s: float = 0.125) -> WorkerNotes:
    """Notes of a worker that takes inner steps of equal duration, in a world of two."""
    times = [begin + step_s * number for number in range(int((end - begin) / step_s) + 1)]
    return WorkerNotes(host, [Note(at, COMMITTED, n, 2) for n, at in enumerate(times)])


def test_outage_when_the_world_shrinks_and_grows_then_both_gaps_count_separately():
    from diloco_outages import SETTLE, Kill, Outage, outage_of

    step = 0.125
    notes = [*_trained("a", begin=0.0, end=10.0).notes, Note(10.5, ENTERED, 81, 1)]
    notes += [Note(10.625, COMMITTED, 81, 1), Note(12.0, ENTERED, 82, 2)]
    notes += [Note(12.625 + step * n, COMMITTED, 82 + n, 2) for n in range(SETTLE + 9)]
    kill = Kill(7, 10.0625, 12.625)
    outage = outage_of(WorkerNotes("a", notes), kill, 2)
    assert outage is not None
    assert (outage.kill_ms, outage.join_ms) == (500.0, 1875.0)
    assert outage.lost_s == pytest.approx(0.5 + 1.875)
    unchanged = [each for each in notes if each.kind == COMMITTED]
    both = outage_of(WorkerNotes("a", unchanged), kill, 2)
    assert both == Outage("a", 1875.0, None, outage.lost_s)


def test_killed_or_later_started_worker_is_no_survivor_of_an_outage():
    from diloco_outages import Kill, outage_of

    kill = Kill(7, 5.0, 8.0)
    assert outage_of(_trained("a", begin=0.0, end=5.0), kill, 2) is None
    assert outage_of(_trained("b", begin=8.0, end=20.0), kill, 2) is None
    assert outage_of(_trained("c", begin=0.0, end=20.0), kill, 2) is not None


def test_all_steps_count_as_unmerged_when_a_fragment_has_never_merged():
    from diloco_outages import DELAY, in_no_merge

    commits = [float(n) for n in range(30)]
    assert in_no_merge(commits, [5.5, 9.5, 19.5, 27.5], 2) == (10 + 2) / 2 + DELAY
    assert in_no_merge(commits, [27.5], 2) == ((2 + DELAY) + 30) / 2
    assert in_no_merge(commits, [], 2) == 30


def test_merges_with_different_digests_are_counted():
    from diloco_outages import Kill, Quiet, side_of

    workers = {7: _trained("a", begin=0.0, end=5.0), 8: _trained("b", begin=0.0, end=20.0)}
    records = {
        7: [{"at": 1.0, "what": "merged", "merges": 1, "digest": "x"}],
        8: [
            {"at": 1.0, "what": "merged", "merges": 1, "digest": "y"},
            {"at": 2.0, "what": "merged", "merges": 2, "digest": "z"},
            {"at": 5.5, "what": "failed", "lost": 12.5},
            {"at": 5.6, "what": "entered", "lost": 0},
        ],
    }
    quiet = Quiet(6000.0, 125.0, 1000)
    side = side_of("torchft", quiet, workers, records, [Kill(7, 5.0625, 8.0)], 2)
    assert [each.host for each in side.outages] == ["b"]
    assert (side.merges, side.differing) == (2, 1)
    assert side.undone == [12.5]
    assert side.restart_s == [pytest.approx(2.9375)]
    [victim] = side.victims
    assert victim == ((32 + 10) + 3 * 41) / 4


def test_longest_gaps_overlap_the_measurement_or_the_following_quiet_time():
    from bandwidth_check import longest_gaps, measurements, quiet_windows
    from elastic.driver.events import BandwidthMeasured, MeasureBandwidth
    from elastic.driver.journal.entries import Entry

    result, request = BandwidthMeasured("d", "a", 1e6, 1e6), MeasureBandwidth("d", "a")
    entries = [Entry(1.0, result), Entry(2.0, result, [request]), Entry(2.1, result, [request])]
    entries += [Entry(2.2, result), Entry(6.0, result, [request]), Entry(6.2, result)]
    busy = measurements(entries)
    assert busy == [(2.0, 2.1), (2.1, 2.2), (6.0, 6.2)]
    [(begin, end)] = quiet_windows(busy)
    assert begin == pytest.approx(2.4) and end == 6.0
    commits = [1.9, 1.95, 2.15, 2.2, 4.0, 4.1, 4.2, 5.9, 6.1, 6.4]
    worker = WorkerNotes("a", [Note(at, COMMITTED, n, 3) for n, at in enumerate(commits)])
    gaps = longest_gaps([worker], [(2.0, 2.1), (4.05, 4.15), (6.0, 6.2)])
    assert gaps == pytest.approx([200.0, 100.0, 300.0])
