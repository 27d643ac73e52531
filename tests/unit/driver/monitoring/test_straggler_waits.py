"""Times for which the others wait for a worker, from means that are reported in any order."""

from __future__ import annotations

from elastic.driver.monitoring.straggler_waits import WORKERS, Histogram, StragglerWaits
from elastic.protocol.messages import Worker

A, B, C = (Worker("h", slot) for slot in range(3))


def totals(waits: StragglerWaits) -> dict[Worker, tuple[int, float]]:
    """Return for each awaited worker the number of waits and their sum in milliseconds."""
    return {
        who: (sum(each.counts), round(1e3 * each.sum_s)) for who, each in waits.by_worker.items()
    }


def test_excess_over_the_shortest_wait_is_attributed_to_its_worker():
    waits = StragglerWaits()
    waits.paced(A, 1.0, 100)  # 10 ms each
    assert totals(waits) == {}  # no other worker to compare it with
    waits.paced(B, 6.0, 100)
    waits.paced(C, 3.0, 50)
    assert totals(waits) == {A: (150, 7500)}
    assert dict(waits.by_worker[A].cumulative())["0.05"] == 150
    assert dict(waits.by_worker[A].cumulative())["0.025"] == 0


def test_last_worker_to_arrive_may_change():
    waits = StragglerWaits()
    waits.paced(A, 1.0, 100)
    waits.paced(B, 6.0, 100)
    waits.paced(A, 8.0, 100)  # so B is the last one now
    assert totals(waits) == {A: (100, 5_000), B: (100, 2_000)}


def test_new_world_and_exited_worker_are_not_compared():
    waits = StragglerWaits()
    waits.paced(A, 1.0, 100)
    waits.paced(B, 6.0, 100)
    waits.new_world()
    waits.paced(B, 9.0, 100)
    assert totals(waits) == {A: (100, 5_000)}
    waits.paced(A, 10.0, 100)
    assert totals(waits)[B] == (100, 1_000)
    waits.gone(B)
    waits.paced(C, 20.0, 100)
    assert totals(waits) == {A: (200, 15_000)}


def test_worker_without_collectives_is_not_counted():
    waits = StragglerWaits()
    waits.paced(A, 1.0, 0)
    waits.paced(B, 1.0, 1)
    assert totals(waits) == {}


def test_first_workers_are_kept_beyond_the_limit():
    waits = StragglerWaits()
    for number in range(2 * WORKERS):
        waits.new_world()
        waits.paced(Worker("h", number), 1.0, 100)
        waits.paced(A, 6.0 + number, 100)
    assert len(waits.by_worker) == WORKERS


def test_value_on_a_bucket_bound_belongs_to_the_bucket():
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.1, 0.2, 5.0):
        histogram.add(seconds)
    assert list(histogram.cumulative()) == [("0.1", 1.0), ("1.0", 2.0), ("+Inf", 3.0)]
