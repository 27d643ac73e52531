"""Detection of a failure that is still in progress, so that its log lines can be combined into one summary.

Pure: no I/O, no clock.

On a busy machine, the exceptions and exits caused by one fault may be seconds apart, because a Python process that has
loaded torch takes seconds to exit, and the processes are scheduled at different times.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic.driver.monitoring.job_view import JobView
from elastic.protocol.messages import Worker


def failure_lasts(view: JobView, ending: Collection[Worker]) -> bool:
    """Return whether more exceptions and exits are expected from the current failure.

    Args:
        view: state of the job.
        ending: workers that have reported an exception and may not have exited yet.
    """
    failed = view.end is not None and view.end.code != 0
    return failed or view.broken or not view.workers.keys().isdisjoint(ending)
