"""Writes down every event and what membership answered, and plays it back. Decides nothing.

The file has one JSON object per line: first a header with the settings, then ``{"at": seconds, "event": ...,
"actions": [...]}``. Membership is deterministic, so the events alone rebuild every decision: ``replay`` feeds them to
a new Membership and compares. Secrets are never in it: the job's secret is in no event, and of the extra environment
only the names are kept. ``python -m elastic.driver.journal FILE`` prints the story and whether the replay agrees.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar, Union

import msgspec

from elastic.driver import events
from elastic.driver.events import Action, Event
from elastic.driver.settings import Settings
from elastic.errors import ElasticError, Invalid
from elastic.protocol import Worker

FORMAT = 1
RING = 200  # entries kept in memory for the story of an assertion


class Machine(Protocol):
    """What is replayed: Membership, or a test's stand-in."""

    def handle(self, event: Event, now: float) -> list[Action]: ...


Rebuilt = TypeVar("Rebuilt", bound=Machine)


class ReplayDiffers(ElasticError):
    """The same events led to other actions than those recorded: the code has changed, or is not deterministic."""


class Header(msgspec.Struct):
    journal: int
    date: str
    settings: dict[str, Any]


class Entry(msgspec.Struct, omit_defaults=True):
    """One event. ``error`` is what handling it raised, if it did."""

    at: float
    event: Event
    actions: list[Action] = []
    error: str = ""


class _Line(msgspec.Struct):
    """An entry as it is read: its parts are decoded by their own tags."""

    at: float
    event: msgspec.Raw
    actions: list[msgspec.Raw] = []
    error: str = ""


_encoder = msgspec.json.Encoder()
_lines = msgspec.json.Decoder(_Line)
_events: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[tuple(Event.__subclasses__())])  # noqa: UP007
_actions: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[tuple(Action.__subclasses__())])  # noqa: UP007


class Journal:
    """An open journal. ``path`` None keeps only the ring in memory; ``failed`` is told once if the disk is full."""

    def __init__(
        self,
        path: Path | None,
        settings: Settings,
        *,
        failed: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path = path
        self._failed = failed
        self._fd: int | None = None
        self._ring: deque[Entry] = deque(maxlen=RING)
        if path is None:
            return
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.fchmod(self._fd, 0o600)  # an old file keeps its mode when it is opened
        except OSError as error:
            raise Invalid(
                f"cannot write the journal {str(path)!r}: {error.strerror}; give a path in a writable folder"
            ) from error
        said = asdict(settings)
        said["env"] = dict.fromkeys(said["env"], "")
        self._write(Header(FORMAT, time.strftime("%Y-%m-%dT%H:%M:%S%z"), said))

    def record(
        self, at: float, event: Event, actions: Sequence[Action] = (), *, error: str = ""
    ) -> None:
        """One line, in the file when this returns."""
        entry = Entry(at, event, list(actions), error)
        self._ring.append(entry)
        self._write(entry)

    def story(self, last: int = RING) -> str:
        """The latest entries, readable, oldest first."""
        entries = list(self._ring)[-last:]
        return "\n".join(tell(entries, since=entries[0].at)) if entries else "no events yet"

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, line: Header | Entry) -> None:
        if self._fd is None:
            return
        try:
            view = memoryview(_encoder.encode(line) + b"\n")
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:  # a job does not end because its journal cannot be written
            self.close()
            self._failed(f"the journal {str(self._path)!r} ends here: {error.strerror}")


def read(path: Path) -> tuple[Settings, list[Entry]]:
    """Settings and entries of a journal. A line that a crash cut off at the end is left out. Raises Invalid."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise Invalid(f"cannot read the journal {str(path)!r}: {error.strerror}") from error
    torn = lines.pop()
    try:
        header = msgspec.json.decode(lines[0] if lines else torn, type=Header)
        settings = Settings(**header.settings)
    except (msgspec.MsgspecError, TypeError) as error:
        raise Invalid(f"{str(path)!r} is no journal: {error}") from error
    if header.journal != FORMAT:
        raise Invalid(f"{str(path)!r} has format {header.journal}; this version reads {FORMAT}")
    entries = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            parts = _lines.decode(line)
            actions = [_actions.decode(action) for action in parts.actions]
            entries.append(Entry(parts.at, _events.decode(parts.event), actions, parts.error))
        except msgspec.MsgspecError as error:
            raise Invalid(f"{str(path)!r}, line {number}, is no journal entry: {error}") from error
    return settings, entries


def replay(
    path: Path, machine: Callable[[Settings], Machine] | None = None
) -> list[tuple[Event, list[Action]]]:
    """Feed the events to a new machine (Membership by default) and compare what it does with what was recorded.

    Raises ReplayDiffers at the first difference, Invalid where the file is no journal.
    """
    if machine is None:
        from elastic.driver.membership import Membership

        machine = Membership
    settings, entries = read(path)
    return list(_replayed(entries, machine(settings)))


def rebuilt(entries: Sequence[Entry], machine: Rebuilt) -> Rebuilt:
    """A new machine, brought to where the last entry left the old one. What it answers was answered before.

    Raises ReplayDiffers.
    """
    for _ in _replayed(entries, machine):
        pass
    return machine


def _replayed(entries: Sequence[Entry], machine: Machine) -> Iterator[tuple[Event, list[Action]]]:
    for number, entry in enumerate(entries, start=2):
        actions: list[Action] = []
        raised = ""
        try:
            actions = machine.handle(entry.event, now=entry.at)
        except Exception as error:
            raised = type(error).__name__
        if raised != entry.error.partition(":")[0]:
            raise ReplayDiffers(
                f"line {number}, {describe(entry.event)}: the replay raised {raised or 'nothing'},"
                f" the recording {entry.error or 'nothing'}"
            )
        # Compared as JSON: recorded numbers and sequences have been through it.
        for index in range(max(len(actions), len(entry.actions))):
            recorded = entry.actions[index] if index < len(entry.actions) else None
            now = actions[index] if index < len(actions) else None
            if _encoder.encode(recorded) != _encoder.encode(now):
                raise ReplayDiffers(
                    f"line {number}, {describe(entry.event)}: action {index + 1} was recorded as"
                    f" {describe(recorded)}, but is now {describe(now)}"
                )
        yield entry.event, actions


def tell(entries: Sequence[Entry], *, since: float) -> Iterator[str]:
    """Readable lines: seconds since ``since``, the event, and below it each action."""
    for entry in entries:
        yield f"{entry.at - since:+10.3f}  {describe(entry.event)}"
        for action in entry.actions:
            yield f"{'':12}-> {describe(action)}"
        if entry.error:
            yield f"{'':12}!! {entry.error}"


def describe(value: Any, *, limit: int = 160) -> str:
    """One line for an event, an action or a value inside them."""
    if isinstance(value, (events.Event, events.Action)):
        fields = " ".join(
            f"{name}={describe(getattr(value, name))}"
            for name in value.__struct_fields__
            if getattr(value, name) not in ("", None)
        )
        return f"{type(value).__name__} {fields}".rstrip()
    if isinstance(value, events.Member):
        return str(value.worker)
    if isinstance(value, list):
        shown = ", ".join(describe(each) for each in value[:8])
        return f"[{shown}{f', ... {len(value)} in all' if len(value) > 8 else ''}]"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value) if isinstance(value, Worker) or not isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m elastic.driver.journal FILE", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    try:
        settings, entries = read(path)
        print(f"settings: {settings}")
        for line in tell(entries, since=entries[0].at if entries else 0.0):
            print(line)
        print(f"the replay agrees: {len(replay(path))} events led to the same actions")
    except ReplayDiffers as error:
        print(f"the replay differs: {error}", file=sys.stderr)
        return 1
    except Invalid as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
