"""Counts the comparisons with prose in tests: `python -m harness.prose`, with `--list` for each of them.

Wording is to be free to change, so tests compare types, kinds and fields, and what a surface shows stands in
`tests/golden`. A comparison with prose is one with a string of two or more words of English: `match=` of
`pytest.raises` and `pytest.warns`, `in`, `==`, `startswith` and their like, directly or by a name that a
`parametrize` or a loop gives such strings. What the module itself has written elsewhere, such as what its script
prints, is data and not counted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
MOST = 1000  # a ratchet: lower it to what is reached, never raise it
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
}


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


class Search(ast.NodeVisitor):
    """Collects what a module compares with prose."""

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
        self.generic_visit(node)
        self.names = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_For(self, node: ast.For) -> None:
        self.names.update(given(node.target, node.iter))
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
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        search = Search(path)
        search.visit(tree)
        given = [
            text_of(node)
            for node in ast.walk(tree)
            if is_string(node) and node not in search.compared
        ]
        found += [
            each for each in search.found if not any(literal(each.text) in text for text in given)
        ]
    return found


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def literal(text: str) -> str:
    """The longest stretch of a pattern, or of an f-string, that stands for itself."""
    return max(re.split(r"\.\*|\\[dswS]\S?|\{\}|[()|?]", text.replace("\\", "")), key=len).strip()


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
