"""No object knows everything: how large a class may be, and that nobody uses the private names of another's objects."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

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
FOREIGN = (torch.Tensor, torch.nn.Module(), os)  # have private names that others may use


@functools.cache
def trees() -> dict[Path, ast.Module]:
    files = sources("elastic", "driver", "chaos", "horovod")
    return {file: ast.parse(file.read_text()) for file in files}


@pytest.fixture(scope="module", autouse=True)
def forgets_the_trees() -> Iterator[None]:
    """Half a gigabyte, through which the collector would go for each test that comes after."""
    yield
    for kept in (trees, made, private):
        kept.cache_clear()


def methods(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Each class, and how many methods it has of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            kinds = ast.FunctionDef | ast.AsyncFunctionDef
            yield node.name, sum(isinstance(each, kinds) for each in node.body)


@functools.cache
def made(tree: ast.Module) -> set[str]:
    """The names that a file gives: to functions, classes and variables, and to the attributes of its own objects."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


@functools.cache
def private(tree: ast.Module) -> list[tuple[ast.Attribute, bool]]:
    """Each use of a private attribute that the file itself does not give, and whether it is one of ``self``."""
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = [node for node in used if node.attr[0] == "_" and node.attr[:2] != "__"]
    given = made(tree) if used else set()
    return [
        (node, ast.unparse(node.value) in ("self", "cls", "super()"))
        for node in used
        if node.attr not in given
    ]


def reaches(tree: ast.Module, names: set[str]) -> list[str]:
    """Uses of private ``names`` on what is another file's object."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node, own in private(tree)
        if not own and node.attr in names and not any(hasattr(each, node.attr) for each in FOREIGN)
    ]


def test_no_class_does_everything():
    sizes = [(name, count) for tree in trees().values() for name, count in methods(tree)]
    assert max(count for _, count in sizes) > 20, "methods are counted"
    large = {name: count for name, count in sizes if count > METHODS}
    assert not large


def test_nobody_uses_private_names_of_another_files_objects():
    names = set().union(*(made(tree) for tree in trees().values()))
    found = {str(file): lines for file, tree in trees().items() if (lines := reaches(tree, names))}
    assert not found


def test_a_class_has_its_private_names_to_itself():
    """One that inherits from another file's uses what is public there."""
    found = {
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in trees().items()
        if not str(file.relative_to(ROOT)).startswith(SPREAD)
        for node, own in private(tree)
        if own
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
    assert reaches(ast.parse(line), {"_link", "_version"}) == heard
