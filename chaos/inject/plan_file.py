"""Parse a plan of faults from TOML text. Error messages are one sentence with the line number. Pure: no I/O, no clock.

Example::

    [random]                        # drawn, at exponentially distributed intervals
    mean_time_between_faults_s = 30
    faults = ["kill", "freeze"]

    [[fault]]                       # exactly this one
    at_s = 12                       # after training began; or after_commits = 100, or at_generation = 3
    kind = "freeze"
    victim = "rank 0"
    for_s = 8
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elastic.chaos.inject import plan
from elastic.errors import Invalid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOR_S = 5.0  # default duration of a planned fault, in seconds
FACTOR_MAX = 100.0
WHOLE_MAX = 2**63 - 1  # largest integer that every TOML parser supports
MOMENTS = ("at_s", "after_commits", "at_generation")
VICTIMS = (
    '"random", "rank N", "newest", "oldest", "worker HOST:SLOT", "host NAME", "all but one", "all"'
)
_NUMBER = "[0-9]{1,6}"  # not \d, which would also match non-ASCII digits
_VICTIM = re.compile(
    rf"random|newest|oldest|all but one|all|rank {_NUMBER}|worker \S+:{_NUMBER}|host \S+"
)


def read_plan(text: str, name: str) -> plan.Plan:
    """Parse a plan from TOML text. Raises Invalid with the line number of the first error."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"{name} is not valid TOML: {error}. Correct the line") from None
    # Raised for a number with thousands of digits, or for deeply nested brackets.
    except (ValueError, RecursionError):
        raise Invalid(
            f"{name} is nested too deeply, or contains a number with too many digits: write one level of tables, and"
            " numbers of at most 4300 digits"
        ) from None
    for key in tables:
        if key not in ("random", "fault"):
            where = _Where(text, name, key, 0)
            where.fail("", f"unknown section {key!r}: pass [random] or [[fault]]")
    faults, chance = tables.get("fault", []), tables.get("random")
    if not isinstance(faults, list) or not all(isinstance(each, dict) for each in faults):
        _Where(text, name, "fault", 0).fail("", "write [[fault]], in double brackets")
    if chance is not None and not isinstance(chance, dict):
        _Where(text, name, "random", 0).fail("random", "write [random], followed by its keys")
    if not faults and not chance:
        raise Invalid(f"{name} contains no faults: add a [random] section or a [[fault]] entry")
    return plan.Plan(
        tuple(_fault(each, _Where(text, name, "fault", n)) for n, each in enumerate(faults)),
        None if chance is None else _chance(chance, _Where(text, name, "random", 0)),
    )


def _fault(table: dict[str, Any], where: _Where) -> plan.Fault:
    where.known(table, ("kind", "victim", "for_s", "factor", *MOMENTS))
    kind = where.kind("kind", table.get("kind"))
    victim = table.get("victim", "random")
    if not isinstance(victim, str) or not _VICTIM.fullmatch(victim):
        where.fail("victim", f"{victim!r} is not a victim: pass one of {VICTIMS}")
    given = [key for key in MOMENTS if key in table]
    if len(given) != 1:
        problem = f"has {' and '.join(given)}" if given else "has no time"
        where.fail(
            given[1] if given else "", f"the fault {problem}: pass one of {', '.join(MOMENTS)}"
        )
    fault = plan.Fault(
        kind,
        victim,
        at_s=where.number("at_s", table["at_s"], 0.0) if "at_s" in table else None,
        after_commits=where.whole("after_commits", table.get("after_commits")),
        at_generation=where.whole("at_generation", table.get("at_generation")),
    )
    if "for_s" in table and kind not in plan.LASTING:
        where.fail("for_s", f"for_s does not apply to a {kind}, which has no duration: omit it")
    if "factor" in table and kind != "slow":
        where.fail("factor", f"factor does not apply to a {kind}: omit it, or pass kind = 'slow'")
    if kind in plan.LASTING:
        fault = replace(fault, for_s=where.positive("for_s", table.get("for_s", FOR_S)))
    if kind == "slow":
        fault = replace(fault, factor=where.factor(table.get("factor", plan.FACTOR)))
    return fault


def _chance(table: dict[str, Any], where: _Where) -> plan.Chance:
    keys = (
        "mean_time_between_faults_s",
        "faults",
        "seed",
        "duration_s",
        "for_s",
        "factor",
        "spare",
    )
    where.known(table, keys)
    if keys[0] not in table:
        where.fail("", f"[random] needs {keys[0]}")
    mean = where.positive(keys[0], table[keys[0]])
    if mean < plan.MEAN_LEAST_S:
        where.fail(keys[0], f"{keys[0]} is {mean:g}: pass at least {plan.MEAN_LEAST_S:g}")
    kinds = table.get("faults", ["kill", "freeze"])
    if not isinstance(kinds, list) or not kinds:
        where.fail("faults", f'faults is {kinds!r}: pass a list, as in ["kill", "freeze"]')
    span = table.get("for_s")
    if span is not None:
        if not isinstance(span, list) or len(span) != 2:
            where.fail(
                "for_s", f"for_s is {span!r}: pass the shortest and the longest, as in [1, 8]"
            )
        low, high = (where.positive("for_s", each) for each in span)
        if low > high:
            where.fail("for_s", f"for_s is {span!r}: pass the shortest first")
    spare = table.get("spare", [])
    if not isinstance(spare, list) or not all(
        isinstance(each, str) and re.fullmatch(r"\S+:\d+", each) for each in spare
    ):
        where.fail("spare", f'spare is {spare!r}: pass a list of slots, as in ["localhost:0"]')
    duration = table.get("duration_s")
    return plan.Chance(
        mean,
        tuple(where.kind("faults", each) for each in kinds),
        where.whole("seed", table.get("seed"), least=0),
        None if duration is None else where.positive("duration_s", duration),
        None if span is None else (low, high),
        where.factor(table.get("factor", plan.FACTOR)),
        tuple(spare),
    )


class _Where:
    """Location of a table in a TOML text. Finds the line number of a key for error messages."""

    def __init__(self, text: str, name: str, table: str, index: int) -> None:
        self._lines = text.splitlines()
        self._name, self._table, self._index = name, table, index

    def fail(self, key: str, sentence: str) -> None:
        raise Invalid(f"{self._name}, line {self._line(key)}: {sentence}")

    def known(self, table: dict[str, Any], keys: Sequence[str]) -> None:
        for key in table:
            if key not in keys:
                self.fail(key, f"unknown key {key!r}: pass one of {', '.join(keys)}")

    def kind(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in plan.KINDS:
            problem = (
                "the fault has no kind" if value is None else f"{value!r} is not a kind of fault"
            )
            self.fail(key, f"{problem}: pass one of {', '.join(plan.KINDS)}")
        return str(value)

    def number(self, key: str, value: Any, least: float) -> float:
        return self._number(key, value, f"of {least:g} or more", least, plan.SECONDS_MAX)

    def positive(self, key: str, value: Any) -> float:
        number = self._number(key, value, "above 0", 0.0, plan.SECONDS_MAX)
        if number == 0:
            self.fail(key, f"{key} is 0: pass a number above 0")
        return number

    def factor(self, value: Any) -> float:
        number = self._number("factor", value, "above 1", 1.0, FACTOR_MAX)
        if number == 1:
            self.fail("factor", "factor is 1: pass a number above 1")
        return number

    def _number(self, key: str, value: Any, which: str, least: float, most: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            self.fail(key, f"{key} is {value!r}: pass a number {which}")
        if value == math.inf:
            self.fail(key, f"{key} is {value!r}: pass a finite number")
        if value > most:
            # The message does not contain the number, because the number may have thousands of digits.
            self.fail(key, f"{key} is too large: pass at most {most:.0f}")
        return float(value)

    def whole(self, key: str, value: Any, *, least: int = 1) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(key, f"{key} is {value!r}: pass a whole number, {least} or more")
        if value > WHOLE_MAX:
            self.fail(key, f"{key} is too large: pass at most {WHOLE_MAX}")
        return int(value)

    def _line(self, key: str) -> int:
        table, head, seen = "", 1, -1
        for number, line in enumerate(self._lines, start=1):
            match = re.match(r"\s*\[+\s*([\w-]+)", line)
            if match:
                table = match[1]
                seen += table == self._table
                if table == self._table and seen == self._index:
                    head = number
            here = table == self._table and seen == self._index
            if key and here and re.match(rf"\s*['\"]?{re.escape(key)}['\"]?\s*=", line):
                return number
            if not table and re.match(rf"\s*{re.escape(self._table)}\s*=", line):
                return number
        return head
