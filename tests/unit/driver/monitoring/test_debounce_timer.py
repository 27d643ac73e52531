"""Timer that expires once nothing has happened for a while, or at its latest time."""

from __future__ import annotations

import asyncio
from unittest.mock import create_autospec

from elastic.driver.monitoring.debounce_timer import MOST_S, QUIET_S, DebounceTimer


def test_each_touch_postpones_the_timer_up_to_the_latest_time(monkeypatch):
    loop = create_autospec(asyncio.AbstractEventLoop, instance=True)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    fired: list[int] = []
    timer = DebounceTimer(lambda: fired.append(1))
    for now in (10.0, 10.5, 14.5):
        loop.time.return_value = now
        timer.touch()
    due = [call.args[0] for call in loop.call_at.call_args_list]
    assert due == [10.0 + QUIET_S, 10.5 + QUIET_S, 10.0 + MOST_S]
    assert loop.call_at.return_value.cancel.call_count == 2
    loop.call_at.call_args.args[1]()
    assert fired == [1]
    loop.time.return_value = 20.0
    timer.touch()
    assert loop.call_at.call_args.args[0] == 20.0 + QUIET_S, "from here on anew"
