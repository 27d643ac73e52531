"""`--stdin RANK`: one worker reads elasticrun's input; when it is replaced, the next one continues."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.job import elasticrun
from harness.processes import clean_environment

DEADLINE_S = 60.0
READS = """
import os
try:
    read = input("a prompt")
except EOFError:
    read = "EOF"
open(f"read.{os.environ['RANK']}", "w").write(read)
"""
# Holds the job until the last line is read; the shell reads a pipe byte by byte.
IN_TURN = """
[ $LOCAL_RANK = 0 ] && exec cat "$1"
read line
echo "$ELASTIC_WORKER $line" >> lines
[ "$line" = last ] && : > "$1" && exit 0
exit 1
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    running = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        running.append(
            subprocess.Popen(
                [elasticrun(), *words],
                cwd=tmp_path,
                env=clean_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_worker_of_the_given_rank_reads_standard_input_and_other_ranks_read_eof(start, tmp_path):
    process = start("-np", "2", "--stdin", "1", sys.executable, "-c", READS)
    process.communicate(b"hello\n", timeout=DEADLINE_S)
    assert process.returncode == 0
    assert (tmp_path / "read.0").read_text() == "EOF"
    assert (tmp_path / "read.1").read_text() == "hello"


def test_every_worker_reads_eof_when_no_rank_is_given(start, tmp_path):
    process = start("-np", "2", sys.executable, "-c", READS)
    process.communicate(b"hello\n", timeout=DEADLINE_S)
    assert [(tmp_path / f"read.{rank}").read_text() for rank in (0, 1)] == ["EOF", "EOF"]


def test_prompt_is_shown_before_the_answer_is_given(start):
    process = start("-np", "1", "--stdin", "0", sys.executable, "-c", READS)
    assert b"a prompt" in process.stdout.readline()
    process.communicate(b"yes\n", timeout=DEADLINE_S)
    assert process.returncode == 0


def test_replacement_of_the_reader_reads_the_remaining_input(start, tmp_path):
    fifo = tmp_path / "goes_on"
    subprocess.run(["mkfifo", fifo], check=True, timeout=DEADLINE_S)
    words = ["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "0.1", "0.2"]
    process = start(*words, "--stdin", "1", "sh", "-c", IN_TURN, "sh", str(fifo))
    process.communicate(b"first\nlast\n", timeout=DEADLINE_S)
    lines = (tmp_path / "lines").read_text().splitlines()
    assert lines == ["localhost:1#1 first", "localhost:1#2 last"]
    assert process.returncode == 0
