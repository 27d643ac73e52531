"""The project's prose is plain technical English: the number of other phrases may only decrease.

`python tests/unit/test_english.py docstrings` lists the counted phrases of a kind.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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
MOST = {
    "help": 0,
    "docs": 0,
    "messages": 16,
    "docstrings": 5,
    "first lines": 0,
    "comments": 1,
    "repeated sentences": 0,
}
REPEATED_WORDS = 5  # number of words from which a repeated sentence is counted


class Prose(NamedTuple):
    """Texts of all files of `ROOMS`: docstrings, the literal text of other strings, comments."""

    docstrings: list[str]
    messages: list[str]
    comments: list[str]


@functools.cache
def prose() -> Prose:
    """Parse each file once for all kinds."""
    found = Prose([], [], [])
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for room in ROOMS:
        for path in sorted((ROOT / room).resolve().rglob("*.py")):
            if "__pycache__" in path.parts or path.is_symlink():
                continue
            text = path.read_text()
            nodes = list(ast.walk(ast.parse(text)))
            documents = {node.value for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, documented):
                    found.docstrings.append(ast.get_docstring(node) or "")
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.messages.append("" if node in documents else node.value)
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            found.comments.extend(each.string for each in tokens if each.type == tokenize.COMMENT)
    return found


def pages() -> Iterator[str]:
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    for path in (*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))):
        if not {path.name, path.parent.name}.intersection(GENERATED):
            yield re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)


def help_texts() -> Iterator[str]:
    yield (ROOT / "docs" / "reference" / "commands.md").read_text()


def found(pattern: re.Pattern[str], texts: Iterable[str]) -> list[str]:
    return [
        text[max(0, match.start() - 40) : match.end() + 30].replace("\n", " ")
        for text in (re.sub(r"\{[^{}]*\}", "", each) for each in texts)
        for match in pattern.finditer(text)
    ]


def repeated(texts: Iterable[str]) -> list[str]:
    """Return the sentences that a text contains again. Sections such as ``Raises`` do not count."""
    again = []
    for text in texts:
        before: set[str] = set()
        for sentence in re.split(r"(?<=[.:])\s+", re.split(r"\n(?:Args|Raises):", text)[0]):
            words = " ".join(sentence.split())
            if words in before and len(words.split()) >= REPEATED_WORDS:
                again.append(words)
            before.add(words)
    return again


KINDS: dict[str, Callable[[], list[str]]] = {
    "help": lambda: found(PHRASES, help_texts()),
    "docs": lambda: found(PHRASES, pages()),
    "messages": lambda: found(PHRASES, prose().messages),
    "docstrings": lambda: found(PHRASES, prose().docstrings),
    "first lines": lambda: [text for text in prose().docstrings if OPENINGS.match(text)],
    "comments": lambda: found(PHRASES, prose().comments),
    "repeated sentences": lambda: repeated(prose().docstrings),
}


@pytest.mark.parametrize("kind", KINDS)
def test_phrases_that_are_not_plain_english_do_not_increase(kind):
    phrases = KINDS[kind]()
    assert len(phrases) <= MOST[kind], f"{len(phrases)} {kind}: python {__file__} {kind!r}"


def test_repeated_sentence_is_found():
    texts = [
        "Stop all workers.\n\nStop them all now at once.  Stop them all now\nat once. Stop.",
        "Stop.",
    ]
    assert repeated(texts) == ["Stop them all now at once."]


def test_plain_english_is_not_counted_as_odd():
    plain = ["Whether it is lost, for a user who can write to the folder.", "Training resumes."]
    assert found(PHRASES, plain) == found(OPENINGS, plain) == []
    odd = ["Who is lost.", "Training goes on without it."]
    assert len(found(PHRASES, odd)) == 2 and len(found(OPENINGS, odd)) == 1


if __name__ == "__main__":
    print(*KINDS[sys.argv[1]](), sep="\n")
