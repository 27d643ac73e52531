"""elasticrun whose journal continues in a new segment after 20 kB. With KILLED_AT=FUNCTION, the second switch kills it.

FUNCTION is a function of elastic.driver.journal.file_journal that each switch calls once. With KILLED_AT="after
FUNCTION", the driver is killed after the call, and otherwise before it.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any

from elastic.driver.commandline.cli import main
from elastic.driver.job import start_multi_host
from elastic.driver.journal import file_journal
from elastic.driver.journal.journal import SnapshotPolicy
from elastic.driver.journal.rotation import SegmentLimits

SWITCHES = 2

file_journal.LIMITS = SegmentLimits(least=20_000, snapshots=0)
vars(start_multi_host)["SnapshotPolicy"] = functools.partial(SnapshotPolicy, snapshot_every=10)
if killed_at := os.environ.pop("KILLED_AT", ""):
    name = killed_at.removeprefix("after ")
    right = getattr(file_journal, name)
    calls = 0

    def counted(*args: Any) -> Any:
        global calls
        calls += 1
        result = right(*args) if calls < SWITCHES or name != killed_at else None
        if calls == SWITCHES:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(file_journal, name, counted)
sys.exit(main())
