"""Comparison of signatures with those of a reference, one per line."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
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
    """Return the path, and each argument with its default."""
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
    _check(path, wanted, ours)


def compare_source(reference: str, sources: Iterable[Path]) -> None:
    """The same of a function or class that one of the files defines, whose imports may not be installed here.

    A class takes what its ``__init__`` takes, without ``self``.
    """
    path, wanted = split(reference)
    found = [each for source in sources for each in _defined(ast.parse(source.read_text()), path)]
    assert len(found) == 1, f"{path} is defined {len(found)} times"
    _check(path, wanted, found[0])


def _check(path: str, wanted: list[tuple[str, str]], ours: list[tuple[str, str]]) -> None:
    last = len([name for name, _ in wanted if not name.startswith("**")])
    assert [name for name, _ in ours[:last]] == [name for name, _ in wanted[:last]], path
    assert {name for name, _ in wanted[last:]} <= {name for name, _ in ours}, path
    for (name, default), (_, its) in zip(ours, wanted[:last], strict=False):
        # A required argument may have a default here.
        assert default == its or not its, f"{path}: {name} is {default!r}, and was {its}"
    for name, default in ours[last:]:
        assert default or name.startswith("*"), f"{path}: {name} is ours, and has no default"


def _defined(module: ast.Module, path: str) -> Iterator[list[tuple[str, str]]]:
    """Return the arguments of ``NAME`` or ``CLASS.NAME`` in a module; none if it does not exist."""
    first, _, method = path.partition(".")
    for node in module.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name != first:
            continue
        if isinstance(node, ast.FunctionDef):
            yield _arguments(node)
            continue
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == (method or "__init__"):
                yield _arguments(each)[not method :]


def _arguments(node: ast.FunctionDef) -> list[tuple[str, str]]:
    given, named = node.args.posonlyargs + node.args.args, node.args.kwonlyargs
    defaults = [None] * (len(given) - len(node.args.defaults)) + node.args.defaults
    both = [*zip(given, defaults, strict=True), *zip(named, node.args.kw_defaults, strict=True)]
    found = [(each.arg, _shown(default)) for each, default in both]
    if node.args.vararg is not None:
        found.insert(len(given), (f"*{node.args.vararg.arg}", ""))
    if node.args.kwarg is not None:
        found.append((f"**{node.args.kwarg.arg}", ""))
    return found


def _shown(default: ast.expr | None) -> str:
    text = "" if default is None else ast.unparse(default)
    return {"Compression.none": "none", "global_process_set": "everybody"}.get(text, text)
