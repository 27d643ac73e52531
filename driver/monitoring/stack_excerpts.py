"""Extraction of the script's frames and the blocking call from the stacks of a worker. Pure: no I/O, no clock.

Python's faulthandler writes the frames, and `header_of` returns the header line that precedes them:

    Training thread 4711 [python] (most recent call first):
      File ".../torch/autograd/graph.py", line 979 in _engine_run_backward
      File "train.py", line 15 in train
"""

from __future__ import annotations

import re

from elastic.protocol.uncaught.folded_traceback import SCRIPT, library_of
from elastic.protocol.uncaught.sending import StackOf

TRAINING = "Training thread"
INNERMOST = 8  # maximum number of frames shown if no frame belongs to the script
# header line that faulthandler writes if it prints only one thread
STACK = "Stack (most recent call first):"
# Also matches the headers that faulthandler writes for all threads, if the script installed a handler.
_HEADER = re.compile(r"(Training thread|Current thread|Thread) (0x)?[0-9a-f]+ |" + re.escape(STACK))
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def header_of(stack: StackOf) -> str:
    """Return the header line for the stack of a thread."""
    noun = TRAINING if stack.training else "Thread"
    return f"{noun} {stack.thread} [{stack.name}] (most recent call first):"


def training_stack(text: str) -> str:
    """Return the stack of the training thread, one frame per line, without its header.

    If no thread is marked as the training thread, return the last stack, which is that of the main thread.
    """
    threads: list[list[str]] = []
    for line in text.splitlines():
        if _HEADER.match(line):
            threads.append([line])
        elif threads and line.strip():
            threads[-1].append(line)
    if not threads:
        return text
    named = [thread for thread in threads if thread[0].startswith(TRAINING)]
    lines = _script_first((named or threads)[-1][1:])
    if len(threads) > 1:
        noun = "thread" if len(threads) == 2 else "threads"
        lines.append(f"  [{len(threads) - 1} other {noun}]")
    return "".join(f"{line}\n" for line in lines)


def _script_first(frames: list[str]) -> list[str]:
    owners = []
    for frame in frames:
        found = _FRAME.match(frame)
        owners.append(library_of(found["file"]) if found else "")
    scripts = [
        number
        for number, owner in enumerate(owners)
        if owner == SCRIPT and _FRAME.match(frames[number])
    ]
    if not scripts:
        return frames[:INNERMOST]
    shown = [frames[number] for number in scripts]
    inner = scripts[0]
    if inner:
        libraries = " and ".join(dict.fromkeys(owner for owner in owners[:inner] if owner))
        at = _FRAME.match(frames[0])
        where = (
            f", the innermost at line {at['line']} of {at['file']}, in {at['name']}" if at else ""
        )
        noun = "frame" if inner == 1 else "frames"
        shown.append(f"  [waiting in {inner} {noun} of {libraries}{where}]")
    return shown
