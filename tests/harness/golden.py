"""Texts for users, in one file for each surface: `tests/golden/errors.txt`, `log.txt`, `output.txt` and others.

    with raises(Invalid) as caught:     # as pytest.raises; the message is compared with the recorded one
        parse(["-np", "0"])
    recorded("log", said(actions))      # a text, or the lines of a list

Each entry has the name of its test and its number in it. `make golden` rewrites the files from the present
output: read the diff. Values that differ between runs (temporary folders, ports, process IDs) are replaced by names in
capitals before the comparison. ``facts`` are values that a message must contain, such as a port; they may be among the
replaced ones.

Only tests that run in the process of pytest can use it, and none that Hypothesis calls several times.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import html
import os
import re
import socket
import sys
import tempfile
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "golden"
ROOT = FOLDER.parents[1]
# A smaller process number, as in a container, may be any other number of a text.
LEAST_PID = 1000
VOLATILE: list[tuple[str, str]] = [
    (
        r"\S*/pytest-of-[^/\s]+/pytest-\d+(/popen-gw\d+)?/[^/\s'\"]+?\d+(?=[/\s'\"):;,.]|$)",
        "FOLDER",
    ),
    (rf"{re.escape(tempfile.gettempdir())}/(tmp|elastic-|hvd-elastic-)[\w-]+", "FOLDER"),
    (r"/dev/shm/tmp\w+", "FOLDER"),
    (re.escape(sys.executable), "PYTHON"),
    (re.escape(str(ROOT)), "ROOT"),
    # Of a frame in our own code: neither its line nor its source, nor what Pythons mark in it.
    (r'(File "ROOT/[^"]+", line )\d+(, in [^\n]+)(?:\n    [^\n]*)*', r"\1N\2"),
    # Python 3.13 shows the source of python -c.
    (r'(File "<string>", line \d+, in [^\n]+)(?:\n    [^\n]*)*', r"\1"),
    (r"(?:lstat: )?embedded null (?:byte|character in path)", "embedded null"),
    (r"\b(\w+\.py:)\d+(?= )", r"\1N"),  # of a record of logging
    (r"\b(elastic-[a-z]+-)\d{8}-\d{6}-[0-9a-f]{6}\b", r"\1RANDOM"),
    (r"\b(elastic-[a-z]+-)\w{8}\b", r"\1RANDOM"),
    (r"\b20\d\d-\d\d-\d\d\b", "DATE"),
    (r"\bLinux \d+\.\d[\w.+-]*, \d+ cores\b", "MACHINE"),
    (r"\b\d\d:\d\d:\d\d\b", "TIME"),
    (r"\b(process,? (?:number |ID )?)\d{2,}", r"\1PID"),
    (r"\b(descriptor|byte) \d+\b", r"\1 N"),
    (r"(?<=[:-])[0-9a-f]{8}\b", "ID"),
    (r"(?<=\b\d{6}-\d{6}-)[0-9a-f]{12}\b", "ID"),  # of a chapter of the journal: may be all digits
    (r"(?<=\+)\d+\.\d{3}\b", "SECONDS"),
    (r"\b0x[0-9a-f]{6,}\b", "ADDRESS"),
    (r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12}\b", "ID"),
    (r"((?:\[?127\.0\.0\.1\]?|localhost|\[::1\])(?::| port ))\d{4,5}\b", r"\1PORT"),
]


class Records:
    """Texts of a run's tests, and the recorded ones."""

    def __init__(self, rewrite: bool) -> None:
        self.rewrite = rewrite
        self.process = os.getpid()
        self.test = ""
        self.counts: Counter[str] = Counter()
        self.known: dict[str, dict[str, str]] = {}
        self.shown: dict[str, dict[str, str]] = defaultdict(dict)
        self.ran: set[str] = set()

    def begin(self, test: str) -> None:
        self.test = test
        self.counts.clear()
        self.ran.add(test)

    def key_of(self, surface: str) -> str:
        assert threading.current_thread() is threading.main_thread(), (
            "texts of threads have no order"
        )
        assert os.getpid() == self.process, "a golden text in another process than pytest's"
        self.counts[surface] += 1
        return f"{self.test} {self.counts[surface]}"

    def recorded(self, surface: str, key: str) -> str | None:
        if surface not in self.known:
            self.known[surface] = read(surface)
        return self.known[surface].get(key)

    def write(self) -> None:
        """Replace the entries of tests that ran, and keep all others. Several processes of pytest may call it
        concurrently.
        """
        FOLDER.mkdir(exist_ok=True)
        for surface in {*self.shown, *(path.stem for path in FOLDER.glob("*.txt"))}:
            with (FOLDER / f"{surface}.txt").open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                kept = {
                    key: text
                    for key, text in read(surface).items()
                    if key.rpartition(" ")[0] not in self.ran
                }
                entries = sorted((kept | self.shown[surface]).items(), key=_in_order)
                file.truncate(0)
                file.write("".join(f"== {key}\n{_indented(text)}\n" for key, text in entries))


def _in_order(entry: tuple[str, str]) -> tuple[str, int]:
    test, _, number = entry[0].rpartition(" ")
    return test, int(number)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.split("\n"))


def read(surface: str) -> dict[str, str]:
    path = FOLDER / f"{surface}.txt"
    entries: dict[str, str] = {}
    for entry in re.split(r"^== ", path.read_text() if path.exists() else "", flags=re.MULTILINE)[
        1:
    ]:
        key, *lines = entry.removesuffix("\n").removesuffix("\n").split("\n")
        entries[key] = "\n".join(line[4:] for line in lines)
    return entries


_records: Records | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _records
    _records = Records(bool(config.getoption("--rewrite")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    assert _records is not None
    _records.begin(item.nodeid.removeprefix("tests/"))


def pytest_sessionfinish() -> None:
    if _records is not None and _records.rewrite and _records.shown:
        _records.write()


def steady(text: str) -> str:
    """Replace parts of a text that differ from run to run, and between machines."""
    for pattern, name in VOLATILE:
        text = re.sub(pattern, name, text)
    if os.getpid() >= LEAST_PID:
        text = re.sub(rf"(?<![\w.]){os.getpid()}(?![\w.]\d)", "PID", text)
    user, host = re.escape(getpass.getuser()), re.escape(socket.gethostname())
    text = re.sub(rf"(?<![\w/.]){user}@{host}(?![\w/])", "USER@HOST", text)
    text = re.sub(rf"(?<=\buser ){user}(?![\w/])", "USER", text)
    # Without blanks at line ends and terminal control characters.
    return "\n".join(
        "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line).rstrip()
        for line in text.split("\n")
    )


def visible(page: str) -> str:
    """Return the visible text of an HTML page: without styles, scripts and tags."""
    page = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    lines = (html.unescape(line).strip() for line in re.sub(r"<[^>]*>", "\n", page).split("\n"))
    return "\n".join(filter(None, lines))


def _whole(shown: object) -> str:
    match shown:
        case str():
            return shown
        case bytes():
            return shown.decode("utf-8", "backslashreplace")
        case dict():
            return "\n".join(f"{key}: {value}" for key, value in shown.items())
        case Iterable():
            return "\n".join(map(str, shown))
    return str(shown)


def recorded(surface: str, shown: object, *facts: object) -> None:
    """Fail unless this is the recorded text; the items of a list are its lines."""
    assert _records is not None
    whole = _whole(shown)
    missing = [str(fact) for fact in facts if str(fact) not in whole]
    assert not missing, f"{missing} missing in: {whole}"
    text, key = steady(whole), _records.key_of(surface)
    if _records.rewrite:
        _records.shown[surface][key] = text
        return
    before = _records.recorded(surface, key)
    assert before is not None, f"nothing is recorded for {key}: run `make golden`"
    assert text == before, (
        f"not what {FOLDER.name}/{surface}.txt has: run `make golden` if it is right"
    )


Kinds = type[BaseException] | tuple[type[BaseException], ...]


def raises(
    kind: Kinds, *facts: object
) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[Any], bool]:
    """As `pytest.raises`; class and message are compared with those recorded in `golden/errors.txt`."""
    return _raises(kind, *facts)  # type: ignore[return-value]  # the error ends in it


@contextlib.contextmanager
def _raises(kind: Kinds, *facts: object) -> Iterator[pytest.ExceptionInfo[Any]]:
    with pytest.raises(kind) as caught:
        yield caught
    recorded("errors", f"{named(type(caught.value))}: {caught.value}", *facts)


def named(kind: type[BaseException]) -> str:
    """If a test of this process has imported `horovod`, interruptions are raised as subclasses of Horovod's."""
    return next(each.__name__ for each in kind.__mro__ if "horovod_errors" not in each.__module__)


@contextlib.contextmanager
def warns(kind: type[Warning], *facts: object) -> Iterator[None]:
    """As `pytest.warns`; the messages are compared with those recorded in `golden/errors.txt`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [each for each in caught if issubclass(each.category, kind)]
    assert found, f"no {kind.__name__} was given"
    recorded("errors", [f"{each.category.__name__}: {each.message}" for each in found], *facts)
