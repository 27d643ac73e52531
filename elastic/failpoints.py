"""Named places in a worker where a test may make something go wrong. A tool for testing; where it is not used, a
place costs one look at a global.

    ELASTIC_FAILPOINTS="bucket kill rank=2 step=7; before-commit slow=0.5 slot=1"   rules, or
    ELASTIC_FAILPOINTS=@FILE                                                        a file that holds rules

A rule is a place, an action, and what must hold for it; rules are separated by ``;`` or by lines. A script may have
places of its own: ``failpoint("evaluation")``. Those inside the library: rendezvous (said ready, waits for a world),
bucket (about to send a gradient bucket), optimizer-step (gradients are averaged, parameters not changed yet), snapshot
(half of a commit is saved), state-copy (between the header and the tensors), cut (told that the world is over, its
collectives not ended yet), shutdown.

Actions: kill, term, stop, segv, exit=CODE, raise=TEXT, hold-gil=S, hold-gil-busy=S, shut, slow=S, disk-full,
out-of-memory, wait=FILE; see `elastic.chaos.in_process`.

Conditions: worker, other-than, host, slot, incarnation, rank, size, generation, step (see `set_step`), each with one or
several values as in ``rank=0,2``. ``hit=3``: the third time that the others hold. A rule strikes a process once.

A file is read again whenever it was replaced (write another one, then rename it). A rule in a file strikes as many
processes as ``victims=N`` says (1 by default), which wait for each other, so that they are struck at once; each leaves
a file ``FILE.ID.N`` behind that says who it was and when. ``id=`` gives the ID, by default the place.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic import environment
from elastic.errors import Invalid

ACTIONS = {
    "kill": False,  # action: whether it takes an argument
    "term": False,
    "stop": False,
    "segv": False,
    "exit": True,
    "raise": True,
    "hold-gil": True,
    "hold-gil-busy": True,
    "shut": False,
    "slow": True,
    "disk-full": False,
    "out-of-memory": False,
    "wait": True,
}
SECONDS = ("hold-gil", "hold-gil-busy", "slow")
CONDITIONS = (
    "worker",
    "other-than",
    "host",
    "slot",
    "incarnation",
    "rank",
    "size",
    "generation",
    "step",
)
COUNTS = ("hit", "victims")
FORM = "a rule is PLACE ACTION [KEY=VALUE ...], as in: bucket kill rank=2 step=7"


@dataclass(frozen=True)
class Rule:
    """What happens where, to whom. ``where``: condition -> allowed values."""

    place: str
    action: str
    argument: str
    where: tuple[tuple[str, tuple[str, ...]], ...]
    hit: int = 1
    victims: int = 1
    id: str = ""

    def means(self, facts: Mapping[str, str]) -> bool:
        """Whether all conditions hold."""
        for key, values in self.where:
            if key == "other-than":
                if facts.get("worker", "") in values:
                    return False
            elif facts.get(key, "") not in values:
                return False
        return True


def parse(text: str) -> list[Rule]:
    """The rules in a text. Raises Invalid with a sentence."""
    lines = text.replace("\n", ";").split(";")
    return [_rule(line) for line in lines if line.strip()]


def _rule(line: str) -> Rule:
    place, *words = line.split()
    if not words:
        raise Invalid(f"ELASTIC_FAILPOINTS: {line.strip()!r} names no action; {FORM}")
    action, _, argument = words[0].partition("=")
    if action not in ACTIONS:
        raise Invalid(
            f"ELASTIC_FAILPOINTS: there is no action {action!r} (in {line.strip()!r}); give one of"
            f" {', '.join(ACTIONS)}"
        )
    if ACTIONS[action] != bool(argument):
        form = f"{action}=..." if ACTIONS[action] else action
        raise Invalid(f"ELASTIC_FAILPOINTS: write {form} (in {line.strip()!r})")
    if action in SECONDS:
        _number(argument, action, line)
    if action == "exit":
        _whole(argument, action, line)
    where: dict[str, tuple[str, ...]] = {}
    counts = dict.fromkeys(COUNTS, 1)
    name = place
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not value or key not in (*CONDITIONS, *COUNTS, "id"):
            raise Invalid(
                f"ELASTIC_FAILPOINTS: {word!r} is no condition (in {line.strip()!r}); give"
                f" {', '.join((*CONDITIONS, *COUNTS, 'id'))} with a value, as in rank=2"
            )
        if key in COUNTS:
            counts[key] = _whole(value, key, line)
        elif key == "id":
            name = value
        else:
            where[key] = tuple(value.split(","))
    return Rule(
        place, action, argument, tuple(where.items()), counts["hit"], counts["victims"], name
    )


def _whole(text: str, key: str, line: str) -> int:
    if not text.isdecimal():
        raise Invalid(f"ELASTIC_FAILPOINTS: {key}={text} is no whole number (in {line.strip()!r})")
    return int(text)


def _number(text: str, key: str, line: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise Invalid(
            f"ELASTIC_FAILPOINTS: {key}={text} is no number of seconds (in {line.strip()!r})"
        )
    return seconds


# ---- one per process -----------------------------------------------------------------------------

_text = environment.failpoints()
_lock = threading.Lock()
_rules: list[Rule] = []
_read: object = None  # what the rules were read from; None: nothing yet
_met: dict[Rule, int] = {}
_step = ""


def failpoint(place: str) -> None:
    """A place where something may go wrong, if ELASTIC_FAILPOINTS says so."""
    if _text:
        _reached(place)


def check() -> None:
    """Raises Invalid if ELASTIC_FAILPOINTS can't be read as rules. ``init()`` calls it."""
    if _text:
        with _lock:
            _load()


def set_step(step: int) -> None:
    """Says which step is trained now, for conditions like ``step=7``."""
    global _step
    _step = str(step)


def _reached(place: str) -> None:
    with _lock:
        _load()
        struck = None
        facts: dict[str, str] | None = None
        for rule in _rules:
            if rule.place != place:
                continue
            facts = _facts() if facts is None else facts
            if not rule.means(facts):
                continue
            _met[rule] = _met.get(rule, 0) + 1
            if _met[rule] == rule.hit:
                struck = rule
                break
    if struck is not None and facts is not None:
        from elastic.chaos import in_process

        file = Path(_text[1:]) if _text.startswith("@") else None
        in_process.strike(struck, facts, file)


def _load() -> None:
    global _rules, _read
    if not _text.startswith("@"):
        if _read is None:
            _rules, _read = parse(_text), _text
        return
    try:
        status = os.stat(_text[1:])
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != _read:
            _rules, _read = parse(Path(_text[1:]).read_text()), seen
            _met.clear()
    except OSError as error:
        raise Invalid(
            f"ELASTIC_FAILPOINTS is {_text!r}, which cannot be read: {error.strerror};"
            " make the file before the job starts"
        ) from error


def _facts() -> dict[str, str]:
    worker = environment.worker()
    facts = {
        "worker": str(worker),
        "host": worker.host,
        "slot": str(worker.slot),
        "incarnation": str(worker.incarnation),
        "step": _step,
    }
    # Not imported from here: a script's own places may come before torch is.
    runtime = sys.modules.get("elastic.runtime")
    active = runtime.active() if runtime is not None else None
    if active is not None:
        facts |= {
            "rank": str(active.place.rank),
            "size": str(active.place.size),
            "generation": str(active.generation),
        }
    return facts
