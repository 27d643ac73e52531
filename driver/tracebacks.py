"""Search for the exception in a worker's output: its class and the first line of its message. Pure: no I/O, no clock.

Python prints an uncaught exception as follows. If it prints a chain of exceptions, the last one is used.

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
# torch.distributed adds this prefix to each line.
_RANK = re.compile(r"^\[rank\d+\]:(?: |$)")
_FRAME = '  File "'
# A syntax error in the script is printed without the "Traceback" header.
_NOT_COMPILED = ("SyntaxError", "IndentationError", "TabError")


def exception_line(text: str) -> str:
    """Return the line ``OSError: the first line`` of the last traceback in ``text``, truncated.

    Returns an empty string if there is no traceback. Earlier tracebacks are ignored, because their exceptions were
    caught.
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
