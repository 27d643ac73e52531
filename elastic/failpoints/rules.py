"""Rules of failpoints: action, place and conditions. Pure. See the package for the grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.errors import Invalid

ACTIONS = {
    "kill": False,  # names of the actions, and whether each takes an argument
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
    "flip": True,
}
FLIPPED = ("weights", "moments", "gradients", "gradient", "product")
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
COUNTS = ("hit", "victims", "every")
FORM = "a rule is PLACE ACTION [KEY=VALUE ...], as in: bucket kill rank=2 step=7"


@dataclass(frozen=True)
class Rule:
    """Rule that injects a fault at a place if its conditions hold.

    Args:
        where: allowed values by condition.
        every: number of matches after which the rule takes effect again. 0 means that it takes effect only once.
    """

    place: str
    action: str
    argument: str
    where: tuple[tuple[str, tuple[str, ...]], ...]
    hit: int = 1
    victims: int = 1
    id: str = ""
    every: int = 0

    def due(self, met: int) -> bool:
        """Return whether the rule takes effect the ``met``-th time that its conditions hold."""
        again = self.every > 0 and met > self.hit and (met - self.hit) % self.every == 0
        return met == self.hit or again

    def means(self, facts: Mapping[str, str]) -> bool:
        """Return whether all conditions of the rule hold."""
        for key, values in self.where:
            if key == "other-than":
                if facts.get("worker", "") in values:
                    return False
            elif facts.get(key, "") not in values:
                return False
        return True


def parse(text: str) -> list[Rule]:
    """Parse rules, which are separated by ``;`` or line breaks. Raises Invalid if a rule is malformed."""
    lines = text.replace("\n", ";").split(";")
    return [_rule(line) for line in lines if line.strip()]


def _rule(line: str) -> Rule:
    place, *words = line.split()
    if not words:
        raise Invalid(f"ELASTIC_FAILPOINTS: rule {line.strip()!r} has no action; {FORM}")
    action, _, argument = words[0].partition("=")
    if action not in ACTIONS:
        raise Invalid(
            f"ELASTIC_FAILPOINTS: rule {line.strip()!r} has the unknown action {action!r}; choose from"
            f" {', '.join(ACTIONS)}"
        )
    if ACTIONS[action] != bool(argument):
        form = f"{action}=..." if ACTIONS[action] else action
        raise Invalid(f"ELASTIC_FAILPOINTS: rule {line.strip()!r} is invalid; write {form}")
    if action in SECONDS:
        _number(argument, action, line)
    if action == "exit":
        _whole(argument, action, line)
    if action == "flip":
        what, _, seed = argument.partition(":")
        if what not in FLIPPED or not seed.isdecimal():
            raise Invalid(
                f"ELASTIC_FAILPOINTS: rule {line.strip()!r} is invalid; write flip=WHAT:SEED with WHAT from"
                f" {', '.join(FLIPPED)} and a whole number as SEED"
            )
    where: dict[str, tuple[str, ...]] = {}
    counts = {"hit": 1, "victims": 1, "every": 0}
    name = place
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not value or key not in (*CONDITIONS, *COUNTS, "id"):
            raise Invalid(
                f"ELASTIC_FAILPOINTS: rule {line.strip()!r} has the unknown condition {word!r}; use"
                f" {', '.join((*CONDITIONS, *COUNTS, 'id'))} with a value, as in rank=2"
            )
        if key in COUNTS:
            counts[key] = _whole(value, key, line)
        elif key == "id":
            name = value
        else:
            where[key] = tuple(value.split(","))
    return Rule(
        place,
        action,
        argument,
        tuple(where.items()),
        counts["hit"],
        counts["victims"],
        name,
        counts["every"],
    )


def _whole(text: str, key: str, line: str) -> int:
    if not text.isdecimal():
        raise Invalid(
            f"ELASTIC_FAILPOINTS: rule {line.strip()!r} has {key}={text}: pass a whole number"
        )
    return int(text)


def _number(text: str, key: str, line: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise Invalid(
            f"ELASTIC_FAILPOINTS: rule {line.strip()!r} has {key}={text}: pass a number of seconds"
        )
    return seconds
