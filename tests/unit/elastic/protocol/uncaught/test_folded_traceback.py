"""The frames of this package are folded to one line; those of the script, and its exception, are unchanged."""

from __future__ import annotations

import functools
import os
import sys
import traceback

import pytest

import elastic
from elastic.errors import CollectiveFailed, Invalid
from elastic.launcher import run_function
from elastic.protocol.uncaught import folded_traceback as folding


def raised(function, *arguments) -> BaseException:
    try:
        function(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("it should raise")


def mine() -> None:
    raise ValueError("mine")


def ours(depth: int = 1) -> None:
    """Raises in this package."""
    elastic.run(3)  # type: ignore[arg-type]


def through_us(function) -> None:
    through(run_function.__file__, function, 4)


def frames_of(text: str) -> list[str]:
    return [
        line.split('"')[1] for line in text.splitlines() if line.lstrip(" |").startswith("File ")
    ]


def test_traceback_without_frames_of_this_package_is_unchanged():
    error = raised(mine)
    plain = "".join(traceback.format_exception(error))
    assert folding.folded(error) == folding.whole(error) == plain


def test_frames_of_this_package_between_script_frames_are_folded_to_one_line():
    error = raised(through_us, mine)
    text = folding.folded(error)
    assert run_function.__file__ in folding.whole(error)
    assert set(frames_of(text)) == {__file__}
    assert sum(line.startswith("  [4 ") for line in text.splitlines()) == 1
    assert text.endswith("ValueError: mine\n")


def test_error_raised_by_elastic_is_shown_at_the_line_of_the_script():
    error = raised(ours)
    assert isinstance(error, Invalid)
    assert set(frames_of(folding.folded(error))) == {__file__}
    assert folding.line_of(error).startswith("test_folded_traceback.py:")


def through(file: str, function, depth: int) -> None:
    code = compile(
        "def call(f, depth):\n    return f() if not depth else call(f, depth - 1)", file, "exec"
    )
    space: dict = {}
    exec(code, space)
    space["call"](function, depth - 1)


TORCH = os.path.join("lib", "site-packages", "torch", "nn.py")


def one_after_another(files: list[str], function) -> None:
    for file in reversed(files):
        space = {"f": function}
        exec(compile("def call():\n    return f()", file, "exec"), space)
        function = space["call"]
    function()


@pytest.mark.parametrize("module", ["_compile.py", "_dynamo/eval_frame.py", "autograd/function.py"])
def test_torch_frames_between_frames_of_this_package_are_folded(module):
    between = os.path.join("lib", "site-packages", "torch", *module.split("/"))
    ours = elastic.__file__
    error = raised(one_after_another, [ours, between, ours], functools.partial(int, "x"))
    assert set(frames_of(folding.folded(error))) == {__file__}
    error = raised(one_after_another, [ours, between], functools.partial(int, "x"))
    assert between in folding.folded(error)


@pytest.mark.parametrize(("depth", "folds"), [(folding.LONG, False), (folding.LONG + 1, True)])
def test_many_library_frames_between_script_frames_are_folded_to_one_line(depth, folds):
    text = folding.folded(raised(through, TORCH, mine, depth))
    assert (TORCH not in text) is folds and (f"  [{depth} " in text) is folds
    assert text.endswith("ValueError: mine\n")


def test_frames_of_a_library_that_raises_are_shown():
    error = raised(through, TORCH, functools.partial(int, "x"), folding.LONG + 5)
    assert TORCH in folding.folded(error) and folding.folded(error) == folding.whole(error)


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (TORCH, "torch"),
        (os.path.join("lib", "site-packages", "six.py"), "six"),
        (functools.__file__, "Python"),
        ("<frozen runpy>", "Python"),
        ("<string>", folding.SCRIPT),
        ("train.py", folding.SCRIPT),
        (elastic.__file__, folding.OURS),
    ],
)
def test_library_of_a_file_is_derived_from_its_path(file, library):
    assert folding.library_of(file) == library


def chained() -> None:
    try:
        through_us(mine)
    except ValueError as error:
        raise RuntimeError("outer") from error


def test_traceback_of_a_cause_is_folded():
    text = folding.folded(raised(chained))
    assert set(frames_of(text)) == {__file__} and text.count("  [4 ") == 1
    assert "ValueError: mine\n" in text and text.endswith("RuntimeError: outer\n")


def test_cause_with_only_frames_of_this_package_is_omitted():
    def caused() -> None:
        cause = CollectiveFailed("aborted")
        code = compile("def fail(cause): raise cause", run_function.__file__, "exec")
        space: dict = {}
        exec(code, space)
        inner = raised(space["fail"], cause)
        inner.__traceback__ = inner.__traceback__.tb_next  # type: ignore[union-attr]
        raise RuntimeError("lost") from inner

    error = raised(caused)
    assert "aborted" in folding.whole(error) and "aborted" not in folding.folded(error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with 3.11")
def test_the_members_of_a_group_are_folded():
    def grouped() -> None:
        raise ExceptionGroup("two", [raised(through_us, mine), raised(mine)])  # type: ignore[name-defined]  # noqa: F821

    text = folding.folded(raised(grouped))
    assert set(frames_of(text)) == {__file__}
    assert text.count("ValueError: mine") == 2 and text.count("[4 ") == 1


def test_digest_depends_on_classes_and_lines_and_not_on_messages():
    def fails(message: str, kind: type[Exception] = ValueError) -> None:
        raise kind(message)

    digests = [folding.digest(raised(fails, *each)) for each in [("a",), ("b",), ("a", KeyError)]]
    assert digests[0] == digests[1] != digests[2]
    assert folding.digest(raised(mine)) != digests[0]


def test_syntax_errors_are_distinguished_by_their_line():
    def broken(text: str) -> str:
        return folding.digest(raised(compile, text, "x.py", "exec"))

    assert broken("(") == broken("[") != broken("\n(")
