"""Decides who is to blame: one worker, or the script. Pure.

`RootCauseSearch`: in a job that can't recover, survivors may complain before the exit of the worker they lost is known.
So a complaint waits a moment for an exit, and the first that did not complain itself is the culprit.

`Mismatches`: ranks that call different collectives go back to the last commit, in case that chance or a fault has led
them astray. If the next world ends in the same calls, the script is wrong.

`Exceptions`: an exception that one worker raised is its own trouble, and the others go on. The same one again at the
same commit is the script's, and would come for ever. What a worker reports as the hardware's fault is not asked here:
one fault of a host's fabric reaches all its GPUs. Its slot cools down, as after any other loss.
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
    """``exit code 3``, ``signal 9 SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def exit_code(code: int) -> int:
    """The job's exit code for a worker that should not have ended with ``code``: never 0."""
    return code if code > 0 else 128 - code if code < 0 else 1


@dataclass
class RootCauseSearch:
    """``verdict`` is what the job ends with if nobody turns out to be the culprit before ``by``.

    Somebody who has not complained is the suspect, and may just be slow to exit: it is given until ``latest``.
    """

    by: float
    latest: float
    verdict: Reason | None
    reporters: set[Worker] = field(default_factory=set)
    root_cause: Worker | None = None  # known already; its exit is awaited for the exit code

    def name_root_cause(self, worker: Worker, verdict: Reason) -> None:
        """Its own exception explains everything; the first one counts."""
        if self.root_cause is None and worker not in self.reporters:
            self.root_cause, self.verdict = worker, verdict

    def settled(self, members: Iterable[Worker]) -> bool:
        """A new world has begun: whether all who complained are in it, and nobody is accused. Then they have helped
        themselves, by a retry loop of the script's own that calls init() again.
        """
        return self.root_cause is None and self.reporters <= set(members)

    def wait_longer(self, live: Iterable[Worker]) -> bool:
        """``by`` has come: whether to give a suspect more time."""
        if self.by >= self.latest or all(worker in self.reporters for worker in live):
            return False
        self.by = self.latest
        return True

    def settles(self, worker: Worker) -> bool:
        """Whether the exit of this worker answers the question."""
        if self.root_cause is not None:
            return worker == self.root_cause
        return worker not in self.reporters


@dataclass
class Mismatches:
    """The calls in which ranks differed, of the last world that broke for that."""

    _generation: int = 0
    _calls: frozenset[tuple[str, str]] = frozenset()  # name and line

    def repeats(self, generation: int, calls: Iterable[Called]) -> bool:
        """Whether the world before this one broke for the same calls; remembers these. A rank that did not learn of the
        others' calls has told its own.
        """
        now = frozenset((each.name, each.line) for each in calls)
        again = generation == self._generation + 1 and not now.isdisjoint(self._calls)
        self._generation, self._calls = generation, now
        return again


_BEGINNING = Commit(0, 0)  # of all worlds that had no commit, and the same checkpoint or none
# Addresses, indices and the like differ from rank to rank.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass
class Exceptions:
    """The exceptions of members' user code. Commit 0 is another name of the state that its world started with."""

    _raised: list[tuple[Worker, int, Commit | None, str]] = field(default_factory=list)
    _began_with: dict[int, Commit] = field(default_factory=dict)

    def world_began(self, generation: int, commit: Commit | None) -> None:
        if commit is not None:
            self._began_with[generation] = self._first_name(commit)
        for old in [g for g in self._began_with if g < generation - 8]:
            del self._began_with[old]

    def checkpoint_made(self) -> None:
        """A checkpoint was made: exceptions at the start until now do not count as repeated after a restart."""
        self._raised = [each for each in self._raised if each[2] != _BEGINNING]

    def _first_name(self, commit: Commit) -> Commit:
        if commit.number > 0:
            return commit
        return self._began_with.get(commit.generation, commit)

    def repeats(self, event: WorkerRaised) -> Worker | None:
        """The worker that raised the same before, at the same commit or in the same incident; otherwise remember this
        one.
        """
        places = [self._first_name(event.commit or Commit(event.generation, 0))]
        if event.beginning:
            places.append(_BEGINNING)
        summary = _NUMBERS.sub("#", event.summary)
        for worker, generation, place, said in self._raised:
            if said == summary and (generation == event.generation or place in places):
                return worker
        self._raised += [(event.worker, event.generation, place, summary) for place in places]
        del self._raised[:-64]
        return None
