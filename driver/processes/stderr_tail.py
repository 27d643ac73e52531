"""Storage of the end of each worker's stderr and of its uncaught exception, and selection of the tracebacks to show.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elastic.driver.events import ExitCause
from elastic.driver.monitoring.stack_excerpts import STACK, header_of
from elastic.driver.output_interfaces import Stream
from elastic.protocol.messages import Worker
from elastic.protocol.uncaught.sending import LostDriver, StackOf, TrainingThread, Uncaught

TAIL_LIMIT = 20 * 1024  # number of bytes kept from the end of a worker's stderr
LINE_LIMIT = 1024 * 1024  # maximum size of an exception as JSON, in bytes
# maximum number of exceptions that are remembered, so that they are not shown again
KNOWN_LIMIT = 256
NAMED = 16  # maximum number of rank ranges listed in a log line

# the rank, or ``host:slot``, when the exception was received, and the worker
Raiser = tuple[str, Worker]


class DiagnosticLines:
    """Parser of the workers' diagnostic streams, which assembles lines from chunks."""

    def __init__(self) -> None:
        self._partial: dict[Worker, bytearray] = {}
        self._training: dict[Worker, int] = {}  # native ID of each worker's training thread
        # for each worker, the thread whose stack may arrive next
        self._next: dict[Worker, StackOf] = {}

    def add(self, worker: Worker, data: bytes) -> list[Uncaught | LostDriver | bytes]:
        """Add a chunk of a worker's stream.

        Returns:
            The reports that are now complete, and lines of stacks, without newlines. Each stack begins with the header
            of its thread. A thread without Python code has no stack.
        """
        rest = self._partial.setdefault(worker, bytearray())
        rest += data
        *lines, left = bytes(rest).split(b"\n")
        rest[:] = left[-LINE_LIMIT:]
        found: list[Uncaught | LostDriver | bytes] = []
        for line in lines:
            match _decoded(line):
                case TrainingThread(thread):
                    self._training[worker] = thread
                case StackOf() as stack:
                    self._next[worker] = stack
                case Uncaught() | LostDriver() as report:
                    found.append(report)
                case bytes():
                    found.append(self._headed(worker, line))
        return found

    def _headed(self, worker: Worker, line: bytes) -> bytes:
        if line != STACK.encode() or worker not in self._next:
            return line
        return header_of(self._next.pop(worker)).encode()

    def training_thread(self, worker: Worker) -> int | None:
        """Return the native ID of a worker's training thread, or None before ``init()``."""
        return self._training.get(worker)

    def drop(self, worker: Worker) -> None:
        for state in (self._partial, self._training, self._next):
            state.pop(worker, None)


_Message = Uncaught | LostDriver | TrainingThread | StackOf
_messages: msgspec.json.Decoder[_Message] = msgspec.json.Decoder(_Message)


def _decoded(line: bytes) -> _Message | bytes:
    if not line.startswith(b"{"):
        return line
    try:
        return _messages.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return line


class StderrTails:
    """Storage of the end of each worker's stderr, and of exceptions that workers reported but did not print."""

    def __init__(self) -> None:
        self._tails: dict[Worker, bytearray] = {}
        self._causes: dict[Worker, ExitCause] = {}
        self._diagnostics = DiagnosticLines()

    def add(self, worker: Worker, stream: Stream, data: bytes) -> None:
        if stream == "stderr":
            self._append(worker, data)
        elif stream == "diagnostics":
            for each in self._diagnostics.add(worker, data):
                if isinstance(each, Uncaught):
                    self._append(worker, each.whole.encode())
                if not isinstance(each, bytes):
                    self._causes[worker] = _cause_of(each)

    def _append(self, worker: Worker, data: bytes) -> None:
        tail = self._tails.setdefault(worker, bytearray())
        tail += data
        del tail[:-TAIL_LIMIT]

    def of(self, worker: Worker) -> str:
        return bytes(self._tails.get(worker, b"")).decode(errors="replace")

    def cause(self, worker: Worker) -> ExitCause:
        return self._causes.get(worker, ExitCause.UNKNOWN)

    def training_thread(self, worker: Worker) -> int | None:
        return self._diagnostics.training_thread(worker)

    def drop(self, worker: Worker) -> None:
        self._tails.pop(worker, None)
        self._causes.pop(worker, None)
        self._diagnostics.drop(worker)


def _cause_of(report: Uncaught | LostDriver) -> ExitCause:
    if isinstance(report, LostDriver) or report.driver:
        return ExitCause.LOST_DRIVER
    return ExitCause.LOST_PEER if report.peer else ExitCause.EXCEPTION


class TracebackLedger:
    """Ledger of uncaught exceptions, which shows each exception once.

    Further workers that raised the same exception, or only lost a peer, are summarized.

    Args:
        verbose: whether to show every frame, and also exceptions about lost peers.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self.shown = 0  # number of tracebacks that were shown
        # whether an operator stopped the job, in which case all workers lose their peers
        self.stopped = False
        self._verbose = verbose
        # for each digest, the summary and the worker whose traceback was shown; oldest first
        self._known: dict[str, tuple[str, Raiser]] = {}
        # for each digest, the summary, the worker whose traceback was shown, and the further workers to report
        self._more: dict[str, tuple[str, list[Raiser]]] = {}
        # workers that lost a peer, by summary and script line
        self._lost: dict[tuple[str, str], list[Raiser]] = {}

    def add(self, worker: Worker, name: str, uncaught: Uncaught) -> str:
        """Record an exception. Return the text to show now, or an empty string if the exception was already shown.

        Args:
            worker: the worker that raised the exception.
            name: the worker's rank, or ``host:slot``.
            uncaught: the exception.
        """
        raiser = name, worker
        if uncaught.peer and self.stopped:
            return ""
        if uncaught.peer and not self._verbose:
            self._lost.setdefault((uncaught.summary, uncaught.line), []).append(raiser)
            return ""
        if uncaught.digest in self._known:
            summary, shown = self._known[uncaught.digest]
            self._more.setdefault(uncaught.digest, (summary, [shown]))[1].append(raiser)
            return ""
        self._known[uncaught.digest] = uncaught.summary, raiser
        if len(self._known) > KNOWN_LIMIT:
            del self._known[next(iter(self._known))]
        self.shown += 1
        return uncaught.whole if self._verbose else uncaught.folded

    def rest(self) -> list[str]:
        """Return the pending lines, and clear them.

        Each line lists the further workers that raised an exception that was already shown. The workers that only lost
        a peer are added to the first line, or listed in a separate line if there is no other line.
        """
        lost = self._lost_peers()
        lines = []
        for summary, raisers in self._more.values():
            first, *others = _labels(raisers)
            lines.append(
                f"the exception of {_named([first])} also occurred on {_counted(others, 'more ')}"
                f"{lost and f'; {lost}'}: {summary}"
            )
            lost = ""
        if lost:
            why = "" if self.shown else f": {next(iter(self._lost))[0]}"
            lines.append(f"{lost}{why}")
        self._more, self._lost = {}, {}
        return lines

    def _lost_peers(self) -> str:
        if not self._lost:
            return ""
        lost = [raiser for some in self._lost.values() for raiser in some]
        _, line = next(iter(self._lost))
        at = f", the first at {line}" if line else ""
        return f"{_counted(_labels(lost))} ended because a collective failed{at}"


def _labels(raisers: Sequence[Raiser]) -> list[str]:
    """Return a label for each worker: its rank, or its slot if another worker had the same rank."""
    holders: dict[str, set[Worker]] = {}
    for name, worker in raisers:
        holders.setdefault(name, set()).add(worker)
    return [str(worker) if len(holders[name]) > 1 else name for name, worker in raisers]


def _counted(names: Sequence[str], more: str = "") -> str:
    noun = "worker" if len(names) == 1 else "workers"
    return f"{len(names)} {more}{noun} ({_named(names)})"


def _named(names: Sequence[str]) -> str:
    ranks = sorted({int(name) for name in names if name.isdecimal()})
    others = sorted({name for name in names if not name.isdecimal()})
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    if words:
        words[0] = f"{'rank' if len(ranks) == 1 else 'ranks'} {words[0]}"
    words += others
    return ", ".join(words[:NAMED]) + (", ..." if len(words) > NAMED else "")
