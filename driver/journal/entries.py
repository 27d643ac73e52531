"""Journal entries, their encoding, and their readable form. Pure: values and bytes. Makes no decisions.

A journal contains one JSON object per line. The header is followed by events with the resulting actions. The lines
between the events are of three other kinds: snapshots of the complete state, changes of the driver, and external
problems. From a snapshot, another driver can resume without reading the whole journal.

    {"journal": 2, "date": ..., "settings": {...}, "job": ..., "command": [...], "folder": ..., "writer": {...}}
    {"at": seconds, "event": {...}, "actions": [...]}
    {"snapshot": {...}, "at": seconds, "writer": {...}}
    {"resumed": {"term": 2, "address": ..., ...}}
    {"trouble": {...}, "at": seconds}

In an action with many members, ``"ranges": [[host, first slot, incarnation, count], ...]`` replaces the members. They
are in rank order, and consecutive slots of a host are one range. The places in a world follow from the order.

A journal never contains secrets: no event contains the job's secret, and only the names of additional environment
variables are stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Union

import msgspec

from elastic.driver import events
from elastic.driver.events import Action, Event
from elastic.driver.membership.scheduling import rank_order
from elastic.driver.reasons import Reason
from elastic.driver.settings import Settings, StartCheckpoint
from elastic.errors import Invalid
from elastic.protocol.messages import Worker

FORMAT = 2
RANGES = b'"ranges":'
MOST_SLOTS = 100_000  # maximum number of workers in a range
RANGES_FROM = 64  # number of members from which an action is written with ranges
# format number that marks a journal as incomplete, because its driver could not write all entries
ABANDONED = 0
ENTRY = b'{"at":'  # first bytes of a line with an entry
BEGINNING = b'{"journal":'  # first bytes of a header, and therefore of a journal
SNAPSHOT = b'{"snapshot":'  # first bytes of a line with a snapshot


class Writer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Driver that writes the subsequent entries of a journal.

    ``at`` and ``unix_s`` are the values of its clocks when it started, and ``boot`` is the boot ID of its machine.
    """

    term: int = 1  # each driver of a job increments the term
    address: str = ""  # address on which the driver listens, host:port
    date: str = ""
    pid: int = 0
    at: float = 0.0  # seconds on the journal's clock when the driver started
    # seconds to add to the machine's monotonic clock to obtain the journal's clock
    offset_s: float = 0.0
    unix_s: float = 0.0
    boot: str = ""


class Header(msgspec.Struct, frozen=True):
    """Description of a job, which is the first line of the journal."""

    journal: int
    date: str
    settings: dict[str, Any]
    job: str = ""
    command: list[str] = []
    folder: str = ""
    outlives: bool = False  # whether agents and workers continue without a driver
    writer: Writer = Writer()
    # start checkpoint; None if the job has none, or if an earlier version wrote the journal
    begins: StartCheckpoint | None = None
    # number of this file among the segments of the job's journal; see `segment_files`
    segment: int = 1

    def checked(self) -> Settings:
        """Return the settings in the header, without the values of additional environment variables.

        Raises:
            Invalid: the format or the settings are of another version, or the journal is incomplete.
        """
        if self.journal == ABANDONED:
            raise Invalid(
                "the journal is incomplete, because the driver could not write to it, possibly because the disk"
                " was full"
            )
        if self.journal != FORMAT:
            raise Invalid(
                f"the journal has format {self.journal}, but this version reads only format {FORMAT}: use the version"
                " that wrote the journal"
            )
        try:
            return Settings(**self.settings)
        except TypeError as error:
            raise Invalid(
                f"the journal contains settings of another version ({error}): use the version that wrote the journal"
            ) from error


class Entry(msgspec.Struct, omit_defaults=True):
    """One event in a journal, with the resulting actions.

    Args:
        error: the exception that was raised while the event was handled, if any.
        more: see `Membership.handle`.
    """

    at: float
    event: Event
    actions: list[Action] = []
    error: str = ""
    digest: int | None = None  # digest of the actions, if the journal omits them
    more: bool = False


class RangedAction:
    """Recorded action with ranges instead of its members. Expanding these takes long in a job with many workers."""

    def __init__(self, text: msgspec.Raw) -> None:
        self.text = text

    def matches(self, now: Action | None) -> bool:
        """Return whether an action would be recorded with the same bytes."""
        written = None if now is None else _with_ranges(now)
        return isinstance(written, msgspec.Raw) and bytes(written) == bytes(self.text)

    def expanded(self) -> Action:
        """Return the action with its members."""
        return _decoded_action(self.text)


class Snapshot(msgspec.Struct):
    """Complete state of a Membership after the preceding entry. See `elastic.driver.membership.snapshot`."""

    snapshot: msgspec.Raw
    at: float
    writer: Writer  # driver that wrote the snapshot


class Resumed(msgspec.Struct):
    resumed: Writer


class TroubleLine(msgspec.Struct):
    """Journal line about a problem outside the driver, for example with etcd. Ignored when a driver resumes."""

    trouble: Reason
    at: float


class RecordedEntry(msgspec.Struct):
    """Entry as it is read for a replay, which compares most actions without decoding them."""

    at: float
    event: Event
    actions: list[Action | RangedAction] = []
    error: str = ""
    digest: int | None = None
    more: bool = False


Line = Entry | Snapshot | Resumed | TroubleLine
Recorded = RecordedEntry | Snapshot | Resumed | TroubleLine


class _OtherLine(msgspec.Struct):
    """Any line of a journal after the header, except entries."""

    at: float = 0.0
    snapshot: msgspec.Raw = msgspec.Raw()
    writer: Writer = Writer()
    resumed: Writer | None = None
    trouble: Reason | None = None


class _Ranges(msgspec.Struct):
    """Ranges of an action. See the docstring of this module."""

    ranges: list[tuple[str, int, int, Annotated[int, msgspec.Meta(ge=1, le=MOST_SLOTS)]]] = []


_encoder = msgspec.json.Encoder()
_others = msgspec.json.Decoder(_OtherLine)
_EVENTS: Any = Union[tuple(Event.__subclasses__())]  # noqa: UP007
_ACTIONS: Any = Union[tuple(Action.__subclasses__())]  # noqa: UP007
_actions: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_ACTIONS)
_ranges = msgspec.json.Decoder(_Ranges)
_headers = msgspec.json.Decoder(Header)
# An entry, whose event is decoded in the same pass. Nearly all lines of a journal are entries.
_EntryLine: Any = msgspec.defstruct(
    "_EntryLine",
    [
        ("at", float),
        ("event", _EVENTS),
        ("actions", list[msgspec.Raw], []),
        ("error", str, ""),
        ("digest", int | None, None),
        ("more", bool, False),
    ],
)
_entry_lines: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_EntryLine)


def header_of(
    settings: Settings,
    *,
    job: str = "",
    command: Sequence[str] = (),
    folder: str = "",
    outlives: bool = False,
    writer: Writer | None = None,
    begins: StartCheckpoint | None = None,
) -> Header:
    """Return the header of a new job."""
    fields = asdict(settings)
    fields["env"] = dict.fromkeys(fields["env"], "")
    writer = writer or Writer()
    return Header(FORMAT, writer.date, fields, job, list(command), folder, outlives, writer, begins)


def readable(words: Sequence[str]) -> list[str]:
    """Return a command with all words printable.

    Arguments may contain bytes that are not valid text, which JSON cannot represent.
    """
    return [word.encode(errors="backslashreplace").decode() for word in words]


def encoded(line: Header | Line) -> bytes:
    """Encode one line of a journal, including its newline."""
    if isinstance(line, Entry) and line.actions:
        actions: list[Any] = [*map(_with_ranges, line.actions)]
        line = msgspec.structs.replace(line, actions=actions)
    return _encoder.encode(line) + b"\n"


def _with_ranges(action: Action) -> Action | msgspec.Raw:
    """Return an action as it is written: with ranges if it has many members, and unchanged otherwise."""
    members = _members_of(action)
    if len(members) < RANGES_FROM:
        return action
    if isinstance(action, events.PublishWorld):
        members = [member.worker for member in members]
    ranges: list[list[Any]] = []
    before, following = "", (0, 0)
    for worker in members:
        host, slot, incarnation = worker.host, worker.slot, worker.incarnation
        if host == before and (slot, incarnation) == following:
            ranges[-1][3] += 1
        else:
            ranges.append([host, slot, incarnation, 1])
        before, following = host, (slot + 1, incarnation)
    fields = _encoder.encode(msgspec.structs.replace(action, members=[]))
    return msgspec.Raw(fields[:-1] + b',"ranges":' + _encoder.encode(ranges) + b"}")


def _members_of(action: Action) -> list[Any]:
    """Return the members of an action, or an empty list if it has none."""
    members = getattr(action, "members", None)
    return members if isinstance(members, list) else []


def _with_members(action: Action, ranges: Sequence[tuple[str, int, int, int]]) -> Action:
    """Return an action with the members that its ranges describe."""
    workers = [
        Worker(host, slot, incarnation)
        for host, first, incarnation, count in ranges
        for slot in range(first, first + count)
    ]
    members: list[Any] = workers
    if isinstance(action, events.PublishWorld):
        members = [*map(events.Member, workers, rank_order.places(workers))]
    return msgspec.structs.replace(action, members=members)


def decoded_header(line: bytes) -> Header:
    """Decode the header of a journal.

    Raises:
        msgspec.MsgspecError: the line is not a valid header.
    """
    return _headers.decode(line)


def decoded(line: bytes) -> Line:
    """Decode a line of a journal after the header.

    Raises:
        msgspec.MsgspecError: the line is invalid.
    """
    found = decoded_for_replay(line)
    if not isinstance(found, RecordedEntry):
        return found
    actions = [a.expanded() if isinstance(a, RangedAction) else a for a in found.actions]
    return Entry(found.at, found.event, actions, found.error, found.digest, found.more)


def decoded_for_replay(line: bytes) -> Recorded:
    """Decode a line of a journal after the header, without expanding the ranges of actions.

    Raises:
        msgspec.MsgspecError: the line is invalid.
    """
    if line.startswith(ENTRY):
        parts = _entry_lines.decode(line)
        actions = [*map(_recorded_action, parts.actions)] if parts.actions else []
        return RecordedEntry(parts.at, parts.event, actions, parts.error, parts.digest, parts.more)
    other = _others.decode(line)
    if other.resumed is not None:
        return Resumed(other.resumed)
    if other.trouble is not None:
        return TroubleLine(other.trouble, other.at)
    if len(bytes(other.snapshot)):
        return Snapshot(other.snapshot, other.at, other.writer)
    raise msgspec.ValidationError("the line is neither an entry nor of another known kind")


def _recorded_action(text: msgspec.Raw) -> Action | RangedAction:
    if RANGES in bytes(text) and _ranges.decode(text).ranges:
        return RangedAction(text)
    action: Action = _actions.decode(text)
    return action


def _decoded_action(text: msgspec.Raw) -> Action:
    action: Action = _actions.decode(text)
    ranges = _ranges.decode(text).ranges
    return _with_members(action, ranges) if ranges else action


def entry_of(line: Mapping[str, Any]) -> Entry:
    """Convert a journal line, decoded as plain JSON, to an entry.

    Raises:
        msgspec.MsgspecError: the line is invalid.
    """
    actions = []
    for each in line.get("actions", ()):
        action = msgspec.convert(each, _ACTIONS)
        if ranges := msgspec.convert(each, _Ranges).ranges:
            action = _with_members(action, ranges)
        actions.append(action)
    return Entry(line.get("at", 0.0), msgspec.convert(line["event"], _EVENTS), actions)


def same(recorded: Action | RangedAction | None, now: Action | None) -> bool:
    """Return whether two drivers, possibly of different versions, made the same decision.

    The wording of log lines is ignored, and reasons are compared by their kinds.
    """
    if isinstance(recorded, RangedAction):
        if recorded.matches(now):
            return True
        recorded = recorded.expanded()
    if recorded is None or now is None:
        return recorded is now
    # Comparing encoded decisions takes seconds for a world of 100,000 workers.
    if recorded == now:
        return True
    return _encoder.encode(_decision(recorded)) == _encoder.encode(_decision(now))


def digest_of(actions: Sequence[Action]) -> int:
    """Return a checksum of actions, stored in journals that omit the actions.

    It shows whether another driver makes the same decisions.
    """
    return zlib.crc32(_encoder.encode([*map(_decision, actions)])) if actions else 0


def _decision(action: Action) -> dict[str, Any]:
    """Return an action as a dict, without the texts that are only for display."""
    fields: dict[str, Any]
    if members := _members_of(action):
        # The encoder writes the members as they are. Converting 100,000 of them first takes most of the time.
        fields = msgspec.to_builtins(msgspec.structs.replace(action, members=[]))
        fields["members"] = members
    else:
        fields = msgspec.to_builtins(action)
    if isinstance(action, events.Report):
        return {"type": fields["type"], "level": action.level}
    reason: Reason | None = getattr(action, "reason", None)
    return fields if reason is None else fields | {"reason": _kinds(reason)}


def _kinds(fact: object) -> Any:
    match fact:
        case Reason(kind, facts):
            causes = {name: found for name, each in facts.items() if (found := _kinds(each))}
            return [kind.value, causes] if causes else kind.value
        case [*_]:
            return [*filter(None, map(_kinds, fact))]
    return None


# ---- formatting ----------------------------------------------------------------------------------------------------


def readable_lines(entries: Sequence[Entry], *, since: float) -> Iterator[str]:
    """Yield readable lines for journal entries.

    Each event is preceded by the seconds since ``since`` and followed by its actions.
    """
    for entry in entries:
        yield f"{entry.at - since:+10.3f}  {describe(entry.event)}"
        for action in entry.actions:
            yield f"{'':12}-> {describe(action)}"
        if entry.error:
            yield f"{'':12}!! {entry.error}"


def describe_writer(writer: Writer) -> str:
    """Describe a change of the driver in one line."""
    where = f" at {writer.address}" if writer.address else ""
    return f"-- another driver resumes: term {writer.term}{where}, {writer.date}"


def describe(value: Any, *, limit: int = 160) -> str:
    """Describe an event, an action, or a value inside these, in one line."""
    if isinstance(value, (events.Event, events.Action)):
        fields = " ".join(
            f"{name}={describe(getattr(value, name))}"
            for name in value.__struct_fields__
            if getattr(value, name) not in ("", None) and name != "about"
        )
        return f"{type(value).__name__} {fields}".rstrip()
    if isinstance(value, events.ExitCause):
        return repr(value.value)
    if isinstance(value, Reason):
        return describe(str(value), limit=limit)
    if isinstance(value, RangedAction):
        return describe(value.expanded(), limit=limit)
    if isinstance(value, events.Member):
        return str(value.worker)
    if isinstance(value, list):
        shown = ", ".join(describe(each) for each in value[:8])
        return f"[{shown}{f', ... {len(value)} in all' if len(value) > 8 else ''}]"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value) if isinstance(value, Worker) or not isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
