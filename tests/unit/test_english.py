"""The project's prose is plain technical English: the number of other phrases may only decrease.

`python tests/unit/test_english.py docstrings` lists the counted phrases of a kind.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("elastic", "driver", "chaos", "horovod", "benchmarks", "examples", "tests/stress")
GENERATED = ("reference", "faults.md", "hosts.md", "soak.md")  # in docs
# People and pronouns as subjects, and verbs that no reference documentation uses.
PHRASES = re.compile(
    r"(^|(?<=[.:;,(] ))who\b"
    r"|\b(whoever|whom|nobody|everybody|somebody|anybody"
    r"|(is|are|was|were) told|(has|have|had) said|said so|hears?|heard of|(a|the|no) word of|by the last word"
    r"|(go|goes|going|gone|went) (on|away)|(take|takes|taken|took) away|comes? by|in vain|anew|that (is|are) none"
    r"|(stand|stands|stood) (in|by)|lies? in wait|let be|not taken for)\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(
    r"(Who|Whose|Whom|Whoever|Nobody|Somebody|What|Whatever|Those|That|Others|It|They|Of)\b"
)
# A ratchet for each kind: lower it to what is reached, never raise it.
MOST = {"help": 0, "docs": 2, "messages": 18, "docstrings": 6, "first lines": 7, "comments": 3}


def sources() -> Iterator[tuple[Path, str]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).resolve().rglob("*.py")):
            if "__pycache__" not in path.parts and not path.is_symlink():
                yield path, path.read_text()


def docstrings() -> Iterator[str]:
    for _, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def messages() -> Iterator[str]:
    """The literal text of strings, without docstrings."""
    for _, text in sources():
        tree = ast.parse(text)
        documents = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield "" if node in documents else node.value


def comments() -> Iterator[str]:
    for _, text in sources():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def pages() -> Iterator[str]:
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    for path in (*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))):
        if not {path.name, path.parent.name}.intersection(GENERATED):
            yield re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)


def help_texts() -> Iterator[str]:
    yield (ROOT / "docs" / "reference" / "commands.md").read_text()


def found(pattern: re.Pattern[str], texts: Iterator[str]) -> list[str]:
    return [
        text[max(0, match.start() - 40) : match.end() + 30].replace("\n", " ")
        for text in (re.sub(r"\{[^{}]*\}", "", each) for each in texts)
        for match in pattern.finditer(text)
    ]


KINDS: dict[str, Callable[[], list[str]]] = {
    "help": lambda: found(PHRASES, help_texts()),
    "docs": lambda: found(PHRASES, pages()),
    "messages": lambda: found(PHRASES, messages()),
    "docstrings": lambda: found(PHRASES, docstrings()),
    "first lines": lambda: [text for text in docstrings() if OPENINGS.match(text)],
    "comments": lambda: found(PHRASES, comments()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_phrases_that_are_not_plain_english_do_not_increase(kind):
    phrases = KINDS[kind]()
    assert len(phrases) <= MOST[kind], f"{len(phrases)} {kind}: python {__file__} {kind!r}"


def test_plain_english_is_not_counted():
    plain = ["Whether it is lost, for a user who can write to the folder.", "Training resumes."]
    assert found(PHRASES, iter(plain)) == found(OPENINGS, iter(plain)) == []
    odd = ["Who is lost.", "Training goes on without it."]
    assert len(found(PHRASES, iter(odd))) == 2 and len(found(OPENINGS, iter(odd))) == 1


if __name__ == "__main__":
    print(*KINDS[sys.argv[1]](), sep="\n")
