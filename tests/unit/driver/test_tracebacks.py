"""Quoted lines of a worker's output, from real tracebacks in Python's format."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from elastic.driver.reasons import ReasonKind, because, in_one_line
from elastic.driver.tracebacks import exception_line
from elastic.errors import SUMMARY_LIMIT, summary_of
from harness.golden import recorded

LINES = "can't connect\nIn addition, you can set the variable X\n\nCheck your internet connection"
SCRIPTS = {
    "several lines": (f"raise OSError({LINES!r})", "OSError: can't connect"),
    "indented": ("raise RuntimeError('first\\n  second\\nthird')", "RuntimeError: first"),
    "begins with an empty line": ("raise ValueError('\\n  first\\nsecond')", "ValueError: first"),
    "no message": ("raise ValueError", "ValueError"),
    "an empty message": ("raise ValueError('')", "ValueError"),
    "does not compile": ("x = 1\ndef f(:\n    pass", "SyntaxError: "),
    "is indented wrongly": ("def f():\npass", "IndentationError: "),
    "compiles no other": ("compile('def f(:', 'other.py', 'exec')", "SyntaxError: "),
    "a group": (
        "raise ExceptionGroup('all failed\\nboth', [ValueError('a'), TypeError('b\\nc')])",
        "ExceptionGroup: all failed",
    ),
    "a group with tracebacks": (
        "def f():\n    raise KeyError('x')\ntry:\n    f()\nexcept KeyError as e:\n"
        "    raise ExceptionGroup('g', [e]) from None",
        "ExceptionGroup: g (1 sub-exception)",
    ),
    "during the handling of another": (
        "try:\n    {}['a']\nexcept KeyError:\n    raise OSError('second\\nmore')",
        "OSError: second",
    ),
    "with a cause": (
        "try:\n    {}['a']\nexcept KeyError as e:\n    raise OSError('second\\nmore') from e",
        "OSError: second",
    ),
    "with notes": (
        "e = ValueError('bad value')\ne.add_note('look at the data\\nand again')\nraise e",
        "ValueError: bad value",
    ),
    "interrupted": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "of a module": ("import json; json.loads('x')", "json.decoder.JSONDecodeError: Expecting"),
    "one was caught before": (
        "import traceback\ntry:\n    {}['a']\nexcept KeyError:\n    traceback.print_exc()\n"
        "print('going on')\nraise OSError('second\\nmore')",
        "OSError: second",
    ),
    "a traceback in its message": (
        "import traceback\ntry:\n    {}['a']\nexcept KeyError:\n"
        "    raise RuntimeError('Caught in worker 0.\\nOriginal ' + traceback.format_exc()) from None",
        "RuntimeError: Caught in worker 0.",
    ),
}


def wrote(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return done.stderr


@pytest.mark.parametrize("case", SCRIPTS)
def test_exception_is_quoted_by_its_class_and_the_first_line_of_its_message(case):
    script, expected = SCRIPTS[case]
    if "Group" in script and sys.version_info < (3, 11):
        pytest.skip("no groups of exceptions")
    if "add_note" in script and sys.version_info < (3, 11):
        pytest.skip("no notes")
    assert exception_line(wrote(script)).startswith(expected)
    assert "\n" not in exception_line(wrote(script))


def test_rank_prefixes_of_torch_are_removed_from_lines():
    text = textwrap.indent(wrote(SCRIPTS["several lines"][0]), "[rank3]: ", lambda line: True)
    recorded("messages", exception_line(f"a warning\n{text}[W socket.cpp] closing\n"))


def test_error_of_tensorflow_is_its_first_line():
    text = (
        'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n'
        "tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution error:\n\n"
        "Detected at node Reshape defined at (most recent call last):\n"
        '  File "t.py", line 9, in call\nInput has 2 values\n\t [[{{node Reshape}}]]\n'
    )
    kind = "tensorflow.python.framework.errors_impl.InvalidArgumentError"
    recorded("messages", exception_line(text), kind)


@pytest.mark.parametrize("text", ["", "fatal: no data\n", 'see File "x"\n', "ValueError: not one"])
def test_text_without_a_traceback_has_no_exception(text):
    assert exception_line(text) == ""


def test_reason_in_one_line_quotes_the_exception():
    text = wrote(SCRIPTS["several lines"][0])
    facts = {"who": "rank 1", "exit": "exit code 1", "killed_for": None}
    ended = in_one_line(because(ReasonKind.ENDED, **facts, wrote=text))
    recorded("messages", ended)
    both = {"first": "a", "worker": "b", "commit": "2.7"}
    same = in_one_line(because(ReasonKind.SAME_EXCEPTION, **both, trace=text))
    recorded("messages", same)
    raised = because(ReasonKind.SCRIPT_RAISED, who="rank 1", summary="OSError: x", trace=text)
    assert in_one_line(raised) == "rank 1 raised OSError: x"


def test_caught_exception_is_not_the_reason_of_a_later_exit():
    text = f"{wrote(SCRIPTS['several lines'][0])}fatal: no data\n"
    facts = {"who": "rank 1", "exit": "exit code 3", "killed_for": None}
    ended = in_one_line(because(ReasonKind.ENDED, **facts, wrote=text, caught=True))
    recorded("messages", ended)


def test_summary_of_an_error_has_one_line():
    recorded("messages", summary_of(OSError(LINES)))
    assert summary_of(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert summary_of(ValueError()) == "ValueError"


def test_long_message_is_shortened_in_every_quotation():
    message = "x" * 10_000_000
    facts = {"who": "rank 0", "exit": "exit code 1", "killed_for": None, "early": False}
    quoted = [
        summary_of(ValueError(message)),
        exception_line(f"Traceback (most recent call last):\nValueError: {message}"),
        in_one_line(because(ReasonKind.ENDED, **facts, wrote=f"said:\n{message}")),
    ]
    assert all(0 < len(line) < 2 * SUMMARY_LIMIT for line in quoted)


def test_summary_of_an_error_whose_str_raises_has_its_class():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert summary_of(Mute()).partition(":")[0] == "Mute"
