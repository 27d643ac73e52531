"""Counts the comparisons with prose in tests: `python -m harness.prose`, with `--list` for each of them.

Wording may change freely, so tests compare types, kinds and fields; the text of each surface is in
`tests/golden`. A comparison with prose is one with a string of two or more words of English: `match=` of
`pytest.raises` and `pytest.warns`, `in`, `==`, `startswith` and their like, directly or by a name that a
`parametrize` or a loop gives such strings. Other strings of a module, and the output of scripts of
tests, examples and benchmarks, are data and not counted. `harness.wording` contains the words that integration tests
wait for.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
MOST = 90  # a ratchet: lower it to the present count, never raise it
# A word, a space or what a pattern has in its place, and a word; neither is part of a path, a flag or a name.
PROSE = re.compile(
    r"(?<![A-Za-z0-9_/.\-=$<])[A-Za-z][a-z']+(?:\\?[.,;:])?(?:\\? |\.\*|\n)+\(?[A-Za-z][a-z']*(?![A-Za-z0-9_/=(])"
)
SEARCHES = {
    "startswith",
    "endswith",
    "count",
    "index",
    "find",
    "search",
    "findall",
    "fullmatch",
    "match",
    "wait_for",
}
NUMBER = re.compile(r"\d+(\.\d+)?")
# Scripts that jobs of the tests run. Their output is not compared.
PRINTING = [
    *(TESTS / "harness" / "scripts").rglob("*.py"),
    *(TESTS.parent / "examples").rglob("*.py"),
    *(TESTS.parent / "benchmarks").rglob("*.py"),
]


class Comparison(NamedTuple):
    path: Path
    line: int
    how: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(TESTS.parent)}:{self.line}: {self.how}: {self.text!r:.110}"


def text_of(node: ast.expr) -> str:
    """What is written in a string, also of bytes, an f-string, a sum and `re.escape`; `{}` for each expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=bytes(data)):
            return data.decode("latin1")
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values)) or "{}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.Call(func=ast.Attribute(attr="escape"), args=[inner]):
            return text_of(inner)
    return "{}"


def has_prose(node: ast.expr) -> bool:
    return PROSE.search(text_of(node)) is not None


def given(names: ast.expr, values: ast.expr) -> Iterator[tuple[str, list[ast.expr]]]:
    """Each name that a loop or a `parametrize` sets, and the strings that it is set to."""
    match names:
        case ast.Constant(value=str(text)):
            heads = [name.strip() for name in text.split(",")]
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            heads = [each.id if isinstance(each, ast.Name) else text_of(each) for each in elements]
        case ast.Name(id=name):
            heads = [name]
        case _:
            return
    rows: list[ast.expr] = []
    match values:
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            rows = list(elements)
        case ast.Call(func=ast.Attribute(attr="items"), args=[], keywords=[]):
            match values.func:
                case ast.Attribute(value=ast.Dict(keys=keys, values=each)):
                    rows = [
                        ast.Tuple([key, value])
                        for key, value in zip(keys, each, strict=True)
                        if key
                    ]
    for place, head in enumerate(heads):
        cells = [
            row.elts[place]
            if isinstance(row, ast.Tuple | ast.List) and len(heads) > 1 and place < len(row.elts)
            else row
            for row in (
                r.args[0]
                if isinstance(r, ast.Call) and len(heads) == 1 and r.args
                else ast.Tuple(r.args)
                if isinstance(r, ast.Call)
                else r
                for r in rows
            )
        ]
        yield head, [cell for cell in cells if has_prose(cell)]


def used_otherwise(tree: ast.AST) -> set[str]:
    """The names that are read elsewhere than as one side of a comparison, or as what is searched for."""
    found: set[str] = set()

    def look(node: ast.AST) -> None:
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                found.add(name)
            case ast.Compare(left=left, comparators=others):
                for each in [left, *others]:
                    if not isinstance(each, ast.Name):
                        look(each)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                searches = isinstance(function, ast.Attribute) and function.attr in SEARCHES
                look(function)
                for each in arguments:
                    if not (searches and isinstance(each, ast.Name)):
                        look(each)
                for keyword in keywords:
                    if keyword.arg != "match" or not isinstance(keyword.value, ast.Name):
                        look(keyword.value)
            case ast.Assert(test=test):
                look(test)  # its message is no use
            case _:
                for child in ast.iter_child_nodes(node):
                    look(child)

    for child in getattr(tree, "body", []):
        look(child)
    return found


class Search(ast.NodeVisitor):
    """Collects the values that a module compares with prose."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Comparison] = []
        self.names: dict[str, list[ast.expr]] = {}
        self.compared: set[ast.expr] = set()

    def note(self, how: str, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            for each in self.names.pop(node.id, ()):  # once, however often the name is compared
                self.found.append(Comparison(self.path, each.lineno, how, text_of(each)))
                self.compared.add(each)
            return
        inner = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else [node]
        for each in [each for each in inner if has_prose(each)][:1]:
            self.found.append(Comparison(self.path, each.lineno, how, text_of(each)))
            self.compared |= set(ast.walk(each))  # type: ignore[arg-type]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = dict(self.names)
        for mark in node.decorator_list:
            match mark:
                case ast.Call(func=ast.Attribute(attr="parametrize"), args=[names, values, *_]):
                    self.names.update(given(names, values))
        for name in self.names.keys() & used_otherwise(node):
            del self.names[name]  # the test gives it to what it tests
        self.generic_visit(node)
        self.names = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_For(self, node: ast.For) -> None:
        self.names.update(given(node.target, node.iter))
        for name in self.names.keys() & used_otherwise(node):
            del self.names[name]
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg == "match":
                self.note("match", keyword.value)
        match node.func:
            case ast.Attribute(attr=how) if how in SEARCHES:
                for argument in node.args:
                    self.note(how, argument)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for each in [node.left, *node.comparators]:
            self.note(type(node.ops[0]).__name__, each)
        self.generic_visit(node)


def comparisons() -> list[Comparison]:
    found: list[Comparison] = []
    printed = [text for path in PRINTING for text in given_by(ast.parse(path.read_text()), set())]
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        search = Search(path)
        search.visit(tree)
        data = [*given_by(tree, search.compared), *printed]
        found += [each for each in search.found if not is_data(each.text, data)]
    return found


def given_by(tree: ast.Module, compared: set[ast.expr]) -> list[str]:
    """The strings of a module that it does not compare with; numbers as ``{}``."""
    return [
        NUMBER.sub("{}", text_of(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant) and node not in compared
        if text_of(node) != "{}"
    ]


def is_data(text: str, given: list[str]) -> bool:
    """Whether the longest stretch of a pattern that stands for itself is in one of these."""
    stretches = re.split(
        r"\.[*+]|\(?\\\\?[dswSb][+*]?\)?|\{\}|[()|?\[\]^$]|\(\.", NUMBER.sub("{}", text)
    )
    literal = max((each.replace("\\", "").strip() for each in stretches), key=len)
    return any(literal in each for each in given)


def main(arguments: list[str]) -> int:
    found = comparisons()
    if "--list" in arguments:
        print(*found, sep="\n")
    print(f"{len(found)} comparisons with prose in tests; at most {MOST} may be there")
    if len(found) > MOST:
        print("compare a type, a kind or a field, or record the text: see tests/harness/golden.py")
    return int(len(found) > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
