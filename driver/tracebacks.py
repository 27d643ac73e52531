"""Find the exception in a worker's output: its class and the first line of its message. Pure: no I/O, no clock.

Python prints an uncaught exception, the last of a chain, as:

    Traceback (most recent call last):
      File "train.py", line 3, in <module>
    OSError: the first line of its message
    more of its message, and its notes
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastic.errors import shortened

_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = f"  + Exception Group {_HEADER}"
_GROUP_EDGE = "  | "
# torch.distributed writes this prefix before each line.
_RANK = re.compile(r"^\[rank\d+\]:(?: |$)")
_FRAME = '  File "'
# A script with a syntax error prints no header.
_NOT_COMPILED = ("SyntaxError", "IndentationError", "TabError")


def exception_line(text: str) -> str:
    """Return ``OSError: the first line``, shortened, of the last traceback in ``text``, or an empty string without a
    traceback.

    An earlier traceback, of an exception that was caught, is ignored.
    """
    lines = [_RANK.sub("", line) for line in text.splitlines()]
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        if line == _HEADER:
            found = _exception(lines[number + 1 :])
        elif line == _GROUP_HEADER:
            found = _exception([each.removeprefix(_GROUP_EDGE) for each in lines[number + 1 :]])
        elif line.startswith(_FRAME):
            found = _exception(lines[number:])
            found = found if found.startswith(_NOT_COMPILED) else ""
        else:
            continue
        if found:
            return shortened(found)
    return ""


def _exception(lines: Sequence[str]) -> str:
    for number, line in enumerate(lines):
        if line and not line[0].isspace():
            rest = (each.strip() for each in lines[number + 1 :] if line.endswith(": "))
            return f"{line.rstrip()} {next(filter(None, rest), '')}".rstrip(" :")
    return ""
