"""Find the script line that a thread is executing, to locate a collective that not all ranks call."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

from elastic.rendezvous.script_files import LIBRARIES

_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = "site-packages"


def of_thread(number: int) -> str:
    """Return the script line that a thread is executing, such as ``train.py:12``.

    The result is empty if the thread has ended or runs no code of the script.
    """
    frame = sys._current_frames().get(number)
    while frame is not None and _is_of_a_library(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_of_a_library(frame: FrameType) -> bool:
    room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    path = frame.f_code.co_filename
    standard = path.startswith(("<frozen", _STANDARD)) and _INSTALLED not in path
    return room in LIBRARIES or standard
