"""Formatting of an exception as Python prints it, with each run of this package's frames folded into one line.

      File "train.py", line 21, in <module>
        train(state)
      [4 frames of elastic, --verbose shows them]
      File "train.py", line 15, in train

A run of more than LONG library frames between two frames of the script is also folded, because trainers have dozens of
them. Library frames after the last frame of the script are always shown, because they raised the exception.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

LONG = 6  # maximum length of a run of library frames that is not folded
_ELASTIC = os.path.abspath(os.path.join(__file__, *[os.pardir] * 3))
_OURS = (_ELASTIC + os.sep, os.path.join(os.path.dirname(_ELASTIC), "horovod") + os.sep)
# Omit frames of torch between two frames of this package.
_BETWEEN = tuple(
    os.path.join("torch", *each)
    for each in (("_compile.py",), ("_dynamo", ""), ("autograd", "function.py"))
)
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
OURS, SCRIPT = "elastic", ""


def library_of(file: str) -> str:
    """Return the top-level package of a file, such as ``torch``, or SCRIPT for one of the user's own files."""
    if os.path.abspath(file).startswith(_OURS):
        return OURS
    if _INSTALLED in file:
        return file.rpartition(_INSTALLED)[2].partition(os.sep)[0].removesuffix(".py")
    if file in ("<string>", "<stdin>"):
        return SCRIPT
    return "Python" if file.startswith(("<", _STANDARD)) else SCRIPT


class FoldedStack(traceback.StackSummary):
    """Stack summary in which each run of folded frames is printed as one line."""

    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        for libraries, frames in _runs(self):
            if libraries:
                noun = "frame" if len(frames) == 1 else "frames"
                names = " and ".join(filter(None, (", ".join(libraries[:-1]), libraries[-1])))
                lines.append(f"  [{len(frames)} {noun} of {names}, --verbose shows them]\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def _runs(
    frames: Sequence[traceback.FrameSummary],
) -> Iterator[tuple[list[str], list[traceback.FrameSummary]]]:
    owners = [library_of(frame.filename) for frame in frames]
    fold = [owner == OURS for owner in owners]
    for at in [number for number, owner in enumerate(owners) if owner == OURS]:
        end = at + 1
        while end < len(frames) and any(each in frames[end].filename for each in _BETWEEN):
            end += 1
        if end < len(frames) and owners[end] == OURS:
            fold[at:end] = [True] * (end - at)
    scripts = [number for number, owner in enumerate(owners) if owner == SCRIPT]
    for before, after in pairwise(scripts):
        if after - before - 1 > LONG:
            fold[before + 1 : after] = [True] * (after - before - 1)
    for folds, numbers in groupby(range(len(frames)), key=fold.__getitem__):
        run = [*numbers]
        libraries = list(dict.fromkeys(owners[number] for number in run)) if folds else []
        yield libraries, [frames[number] for number in run]


def folded(error: BaseException) -> str:
    """Format an exception with folded frames. A cause is omitted if all its frames belong to this package."""
    shown = traceback.TracebackException.from_exception(error)
    _fold(shown)
    return "".join(shown.format())


def _fold(shown: traceback.TracebackException) -> None:
    shown.stack = FoldedStack(shown.stack)
    for name in ("__cause__", "__context__"):
        before = getattr(shown, name)
        if before is None:
            continue
        if before.stack and all(library_of(frame.filename) == OURS for frame in before.stack):
            setattr(shown, name, None)
        else:
            _fold(before)
    for each in getattr(shown, "exceptions", None) or ():
        _fold(each)


def whole(error: BaseException) -> str:
    """Format an exception in full, as Python does."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def digest(error: BaseException) -> str:
    """Return a digest of an exception's classes and the lines that raised them. Messages are ignored."""
    names = hashlib.sha256()
    for each in chain(error):
        names.update(f"{type(each).__module__}.{type(each).__qualname__}\n".encode())
        for frame in traceback.extract_tb(each.__traceback__):
            names.update(os.fsencode(f"{frame.filename}:{frame.lineno}:{frame.name}\n"))
        if isinstance(each, SyntaxError):
            names.update(os.fsencode(f"{each.filename}:{each.lineno}\n"))
    return names.hexdigest()[:16]


def chain(error: BaseException) -> list[BaseException]:
    """Return an exception and all causes and contexts that Python prints with it."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or any(each is known for known in found):
            continue
        found.append(each)
        context = None if each.__suppress_context__ else each.__context__
        left += [each.__cause__ or context, *getattr(each, "exceptions", ())]
    return found


def line_of(error: BaseException) -> str:
    """Return the innermost line of the script in an exception's traceback, such as ``train.py:12``.

    The result is empty if the traceback contains no line of the script.
    """
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if library_of(frame.filename) == SCRIPT:
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return ""
