"""Reads reasons where an older version of this program wrote sentences: journals and snapshots have them. Pure.

Its text is foreign, and there is nothing else to go by. The kind is found where somebody asks for it; the sentence
stays, so that what is decided now can be compared with it. Nothing here follows a change of today's sentences.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from elastic.driver.reasons import Fact, Reason, Why, because

_SENTENCES = [
    (Why.FROZEN, re.compile(r"it is frozen")),
    (Why.CUT_OFF, re.compile(r"it is cut off")),
    (Why.IDLE, re.compile(r"it is stuck: idle")),
    (Why.BUSY, re.compile(r"it is stuck: busy")),
    (Why.GPU_FAILED, re.compile(r"its GPU failed")),
    (Why.GPU_BEHIND, re.compile(r"its GPU hangs: it is not at the end")),
    (Why.GPU_HANGS, re.compile(r"its GPU hangs")),
    (Why.OTHER_DIGEST, re.compile(r"its parameters differ")),
    (Why.NO_INIT, re.compile(r"it did not call init\(\)")),
    (Why.CONNECTION_LOST, re.compile(r"its connection was lost$")),
    (Why.NOT_BACK, re.compile(r"it did not come back to the restarted driver$")),
    (Why.CANT_BE_KILLED, re.compile(r"(?P<worker>\S+) can't be killed within")),
    (
        Why.ALL_RETURNED,
        re.compile(r"all (?P<members>\d+) members? of generation (?P<generation>\d+) returned$"),
    ),
    (Why.ALL_EXITED, re.compile(r"(?P<workers>\d+) workers? ended with exit code 0$")),
    (Why.ALL_LOST, re.compile(r"all \d+ members? of .* nobody is left to go on from", re.DOTALL)),
    (Why.NO_COMMIT, re.compile(r"no survivor holds a commit")),
]
_AND_MORE = re.compile(r"; and \d+ more$")
_COMMIT_ID = re.compile(r"\bg(\d+)c(\d+)\b")
_BRIEF = re.compile(r": | \(")
_REASON = b'"reason":"'
_REPORT = b'{"type":"Report",'


def read(sentence: str) -> Reason:
    """The reason, as far as the sentence tells it."""
    facts: dict[str, Fact] = {"brief": _BRIEF.split(sentence, maxsplit=1)[0]}
    for kind, expression in _SENTENCES:
        if found := expression.match(sentence):
            named = found.groupdict().items()
            facts |= {name: int(fact) if fact.isdigit() else fact for name, fact in named}
            return Reason(kind, facts, sentence)
    return Reason(Why.UNKNOWN, facts, sentence)


def read_several(sentence: str, more: int) -> Reason:
    """Of a gathering: one reason for each that was lost, and ``more`` that are not named."""
    causes = _AND_MORE.sub("", sentence).split("; ")
    if len(causes) == 1 and not more:
        return read(sentence)
    return because(Why.SEVERAL, causes=[*map(read, causes)], more=more)


def read_ready(sentence: str) -> tuple[int, int] | None:
    """``2 ready, 3 needed``."""
    found = re.fullmatch(r"(\d+) ready, (\d+) needed", sentence)
    return (int(found[1]), int(found[2])) if found else None


def out_of_memory(exit_reason: str) -> bool:
    """Whether the kernel killed a worker for want of memory, where ``WorkerExited`` says that in words only."""
    return ": out of memory" in exit_reason


def renewed(action: bytes) -> bytes:
    """An action of a journal, as JSON, as this version would have written it."""
    if _REASON not in action and not (action.startswith(_REPORT) and b'"about":' not in action):
        return action
    fields: dict[str, Any] = msgspec.json.decode(action)
    if "reason" in fields:
        fields["reason"] = read(fields["reason"])
    elif (about := read(fields["text"])).kind is Why.CANT_BE_KILLED:
        fields["about"] = about
    return msgspec.json.encode(fields)


def as_then(action: msgspec.Struct) -> dict[str, Any]:
    """The other way round: an action, as JSON would have had it while reasons were sentences."""
    fields: dict[str, Any] = msgspec.to_builtins(dotted(action))
    fields.pop("about", None)
    reason: Reason | None = getattr(action, "reason", None)
    return fields if reason is None else fields | {"reason": _dotted(str(reason))}


def dotted(action: msgspec.Struct) -> msgspec.Struct:
    """An action with the ids of commits in its line as they were shown before: ``2.300`` for ``g2c300``."""
    text = getattr(action, "text", None)
    if not isinstance(text, str) or (before := _dotted(text)) == text:
        return action
    return msgspec.structs.replace(action, text=before)


def _dotted(text: str) -> str:
    return _COMMIT_ID.sub(r"\1.\2", text)


def is_of_then(action: msgspec.Struct) -> bool:
    """Whether it was read from sentences."""
    reason: Reason | None = getattr(action, "reason", None)
    return reason is not None and bool(reason.said)
