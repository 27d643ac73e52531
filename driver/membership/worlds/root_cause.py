"""Attribution of a failure to one worker or to the script. Pure: no I/O, no clock.

`RootCauseSearch`: in a job that cannot recover, survivors may report a failure before the exit of the lost worker is
known. The search therefore waits briefly for an exit. The first worker that exits without having reported a failure is
the cause.

`Mismatches`: if ranks call different collectives, the job first resumes from the last commit, because the cause may be
a transient fault. If the next world fails in the same calls, the script is at fault.

`Exceptions`: if one worker raises an exception, the others continue without it. If the exception occurs again at the
same commit, the script is at fault, because the exception would recur forever. Exceptions reported as caused by
hardware are excluded, because one interconnect fault can affect all GPUs of a host; their slots cool down as after any
other loss.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.driver.events import WorkerRaised
from elastic.driver.reasons import Reason
from elastic.protocol.calls import Called
from elastic.protocol.messages import Commit, Worker


def describe_exit(code: int) -> str:
    """Describe the exit code of a worker, for example ``exit code 3`` or ``signal 9 SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def exit_code(code: int) -> int:
    """Return the exit code of the job for a worker that exited unexpectedly with ``code``. The result is never 0."""
    return code if code > 0 else 128 - code if code < 0 else 1


@dataclass
class RootCauseSearch:
    """Search for the worker that caused a failure.

    ``verdict`` is the reason if no such worker is found before the time ``by``. A worker that has not reported the
    failure is a suspect. It may be slow to exit, so the search waits for it until the time ``latest``.
    """

    by: float
    latest: float
    verdict: Reason | None
    reporters: set[Worker] = field(default_factory=set)
    # worker identified as the root cause, or None; the search waits for its exit code
    root_cause: Worker | None = None

    def name_root_cause(self, worker: Worker, verdict: Reason) -> None:
        """Record a worker whose own exception explains the failure. The first recorded worker is the root cause."""
        if self.root_cause is None and worker not in self.reporters:
            self.root_cause, self.verdict = worker, verdict

    def settled(self, members: Iterable[Worker]) -> bool:
        """Return whether the search is no longer needed.

        This is the case if no root cause is known and a new world contains every worker that reported the failure: the
        script has recovered by calling init() again in a retry loop.
        """
        return self.root_cause is None and self.reporters <= set(members)

    def wait_longer(self, live: Iterable[Worker]) -> bool:
        """Return whether the search continues after the time ``by``.

        The search continues while a suspect may still exit. In that case, ``by`` is extended.
        """
        if self.by >= self.latest or all(worker in self.reporters for worker in live):
            return False
        self.by = self.latest
        return True

    def settles(self, worker: Worker) -> bool:
        """Return whether the exit of this worker ends the search."""
        if self.root_cause is not None:
            return worker == self.root_cause
        return worker not in self.reporters


@dataclass
class Mismatches:
    """Record of the mismatched calls that made the latest world fail."""

    _generation: int = 0
    _calls: frozenset[tuple[str, str]] = frozenset()  # name and script line of each mismatched call

    def repeats(self, generation: int, calls: Iterable[Called]) -> bool:
        """Record the calls that made a world fail. Return whether the previous world failed in one of these calls.

        A rank may have reported only its own call, if it did not receive the calls of the other ranks.
        """
        now = frozenset((each.name, each.line) for each in calls)
        again = generation == self._generation + 1 and not now.isdisjoint(self._calls)
        self._generation, self._calls = generation, now
        return again


# represents the state before the first commit, which is the same for all worlds that start from the same checkpoint or
# from none
_BEGINNING = Commit(0, 0)
# Numbers in messages are replaced before a comparison, because values such as addresses and indices differ by rank.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass
class Exceptions:
    """Record of the exceptions raised by user code. Commit 0 of a world is the state from which the world started."""

    _raised: list[tuple[Worker, int, Commit | None, str]] = field(default_factory=list)
    _began_with: dict[int, Commit] = field(default_factory=dict)

    def world_began(self, generation: int, commit: Commit | None) -> None:
        if commit is not None:
            self._began_with[generation] = self._first_name(commit)
        for old in [g for g in self._began_with if g < generation - 8]:
            del self._began_with[old]

    def checkpoint_made(self) -> None:
        """Record a new checkpoint, and discard the exceptions raised before the first commit.

        If they occur again after a restart from this checkpoint, they do not count as repeated.
        """
        self._raised = [each for each in self._raised if each[2] != _BEGINNING]

    def _first_name(self, commit: Commit) -> Commit:
        if commit.number > 0:
            return commit
        return self._began_with.get(commit.generation, commit)

    def repeats(self, event: WorkerRaised) -> Worker | None:
        """Return the worker that raised the same exception before, at the same commit or in the same incident.

        If no worker did, record the exception and return None.
        """
        places = [self._first_name(event.commit or Commit(event.generation, 0))]
        if event.beginning:
            places.append(_BEGINNING)
        summary = _NUMBERS.sub("#", event.summary)
        for worker, generation, place, earlier in self._raised:
            if earlier == summary and (generation == event.generation or place in places):
                return worker
        self._raised += [(event.worker, event.generation, place, summary) for place in places]
        del self._raised[:-64]
        return None
