"""Parsing of ``--islands``, which groups hosts into islands. The hosts of an island average gradients in every step.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import fnmatch
import re
from typing import NamedTuple

from elastic.errors import Invalid

HOST = "host"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class IslandRule(NamedTuple):
    """Name of an island, and the hosts that belong to it."""

    name: str
    hosts: tuple[str, ...]  # host names, or shell patterns such as eu-*


def parse_islands(text: str) -> tuple[IslandRule, ...]:
    """Parse the value of ``--islands``: ``host``, or rules such as ``eu=eu-*,gpu7;us=us-*``.

    Returns:
        The rules in the given order. Empty for ``host``, with which each host is an island.

    Raises:
        Invalid: the text is malformed, or gives a name or a host twice.
    """
    if text.strip() in ("", HOST):
        return ()
    rules: list[IslandRule] = []
    for part in text.split(";"):
        name, equals, listed = (each.strip() for each in part.partition("="))
        hosts = tuple(each.strip() for each in listed.split(","))
        if not (equals and _NAME.fullmatch(name) and all(hosts)):
            raise Invalid(
                f"islands {text!r}: {part.strip()!r} is not a rule: pass {HOST}, or NAME=HOST,HOST;NAME=HOST with"
                " shell patterns in place of hosts, as in eu=eu-*;us=us-*"
            )
        rules.append(IslandRule(name, hosts))
    for what, found in (
        ("island", [rule.name for rule in rules]),
        ("host", [host for rule in rules for host in rule.hosts]),
    ):
        twice = next((each for each in found if found.count(each) > 1), None)
        if twice is not None:
            raise Invalid(f"islands {text!r}: {what} {twice!r} is given twice: list it once")
    return tuple(rules)


def island_of(host: str, rules: tuple[IslandRule, ...]) -> str:
    """Return the name of a host's island. The first matching rule applies; a host without one is its own island.

    The name of an island without a rule contains a space, so it differs from all names in rules.
    """
    for rule in rules:
        if any(fnmatch.fnmatchcase(host, pattern) for pattern in rule.hosts):
            return rule.name
    return f"{HOST} {host}"
