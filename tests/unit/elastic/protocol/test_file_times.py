"""Times of files, compared with the start of a process."""

from __future__ import annotations

import os
import sys
import time

import pytest

from elastic.protocol.file_times import COARSE_S, ERROR_S, changed_since
from harness.program import stdout_of

PROGRAM = "from elastic.protocol.file_times import process_began_at; print(process_began_at())"


def test_start_of_a_process_is_known_to_less_than_a_tenth_of_a_second():
    before = time.time()
    told = stdout_of(sys.executable, "-c", PROGRAM)
    assert before - ERROR_S - 0.02 <= float(told) <= time.time() - ERROR_S


def test_file_written_just_before_a_start_has_not_changed_since(tmp_path):
    file = tmp_path / "train.py"
    file.touch()
    written_at = file.stat().st_mtime
    assert not changed_since(str(file), written_at + 0.1)
    assert changed_since(str(file), written_at - 0.1)


@pytest.mark.parametrize(("after_s", "changed"), [(1.5, True), (COARSE_S + 0.5, False)])
def test_modification_time_in_whole_seconds_is_treated_as_coarse(tmp_path, after_s, changed):
    file = tmp_path / "train.py"
    file.touch()
    os.utime(file, (1.79e9, 1.79e9))
    assert changed_since(str(file), 1.79e9 + after_s) == changed
