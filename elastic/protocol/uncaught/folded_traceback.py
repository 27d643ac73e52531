"""An exception as Python prints it, with the frames of this package folded into a line. Decides by file names alone.

File "train.py", line 21, in <module>
  train(state)
[4 frames of elastic, --verbose shows them]
File "train.py", line 15, in train
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

_HERE = os.path.abspath(os.path.join(__file__, *[os.pardir] * 3))  # elastic/
_OURS = (_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "horovod") + os.sep)
# What torch puts between two of our frames, and says nothing.
_BETWEEN = tuple(os.path.join("torch", each) for each in ("_compile.py", f"_dynamo{os.sep}"))
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def is_ours(file: str) -> bool:
    return os.path.abspath(file).startswith(_OURS)


class FoldedStack(traceback.StackSummary):
    """Its text has one line for each run of our frames."""

    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        for ours, frames in _runs(self):
            if ours:
                noun = "frame" if len(frames) == 1 else "frames"
                lines.append(f"  [{len(frames)} {noun} of elastic, --verbose shows them]\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def _runs(
    frames: Sequence[traceback.FrameSummary],
) -> Iterator[tuple[bool, list[traceback.FrameSummary]]]:
    """Frames in order, and whether they are ours, or torch's between two of ours."""
    ours = [is_ours(frame.filename) for frame in frames]
    between = [any(each in frame.filename for each in _BETWEEN) for frame in frames]
    folded = [*ours]
    for at in (number for number, mine in enumerate(ours) if mine):
        end = at + 1
        while end < len(frames) and between[end]:
            end += 1
        if end < len(frames) and ours[end]:
            folded[at:end] = [True] * (end - at)
    begin = 0
    for end in range(1, len(frames) + 1):
        if end == len(frames) or folded[end] != folded[begin]:
            yield folded[begin], list(frames[begin:end])
            begin = end


def folded(error: BaseException) -> str:
    """What Python would print of it, in fewer lines. A cause that has no frame but ours is left out."""
    shown = traceback.TracebackException.from_exception(error)
    _fold(shown)
    return "".join(shown.format())


def _fold(shown: traceback.TracebackException) -> None:
    shown.stack = FoldedStack(shown.stack)
    for name in ("__cause__", "__context__"):
        before = getattr(shown, name)
        if before is None:
            continue
        if before.stack and all(is_ours(frame.filename) for frame in before.stack):
            setattr(shown, name, None)
        else:
            _fold(before)
    for each in getattr(shown, "exceptions", None) or ():
        _fold(each)


def whole(error: BaseException) -> str:
    """What Python prints of it."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def digest(error: BaseException) -> str:
    """Equal for exceptions of the same classes that were raised at the same lines, whatever their messages."""
    names = hashlib.sha256()
    for each in chain(error):
        names.update(f"{type(each).__module__}.{type(each).__qualname__}\n".encode())
        for frame in traceback.extract_tb(each.__traceback__):
            names.update(os.fsencode(f"{frame.filename}:{frame.lineno}:{frame.name}\n"))
        if isinstance(each, SyntaxError):
            names.update(os.fsencode(f"{each.filename}:{each.lineno}\n"))
    return names.hexdigest()[:16]


def chain(error: BaseException) -> list[BaseException]:
    """The exception, and those that Python prints with it."""
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
    """``train.py:12``: the innermost line of the script in it; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        file = frame.filename
        known = file.startswith(("<", _STANDARD)) or _INSTALLED in file or is_ours(file)
        if not known:
            return f"{os.path.basename(file)}:{frame.lineno}"
    return ""
