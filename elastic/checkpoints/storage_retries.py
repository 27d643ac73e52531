"""Retries of reads and writes while the storage of checkpoints fails: intervals and time limits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from elastic.checkpoints.files.storage import Storage

# Intervals in seconds between attempts to write. The interval is random, and its upper bound doubles from the first to
# the longest. Writes are retried until they succeed or are no longer needed, while training continues.
FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 3.0
# The same for attempts to read, and how long to retry. Training waits for reads.
FIRST_READ_RETRY_S, LONGEST_READ_RETRY_S = 0.2, 5.0
READ_LIMIT_S = 120.0

Value = TypeVar("Value")


def write_until(
    cancelled: threading.Event,
    write: Callable[[], None],
    failed: Callable[[BaseException | None], None],
) -> None:
    """Call ``write``, and retry it after OSError until ``cancelled`` is set.

    Args:
        failed: called with the error before each retry.

    Raises:
        OSError: ``write`` failed, and ``cancelled`` is set.
        Exception: any other exception raised by ``write``.
    """
    tries = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(OSError),
        wait=tenacity.wait_random_exponential(FIRST_RETRY_S, LONGEST_RETRY_S),
        stop=tenacity.stop_when_event_set(cancelled),
        sleep=tenacity.sleep_using_event(cancelled),
        before_sleep=lambda tried: failed(tried.outcome.exception() if tried.outcome else None),
        reraise=True,
    )
    tries(write)


def read_patiently(storage: Storage, read: Callable[[], Value]) -> Value:
    """Call ``read``, and retry it after OSError for up to `READ_LIMIT_S` seconds. Return its result.

    Raises:
        OSError: the storage did not recover in time.
        Exception: any other exception raised by ``read``.
    """
    tries = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(OSError),
        wait=tenacity.wait_random_exponential(FIRST_READ_RETRY_S, LONGEST_READ_RETRY_S),
        stop=tenacity.stop_after_delay(READ_LIMIT_S),
        before_sleep=lambda tried: _print_once(storage, tried),
        reraise=True,
    )
    return tries(read)


def _print_once(storage: Storage, tried: tenacity.RetryCallState) -> None:
    if tried.attempt_number == 1 and tried.outcome is not None:
        error = tried.outcome.exception()
        print(
            f"elastic: {storage.url} could not be read ({error}); retrying for {READ_LIMIT_S:.0f} s",
            file=sys.stderr,
            flush=True,
        )
