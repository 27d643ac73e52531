"""Compares signatures with those of a reference, a line each."""

from __future__ import annotations

import inspect
from pkgutil import resolve_name
from typing import Any

from elastic.api.compression import NoneCompressor
from elastic.api.ops import Average
from elastic.negotiation.process_sets import global_process_set

EMPTY = inspect.Parameter.empty
STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}


def shown(name: str, default: Any) -> str:
    """A default, as in the reference; empty if there is none."""
    if default is EMPTY:
        return ""
    if default is NoneCompressor:
        return "none"
    if default is global_process_set:
        return "everybody"
    if name == "op" and default == Average:
        return "Average"
    return repr(default)


def split(reference: str) -> tuple[str, list[tuple[str, str]]]:
    """The path, and each argument with its default."""
    path, _, text = reference.removesuffix(")").partition("(")
    arguments = [argument.strip().partition("=") for argument in text.split(",")]
    return path, [(name, default) for name, _, default in arguments if name]


def compare(reference: str) -> None:
    """Raises AssertionError where what a line names takes other arguments, in another order or with other defaults.
    What comes after them is ours, and has to have a default.
    """
    path, wanted = split(reference)
    parameters = [*inspect.signature(resolve_name(path)).parameters.values()]
    ours = [(STARS.get(p.kind.name, "") + p.name, shown(p.name, p.default)) for p in parameters]
    last = len([name for name, _ in wanted if not name.startswith("**")])
    assert [name for name, _ in ours[:last]] == [name for name, _ in wanted[:last]], path
    assert {name for name, _ in wanted[last:]} <= {name for name, _ in ours}, path
    for (name, default), (_, its) in zip(ours, wanted[:last], strict=False):
        # One that was required may have a default.
        assert default == its or not its, f"{path}: {name} is {default!r}, and was {its}"
    for parameter in parameters[last:]:
        optional = parameter.default is not EMPTY or parameter.kind.name in STARS
        assert optional, f"{path}: {parameter.name} is ours, and has no default"
