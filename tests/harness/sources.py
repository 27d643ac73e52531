"""Facts about the files of this repository: each is parsed once for all tests."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

from harness.prose import text_of

ROOT = Path(__file__).parents[2]
INSTALLED = ("elastic", "driver", "chaos", "horovod")  # folders of the wheel
SELF = ("self", "cls", "super()")


class Use(NamedTuple):
    """Use of a private attribute that the file itself does not define."""

    line: int
    name: str
    of_self: bool
    text: str


class Facts(NamedTuple):
    """Facts about one file. Trees are not kept: they need half a gigabyte."""

    docstring: str
    imported: list[tuple[str, int]]  # every module's full name anywhere in the file, and the line
    classes: list[tuple[str, int, int]]  # name, line, and number of own methods
    functions: set[str]  # their names, also those of methods
    names: set[str]  # of variables that are read or written
    # defined names of functions, classes, variables, and attributes of its own objects
    given: set[str]
    uses: list[Use]
    of_torch: list[tuple[str, int, set[str]]]  # called functions, the line, and keywords
    # strings that may be shown, without docstrings; {} for an expression in one, whose parts are in the list, too
    texts: list[str]


def sources(*folders: str) -> list[Path]:
    """Iterate over every Python file in the folders. The links elastic/driver and elastic/chaos aren't followed."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@functools.cache
def facts(file: Path) -> Facts:
    return facts_of(file.read_text())


def facts_of(source: str) -> Facts:
    tree = ast.parse(source)
    found = Facts(ast.get_docstring(tree) or "", [], [], set(), set(), set(), [], [], [])
    private = []
    statements = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            statements.add(node.value)  # it is visited later
        elif isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and node not in statements:
            found.texts.append(text_of(node))
        match node:
            case ast.Name(id=name, ctx=context):
                found.names.add(name)
                if isinstance(context, ast.Store):
                    found.given.add(name)
            case ast.Attribute(value=value, attr=name):
                match value, node.ctx:
                    case ast.Name(id="self" | "cls"), ast.Store():
                        found.given.add(name)
                if name[0] == "_" and name[:2] != "__":
                    private.append(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.given.add(name)
                found.functions.add(name)
            case ast.ClassDef(name=name):
                found.given.add(name)
                kinds = ast.FunctionDef | ast.AsyncFunctionDef
                methods = sum(isinstance(each, kinds) for each in node.body)
                found.classes.append((name, node.lineno, methods))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                keywords = {each.arg for each in node.keywords if each.arg}
                found.of_torch.append((name, node.lineno, keywords))
            case ast.Import(names=names):
                found.imported.extend((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found.imported.append((module, node.lineno))
                found.imported.extend((f"{module}.{alias.name}", node.lineno) for alias in names)
    found.uses.extend(
        Use(node.lineno, node.attr, ast.unparse(node.value) in SELF, ast.unparse(node))
        for node in private
        if node.attr not in found.given
    )
    return found
