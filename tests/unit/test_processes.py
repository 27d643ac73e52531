"""Processes that end during the search."""

from __future__ import annotations

from unittest.mock import create_autospec

import psutil

from harness import processes
from harness.processes import in_session, marked


def test_process_that_became_a_zombie_during_the_search_does_not_count(monkeypatch):
    process = create_autospec(psutil.Process, instance=True)
    process.pid = 1
    # As psutil reports it if it was alive at the first query.
    process.info = {"cmdline": None, "status": psutil.STATUS_SLEEPING}
    process.as_dict.return_value = process.info
    monkeypatch.setattr(psutil, "process_iter", lambda *attributes: iter([process]))
    monkeypatch.setattr(processes, "_inherited", lambda pid, entry: True)
    monkeypatch.setattr("os.getsid", lambda pid: 1)
    assert not [*marked("A=b"), *in_session(1)]
