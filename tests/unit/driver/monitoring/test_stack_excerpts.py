"""Stack of a worker's training, with the frames of its script first."""

from __future__ import annotations

import faulthandler
import tempfile

import elastic
from elastic.driver.monitoring.stack_excerpts import INNERMOST, TRAINING, training_stack
from harness.golden import recorded

LINK = 'Thread 0x0000000000000001 (most recent call first):\n  File "driver_connection.py", line 1 in read\n\n'
OURS = f'  File "{elastic.__file__}", line 7 in wait\n'
TORCH = '  File "/x/site-packages/torch/graph.py", line 9 in backward\n'
SCRIPT = '  File "/home/me/train.py", line 15 in train\n', '  File "train.py", line 3 in <module>\n'


def test_frames_of_the_script_precede_library_frames_which_share_a_line():
    text = f"{TRAINING} 0x02 (most recent call first):\n{OURS}{TORCH}{SCRIPT[0]}{OURS}{SCRIPT[1]}"
    first, second, waits, others = training_stack(LINK + text).splitlines(keepends=True)
    assert (first, second) == SCRIPT
    assert "line 7 of" in waits
    recorded("messages", waits)
    recorded("messages", others)


def test_main_thread_at_the_end_of_the_text_is_shown_without_a_name():
    text = f"Current thread 0x0000000000000002 (most recent call first):\n{SCRIPT[0]}"
    assert training_stack(LINK + text).startswith(SCRIPT[0])


def test_named_thread_is_shown_in_any_position():
    text = f"{TRAINING} 0x0002 (most recent call first):\n{SCRIPT[0]}\n" + LINK
    assert training_stack(text).startswith(SCRIPT[0])


def test_innermost_frames_are_shown_without_a_frame_of_the_script():
    text = f"{TRAINING} 0x02 (most recent call first):\n{OURS * 20}"
    assert training_stack(text) == OURS * INNERMOST


def test_text_without_stacks_is_unchanged():
    recorded("messages", training_stack("no header\n  of a thread\n"))


def test_stacks_written_by_python_are_parsed():
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    assert (
        training_stack(text).splitlines()[0].endswith("in test_stacks_written_by_python_are_parsed")
    )
