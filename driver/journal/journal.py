"""Recording and replay of all events, with the resulting actions of membership. Makes no decisions.

    journal.record(now, event, actions)     right after each decision, in order
    await journal.settle()                  before acting on what was recorded
    await journal.rest()                    when no decision is pending: time for a snapshot

Membership is deterministic, so the events alone reproduce every decision: ``replay`` passes them to a new Membership
and compares its actions with the recorded ones. `file_journal`, etcd and Ray store journals, `entries` defines the
contents, and `resume` restores a job for another driver. ``python -m elastic.driver.journal FILE`` prints the entries
and whether the replay agrees.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from elastic.driver.events import Action, Event
from elastic.driver.journal.entries import (
    Entry,
    Header,
    RecordedEntry,
    Resumed,
    Snapshot,
    Writer,
    decoded,
    decoded_header,
    describe,
    describe_writer,
    digest_of,
    readable_lines,
    same,
)
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.segment_files import opened_older
from elastic.driver.journal.snapshot_schedule import SNAPSHOT_EVERY, SnapshotSchedule
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import SnapshotError, restore_snapshot
from elastic.driver.reasons import Reason
from elastic.driver.settings import Settings
from elastic.errors import ElasticError, Invalid

RING = 200  # number of latest entries to keep in memory for error reports


class Machine(Protocol):
    """Interface of a state machine that can be replayed: Membership, or a substitute in tests."""

    def handle(self, event: Event, now: float, *, more: bool = False) -> list[Action]: ...


Rebuilt = TypeVar("Rebuilt", bound=Machine)


class ReplayDiffers(ElasticError):
    """Error raised when a replay produces different actions, because the code has changed or is not deterministic."""


@dataclass(frozen=True, kw_only=True)
class SnapshotPolicy:
    """Policy for when and how the driver takes snapshots.

    Args:
        take: function that returns a snapshot of the state after the latest entry. None means no snapshots.
        resumable: whether a driver may resume from the journal. If not, a journal in a file takes a snapshot only when
            it begins a new segment, and other journals take none.
        snapshot_every: minimum number of entries between snapshots.
        failed: called once if the journal can no longer be written, for example because the disk is full. The job
            continues.
        suits: function that returns whether no worker waits for the driver. Taking a snapshot blocks the driver.
    """

    take: Callable[[], bytes] | None = None
    resumable: bool = True
    snapshot_every: int = SNAPSHOT_EVERY
    failed: Callable[[str], None] = lambda text: None
    suits: Callable[[], bool] = lambda: True


class Journal:
    """Journal that keeps the latest entries in memory. Base class of journals that store all entries.

    `SnapshotSchedule` decides when a snapshot is due. A due snapshot is taken when the driver has no pending decision
    and ``suits`` returns True, but at the latest when it is overdue.
    """

    def __init__(self, policy: SnapshotPolicy | None = None, *, entries: int = 0) -> None:
        policy = policy or SnapshotPolicy()
        self.failed = policy.failed
        self.take = policy.take
        self.resumable = policy.resumable
        self.suits = policy.suits
        self.schedule = SnapshotSchedule(policy.snapshot_every, entries)
        self.ring: deque[Entry] = deque(maxlen=RING)

    def record(
        self,
        at: float,
        event: Event,
        actions: Sequence[Action] = (),
        *,
        error: str = "",
        more: bool = False,
    ) -> None:
        """Record an event that was just handled, and the resulting actions. The entry is durable after `settle`.

        Args:
            at: time of the event on the journal's clock, in seconds.
            event: the event.
            actions: the actions.
            error: the exception that was raised while the event was handled, if any.
            more: see `Membership.handle`.
        """
        self.append(Entry(at, event, list(actions), error, more=more))

    def append(self, entry: Entry) -> None:
        """Record an entry. See `record`."""
        self.ring.append(entry)
        self.schedule.count(entry, self._keep(entry))
        if entry.error:
            # Take no more snapshots, because the state may be inconsistent after an exception.
            self.take = None
        elif self.snapshots and self.schedule.overdue():
            self._snapshot()

    def trouble(self, at: float, reason: Reason) -> None:
        """Record a problem outside the driver, or its end, for readers of the journal. No effect on decisions."""

    async def settle(self) -> None:
        """Wait until all recorded entries are readable by the next driver. Only then may their actions be performed."""

    async def rest(self) -> None:
        """Take a snapshot if one is due and no worker waits for the driver.

        Call this only if no decision is pending and all recorded entries are settled.
        """
        if self.due() and self.suits():
            self._snapshot()
            await self.settle()

    def story(self, last: int = RING) -> str:
        """Return the latest ``last`` entries as readable text, oldest first."""
        entries = list(self.ring)[-last:]
        return (
            "\n".join(readable_lines(entries, since=entries[0].at)) if entries else "no events yet"
        )

    def close(self) -> None:
        """Close the journal. Later entries are not stored."""

    # ---- for subclasses --------------------------------------------------------------------------------------------

    def _keep(self, entry: Entry) -> int:
        return 0

    def keep_snapshot(self, data: bytes, at: float) -> None:
        """Store a snapshot of the state after the last entry."""

    @property
    def snapshots(self) -> bool:
        """Return whether the journal contains snapshots, from which another driver may resume."""
        return self.take is not None and self.resumable

    def due(self) -> bool:
        return self.snapshots and self.schedule.due()

    def _snapshot(self) -> None:
        data = self.taken()
        if data is not None:
            self.schedule.taken(len(data))
            self.keep_snapshot(data, self.ring[-1].at)

    def taken(self) -> bytes | None:
        """Return a snapshot of the state after the last entry, or None if it cannot be taken."""
        assert self.take is not None
        try:
            return self.take()
        # This is a bug, but the job can continue: without a snapshot, resuming only takes longer.
        except SnapshotError as error:
            self.take = None
            self.failed(f"the journal gets no more snapshots: {error}")
            return None


class Archive(Protocol):
    """Interface of the storage of one job's journal. While it is open, no other process writes the journal."""

    async def past(self) -> RecoveredJob | None:
        """Return the job to resume, or None if the archive contains none.

        Raises:
            Invalid: the job cannot be resumed.
        """

    async def begin(self, header: Header, policy: SnapshotPolicy | None = None) -> Journal:
        """Begin the journal of a new job in place of the previous job's journal. Call `past` first."""

    async def go_on(
        self, past: RecoveredJob, writer: Writer, policy: SnapshotPolicy | None = None
    ) -> Journal:
        """Continue the journal of a resumed job as its next driver."""

    def close(self) -> None:
        """Release the storage. No-op after `begin` or `go_on`: close the journal that they return instead."""


# ---- reading a file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """Content of a journal with line numbers, which continue from each segment to the next.

    ``start`` is set if the journal begins in mid-job, because it is a copy or its oldest segments were deleted.
    """

    header: Header
    settings: Settings
    entries: list[tuple[int, Entry]]
    takeovers: list[tuple[int, Writer]]
    start: Snapshot | None


def recording(path: Path) -> Recording:
    """Read a journal with its older segments. A last line that was truncated by a crash is ignored.

    Raises:
        Invalid: the file is not a journal.
    """
    with contextlib.ExitStack() as opened:
        try:
            current = opened.enter_context(open(path, "rb"))
            first = current.readline()
        except OSError as error:
            raise Invalid(
                f"the journal {str(path)!r} can't be read: {error.strerror}. Pass a readable file"
            ) from error
        try:
            header = decoded_header(first)
            settings = header.checked()
        except (msgspec.MsgspecError, UnicodeError, Invalid) as error:
            raise Invalid(
                f"{str(path)!r} can't be read as a journal: {error}. Pass a journal that elasticrun --journal wrote"
            ) from error
        found = Recording(header, settings, [], [], None)
        number = 0
        for file in [*map(opened.enter_context, opened_older(path, header)), current]:
            number += 1  # the header
            for text in file:
                if not text.endswith(b"\n"):
                    break
                number += 1
                found = _with_line(found, number, text, path)
        return found


def _with_line(found: Recording, number: int, text: bytes, path: Path) -> Recording:
    try:
        match decoded(text):
            case Entry() as entry:
                found.entries.append((number, entry))
            case Resumed(writer):
                found.takeovers.append((number, writer))
            case Snapshot() as snapshot if number == 2:
                return replace(found, start=snapshot)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Invalid(
            f"line {number} of the journal {str(path)!r} is corrupted: {error}. Restore the file from a copy"
        ) from error
    return found


def read(path: Path) -> tuple[Settings, list[Entry]]:
    """Return the settings of a job, and the entries of all drivers that have written its journal.

    Raises:
        Invalid: the file is not a journal.
    """
    found = recording(path)
    return found.settings, [entry for _, entry in found.entries]


# ---- replay ---------------------------------------------------------------------------------------------------------


def replay(
    path: Path, machine: Callable[[Settings], Machine] = Membership
) -> list[tuple[Event, list[Action]]]:
    """Replay the events on a new machine (by default a Membership), and compare its actions with the recorded actions.

    Raises:
        ReplayDiffers: at the first difference.
        Invalid: the file is not a journal.
    """
    found = recording(path)
    begun: Machine
    if found.start is not None and machine is Membership:
        begun = restore_snapshot(bytes(found.start.snapshot), found.settings)
    else:
        begun = machine(found.settings)
    return [(entry.event, replayed(number, entry, begun)) for number, entry in found.entries]


def rebuilt(entries: Iterable[Entry], machine: Rebuilt) -> Rebuilt:
    """Replay the entries on a machine, to bring it to the state after the last entry.

    The machine's actions are compared with the recorded actions, then discarded.

    Raises:
        ReplayDiffers: at the first difference.
    """
    for number, entry in enumerate(entries, start=2):
        replayed(number, entry, machine)
    return machine


def replayed(number: int, entry: Entry | RecordedEntry, machine: Machine) -> list[Action]:
    """Replay one entry on a machine, and return the machine's actions.

    Args:
        number: number of the entry's line, for error messages.
        entry: the entry.
        machine: machine in the state before the entry.

    Raises:
        ReplayDiffers: the machine's actions differ from the recorded actions.
    """
    actions: list[Action] = []
    raised = ""
    try:
        actions = machine.handle(entry.event, now=entry.at, more=entry.more)
    except Exception as error:
        raised = type(error).__name__
    if raised != entry.error.partition(":")[0]:
        raise ReplayDiffers(
            f"line {number}, {describe(entry.event)}: the replay raised {raised or 'nothing'}, but the"
            f" journal records {entry.error or 'nothing'}"
        )
    if entry.digest is None:
        if actions or entry.actions:
            _compare(number, entry, actions)
    elif entry.digest != digest_of(actions):
        result = describe(actions)
        raise ReplayDiffers(
            f"journal line {number}, {describe(entry.event)}: the replay returned {result}, which differs from the"
            " recorded actions. Replay the journal with the version that wrote it"
        )
    return actions


def _compare(number: int, entry: Entry | RecordedEntry, actions: Sequence[Action]) -> None:
    for index in range(max(len(actions), len(entry.actions))):
        recorded = entry.actions[index] if index < len(entry.actions) else None
        now = actions[index] if index < len(actions) else None
        if not same(recorded, now):
            raise ReplayDiffers(
                f"line {number}, {describe(entry.event)}: the journal records action {index + 1} as"
                f" {describe(recorded)}, but the replay returned {describe(now)}"
            )


# ---- command line ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m elastic.driver.journal FILE", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    try:
        found = recording(path)
        print(f"settings: {found.settings}")
        for line in story_of(found):
            print(line)
        print(
            f"the replay matches the journal: {len(replay(path))} events led to the recorded actions"
        )
    except ReplayDiffers as error:
        print(f"the replay differs: {error}", file=sys.stderr)
        return 1
    except Invalid as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def story_of(found: Recording) -> Iterator[str]:
    """Yield all entries of a journal as readable lines."""
    since = found.entries[0][1].at if found.entries else 0.0
    if found.start is not None:
        yield f"-- from the middle of the job: term {found.start.writer.term}"
    takeovers = deque(found.takeovers)
    for number, entry in found.entries:
        while takeovers and takeovers[0][0] < number:
            yield describe_writer(takeovers.popleft()[1])
        yield from readable_lines([entry], since=since)
    yield from (describe_writer(writer) for _, writer in takeovers)
