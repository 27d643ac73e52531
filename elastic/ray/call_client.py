"""Client of persistent workers: sends them calls and collects the results. This module imports Ray."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from elastic.ray.call_results import REGROUP, CallFailure, cause, failure_in, opened
from elastic.ray.driver_client import DriverClient

# seconds after a call has failed on one rank until the ranks are asked to regroup
GRACE_S = 2.0
# seconds after the request to regroup until the client stops waiting for the other ranks
RELEASED_S = 30.0


class CallClient:
    """Client that calls the persistent workers of one executor. Not thread-safe."""

    def __init__(self, follower: DriverClient, size: int) -> None:
        self._follower = follower
        self._size = size
        # Object references of earlier calls that may still be running.
        self._handed_out: list[list[Any]] = []

    def values(self, request: bytes, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call the workers, and return the results by rank.

        If the call fails on one rank, other ranks may be waiting for that rank in a collective. The client releases
        them, so that the error is raised promptly and all ranks are available for the next call.

        Args:
            request: pickled request.
            ranks: ranks to call. None means all.

        Raises:
            JobFailed: a worker was lost.
            RaisedOnWorker: the function raised an exception that cannot be raised here.
            Exception: raised by the function on a worker, and raised again here.
        """
        refs = self._begin(request, ranks)
        answers: dict[Any, bytes] = {}
        failures: list[CallFailure] = []
        left, regrouped, by = refs, False, None
        while left:
            within_s = None if by is None else max(0.0, by - time.monotonic())
            done, left = self._follower.some(left, within_s)
            for ref in done:
                answers[ref] = self._follower.ask(ref)
                failure = failure_in(answers[ref])
                failures += [] if failure is None else [failure]
            if failures and by is None:
                by = time.monotonic() + GRACE_S
            elif by is not None and not done:
                if regrouped:
                    # Return without ranks that are still computing. Their next call starts after the current one.
                    break
                self._regroup()
                regrouped, by = True, time.monotonic() + RELEASED_S
        self._follower.drain()
        if failures:
            raise cause(failures).exception()
        return [opened(answers[ref]) for ref in refs]

    def references(self, request: bytes) -> list[Any]:
        """Call the workers. Return Ray references to the values, by rank."""
        refs = self._begin(request)
        self._handed_out.append(refs)
        open_one = ray.remote(num_cpus=0, max_retries=0)(opened)
        return [open_one.remote(ref) for ref in refs]

    def _begin(self, request: bytes, ranks: Sequence[int] | None = None) -> list[Any]:
        self._free_earlier()
        actor = self._follower.actor
        return [actor.call.remote(rank, request) for rank in ranks or range(self._size)]

    def _free_earlier(self) -> None:
        handed_out, self._handed_out = self._handed_out, []
        for refs in handed_out:
            done, left = ray.wait(refs, num_returns=len(refs), timeout=0)
            if left and any(failure_in(self._follower.ask(ref)) for ref in done):
                self._regroup()
            elif left:
                self._handed_out.append(refs)

    def _regroup(self) -> None:
        for rank in range(self._size):
            self._follower.actor.call.remote(rank, REGROUP)
