"""Signals that stop a job: exit codes, repetitions, and the time for a last checkpoint. Pure: no I/O, no clock."""

from __future__ import annotations

import signal

STOP_CODES = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
# seconds for the last checkpoint after SIGTERM; `docker stop` sends SIGKILL after 10 s
LAST_CHECKPOINT_S = 6.0
# Seconds within which repeated SIGTERMs count as one request, because a process manager may signal all processes of a
# job, and a wrapper may forward its own SIGTERM.
REPEATED_S = 1.0


def last_checkpoint_s(code: int, *, hurried: bool) -> float:
    """Return the seconds that the job has for its last checkpoint after a request to stop.

    Args:
        code: exit code of the request, from `STOP_CODES`.
        hurried: whether an earlier request has already stopped the job.
    """
    return LAST_CHECKPOINT_S if code == STOP_CODES[signal.SIGTERM] and not hurried else 0.0


def is_repeated(number: signal.Signals, at: float, last: float | None) -> bool:
    """Return whether a signal at time ``at`` repeats the same signal at time ``last``, in seconds."""
    return number == signal.SIGTERM and last is not None and at - last < REPEATED_S


def stop_reason(number: signal.Signals) -> str:
    """Return the reason of the stop, for log lines."""
    return f"{'Ctrl-C' if number == signal.SIGINT else number.name} at the driver"
