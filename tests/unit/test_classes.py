"""No object knows everything: how large a class may be, and that nobody uses the private names of another's objects."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from unit.test_layers import ROOT, sources

METHODS = 30  # of a class, properties and what has underscores among them
# Public names of an optimizer or a state are torch's and the user's: what inherits from ours shares private ones.
SPREAD = (
    "elastic/optimizer/adasum_optimizer.py",
    "elastic/state/handled_state.py",
    "driver/commandline/arguments.py",  # of argparse
    "elastic/mxnet/optimizer.py",  # of Gluon's trainer
    "elastic/integrations/",  # of trainers, whose loops are private
)
SELF = ("self", "cls", "super()")
FOREIGN = (torch.Tensor, torch.nn.Module(), os)  # have private names that others may use


Names = set[str]


class Use(NamedTuple):
    """Of a private attribute that the file itself does not give."""

    line: int
    name: str
    of_self: bool
    text: str


class Facts(NamedTuple):
    """Of one file: its classes with how many methods each has of its own, and the names that it gives to functions,
    classes and variables, and to the attributes of its own objects. Trees are not kept: they are half a gigabyte.
    """

    methods: list[tuple[str, int]]
    given: Names
    uses: list[Use]


@functools.cache
def facts() -> dict[Path, Facts]:
    files = sources("elastic", "driver", "chaos", "horovod")
    return {file: facts_of(file.read_text()) for file in files}


def facts_of(source: str) -> Facts:
    methods, given, private = [], set(), []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                given.add(name)
            case ast.ClassDef(name=name):
                given.add(name)
                kinds = ast.FunctionDef | ast.AsyncFunctionDef
                methods.append((name, sum(isinstance(each, kinds) for each in node.body)))
            case ast.Name(id=name, ctx=ast.Store()):
                given.add(name)
            case ast.Attribute(value=value, attr=name):
                match value, node.ctx:
                    case ast.Name(id="self" | "cls"), ast.Store():
                        given.add(name)
                if name[0] == "_" and name[:2] != "__":
                    private.append(node)
    uses = [
        Use(node.lineno, node.attr, ast.unparse(node.value) in SELF, ast.unparse(node))
        for node in private
        if node.attr not in given
    ]
    return Facts(methods, given, uses)


def reaches(uses: list[Use], names: Names) -> list[str]:
    """Uses of private ``names`` on what is another file's object."""
    return [
        f"line {use.line}: {use.text}"
        for use in uses
        if not use.of_self and use.name in names and not any(hasattr(f, use.name) for f in FOREIGN)
    ]


def test_no_class_does_everything():
    sizes = [each for found in facts().values() for each in found.methods]
    assert max(count for _, count in sizes) > 20, "methods are counted"
    large = {name: count for name, count in sizes if count > METHODS}
    assert not large


def test_nobody_uses_private_names_of_another_files_objects():
    names = set().union(*(each.given for each in facts().values()))
    found = {str(f): lines for f, each in facts().items() if (lines := reaches(each.uses, names))}
    assert not found


def test_a_class_has_its_private_names_to_itself():
    """One that inherits from another file's uses what is public there."""
    found = {
        f"{file}:{use.line}: {use.text}"
        for file, each in facts().items()
        if not str(file.relative_to(ROOT)).startswith(SPREAD)
        for use in each.uses
        if use.of_self
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("line", "heard"),
    [
        ("runtime._link.poke()", ["line 1: runtime._link"]),
        ("self.session._link.poke()", ["line 1: self.session._link"]),
        ("self._link.poke()", []),
        ("class A:\n  def f(self, other):\n    self._link = other._link", []),  # of its own kind
        ("tensor._version", []),
    ],
)
def test_what_is_taken_for_another_files_object(line, heard):
    assert reaches(facts_of(line).uses, {"_link", "_version"}) == heard
