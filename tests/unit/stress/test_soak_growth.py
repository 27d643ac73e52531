"""Growth is distinguished from variation."""

from __future__ import annotations

import random

import pytest

from stress.soak.growth import QUANTITIES, GrowthCurve, slope

MEMORY = next(q for q in QUANTITIES if q.key == "rss_mb")
THREADS = next(q for q in QUANTITIES if q.key == "threads")
AT = [5.0 * n for n in range(240)]  # twenty minutes


def curve(values, quantity=MEMORY, sizes=None) -> GrowthCurve:
    at = AT[: len(values)]
    return GrowthCurve("worker", quantity, at, list(values), sizes or [4] * len(at))


def test_slope_is_robust_against_outliers():
    assert slope(AT, [2.0 * t + 1 for t in AT]) == pytest.approx(2.0)
    spiked = [0.0] * 240
    spiked[17] = spiked[200] = 1e6
    assert slope(AT, spiked) == 0.0
    assert slope([1.0], [1.0]) == 0.0
    assert slope([], []) == 0.0


def test_curve_that_levels_off_in_the_first_half_is_flat():
    warmed = curve([200.0 + min(n, 100) for n in range(240)])
    assert warmed.growth == 0.0
    assert warmed.flat


def test_a_steadily_growing_curve_is_not_flat():
    leaking = curve([200.0 + 0.1 * n for n in range(240)])  # 12 MB in ten minutes, 4.4 allowed
    assert leaking.growth == pytest.approx(11.9, abs=0.2)
    assert not leaking.flat


def test_curve_that_varies_with_the_world_is_flat_and_a_leak_is_found():
    dice = random.Random(1)
    breathing = [10.0 + dice.choice((0, 0, 1, 2, 3)) for _ in AT]
    assert curve(breathing, THREADS).flat
    leak = [value + n / 40 for n, value in enumerate(breathing)]  # three more in the second half
    assert not curve(leak, THREADS).flat


def test_larger_worlds_at_the_end_are_no_growth():
    dice = random.Random(1)
    sizes = [dice.choice((1, 2, 3) if n < 200 else (2, 3, 4)) for n in range(240)]
    sockets = [4.0 * size + dice.choice((0, 1)) for size in sizes]
    assert curve(sockets, THREADS, sizes).flat
    leaking = [value + n / 40 for n, value in enumerate(sockets)]
    assert not curve(leaking, THREADS, sizes).flat


def test_decreasing_curve_is_flat():
    assert curve([300.0 - n / 10 for n in range(240)]).flat


def test_a_sparkline_shows_the_shape():
    assert curve(range(240)).sparkline(8) == "▁▂▃▄▅▆▇█"
    assert set(curve([200.0 + 0.001 * n for n in range(240)]).sparkline()) == {"▁"}
    assert curve([]).sparkline() == ""
