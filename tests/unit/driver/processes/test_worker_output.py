"""Output of workers: complete lines with their rank at that moment, without blocking the driver."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading

import msgspec
import pytest

from elastic.driver.processes.console import (
    Console,
    WriterThread,
    is_terminal,
    write_both,
    write_to,
)
from elastic.driver.processes.stderr_tail import TAIL_LIMIT
from elastic.driver.processes.worker_output import LINE_LIMIT, Output
from elastic.protocol.messages import Place, Worker
from elastic.protocol.uncaught.sending import Uncaught
from harness.golden import recorded

A, B = Worker("h1", 0), Worker("h2", 3)


def place(rank: int) -> Place:
    return Place(rank, 4, rank, 4, 0, 1)


class Screen:
    """An Output whose streams are two byte strings."""

    def __init__(self, ranks=None, **options) -> None:
        self.ranks = {A: 0, B: 1} if ranks is None else ranks
        self.out, self.err = bytearray(), bytearray()
        self.output = Output(
            place_of=lambda w: place(self.ranks[w]) if w in self.ranks else None,
            stdout=self.out.extend,
            stderr=self.err.extend,
            **options,
        )

    def shown(self) -> bytes:
        self.output.close()
        return bytes(self.out)


@pytest.fixture
def screen():
    return Screen()


def test_lines_have_a_prefix_and_incomplete_ones_wait(screen):
    screen.output.feed(A, "stdout", b"one\ntw")
    screen.output.feed(B, "stdout", b"other\n")
    screen.output.feed(A, "stdout", b"o\nthree")
    screen.output.feed(A, "stderr", b"oops\n")
    screen.output.finish(A, "stdout")
    assert screen.shown() == b"[0] one\n[1] other\n[0] two\n[0] three\n"
    assert screen.err == b"[0] oops\n"


def test_chunk_boundaries_do_not_affect_the_lines():
    data = b"a\n\nb\r\nprogress 1\rprogress 2\r\rc\xff\xfe\n"
    whole = Screen()
    whole.output.feed(A, "stdout", data)
    expected = b"[0] a\n[0] \n[0] b\r\n[0] progress 1\r[0] progress 2\r\r[0] c\xff\xfe\n"
    assert whole.shown() == expected
    for cut in range(1, len(data)):
        screen = Screen()
        screen.output.feed(A, "stdout", data[:cut])
        screen.output.feed(A, "stdout", data[cut:])
        assert screen.shown() == expected, cut
    bytewise = Screen()
    for n in range(len(data)):
        bytewise.output.feed(A, "stdout", data[n : n + 1])
    assert bytewise.shown() == expected


def test_prefix_has_the_current_rank():
    screen = Screen(ranks={})
    screen.output.feed(B, "stdout", b"importing\n")
    screen.ranks[B] = 2
    screen.output.feed(B, "stdout", b"training\n")
    screen.ranks[B] = 1
    screen.output.feed(B, "stdout", b"still training\n")
    recorded("messages", screen.shown())


def test_timestamp_precedes_the_prefix():
    screen = Screen(timestamps=True, clock=lambda: "noon")
    screen.output.feed(A, "stdout", b"x\n")
    assert screen.shown() == b"noon [0] x\n"


def test_line_without_an_end_is_forwarded_in_pieces(screen):
    screen.output.feed(A, "stdout", b"x" * (2 * LINE_LIMIT + 5))
    screen.output.feed(A, "stdout", b"\n")
    lines = screen.shown().split(b"\n")
    assert [len(line) - 4 for line in lines[:-1]] == [LINE_LIMIT, LINE_LIMIT, 5]


def test_tail_of_stderr_is_kept_until_the_worker_is_removed(screen):
    for n in range(10_000):
        screen.output.feed(A, "stderr", b"line %d\n" % n)
    assert screen.output.tail(A).endswith("line 9998\nline 9999\n")
    assert len(screen.output.tail(A)) == TAIL_LIMIT
    assert screen.output.tail(B) == ""
    screen.output.finish(A, "stderr")  # precedes the exit, which still contains the tail
    assert len(screen.output.tail(A)) == TAIL_LIMIT
    screen.output.drop(A)
    assert screen.output.tail(A) == ""


def test_files_contain_the_original_bytes(tmp_path):
    screen = Screen(ranks={}, folder=tmp_path / "logs")
    screen.output.feed(B, "stdout", b"importing\r\n\xff")
    screen.output.feed(B, "stdout", b"\n")
    screen.ranks[B] = 2
    screen.output.feed(B, "stdout", b"y" * (LINE_LIMIT + 1) + b"\nz")
    screen.output.feed(B, "stderr", b"oops\n")
    screen.output.finish(B, "stdout")
    screen.output.close()
    logs = tmp_path / "logs"
    assert (logs / "h2.3" / "stdout").read_bytes() == b"importing\r\n\xff\n"
    assert (logs / "rank.2" / "stdout").read_bytes() == b"y" * (LINE_LIMIT + 1) + b"\nz"
    assert (logs / "rank.2" / "stderr").read_bytes() == b"oops\n"
    # Scripts may print tokens.
    assert (logs / "rank.2" / "stderr").stat().st_mode & 0o777 == 0o600


def test_closed_pipe_is_logged_once_and_the_output_continues():
    reading, writing = os.pipe()
    os.close(reading)
    logged: list[str] = []
    err = bytearray()
    with open(writing, "w") as stream:
        output = Output(
            place_of=lambda w: place(0),
            stdout=write_to(stream),
            stderr=err.extend,
            failed=logged.append,
        )
        for _ in range(3):
            output.feed(A, "stdout", b"lost\n")
            output.feed(A, "stderr", b"kept\n")
        output.close()
    recorded("log", logged)
    assert err == b"[0] kept\n" * 3


class Terminal:
    """Accepts nothing until it is released."""

    def __init__(self) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self._written = bytearray()
        self._more = threading.Condition()

    def write(self, data: bytes) -> None:
        self.asked.set()
        assert self.goes_on.wait(10)
        with self._more:
            self._written.extend(data)
            self._more.notify_all()

    def lines(self, count: int) -> list[bytes]:
        """Return all lines, once there are ``count``."""
        with self._more:
            assert self._more.wait_for(lambda: self._written.count(b"\n") >= count, 10)
            return bytes(self._written).splitlines()


def test_blocked_terminal_does_not_block_the_writer():
    terminal = Terminal()
    writer = WriterThread("stdout", failed=lambda text: None, limit=1000)
    for n in range(100):
        writer.put(terminal.write, b"%099d\n" % n)
    assert not writer.close(timeout_s=0.01)
    terminal.goes_on.set()


def test_lines_beyond_a_slow_terminals_buffer_are_dropped_with_a_note():
    terminal = Terminal()
    writer = WriterThread("stdout", failed=lambda text: None, limit=1000)
    writer.put(terminal.write, b"first\n")
    assert terminal.asked.wait(10)  # the queue is empty now
    for n in range(25):
        writer.put(terminal.write, b"%099d\n" % n)
    terminal.goes_on.set()
    assert writer.close(timeout_s=10)
    notice = b"elastic | 1500 bytes of output were dropped: stdout is slow"
    assert terminal.lines(12) == [b"first", notice, *(b"%099d" % n for n in range(15, 25))]


def test_slow_reader_receives_all_lines_in_order_and_is_reported_once(monkeypatch):
    monkeypatch.setattr("elastic.driver.processes.worker_output.REMIND_S", 0.0)
    terminal = Terminal()
    err = bytearray()
    output = Output(place_of=lambda w: place(0), stdout=terminal.write, stderr=err.extend)
    output.feed(A, "stdout", b"first\n")
    assert terminal.asked.wait(10)
    output.feed(A, "stdout", b"last\n")
    closing = threading.Thread(target=output.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    terminal.goes_on.set()
    closing.join(10)
    assert terminal.lines(2) == [b"[0] first", b"[0] last"]
    recorded("messages", err)
    assert err.count(b"\n") == 1


def test_closed_reader_is_not_awaited():
    reading, writing = os.pipe()
    with open(writing, "w") as stream:
        write, same = write_both(stream, stream)
        assert write is same
        output = Output(place_of=lambda w: place(0), stdout=write, stderr=write)
        for _ in range(40):
            output.feed(A, "stdout", (b"y" * 9_999 + b"\n"))
        closing = threading.Thread(target=output.close)
        closing.start()
        os.read(reading, 10)
        os.close(reading)
        closing.join(10)
        assert not closing.is_alive()


def test_streams_to_the_same_file_keep_their_order():
    terminal = Terminal()
    output = Output(place_of=lambda w: place(0), stdout=terminal.write, stderr=terminal.write)
    output.feed(A, "stdout", b"one\n")
    assert terminal.asked.wait(10)
    output.feed(A, "stdout", b"two\n")
    output.feed(A, "stderr", b"why\n")
    output.write_line(b"the end\n")
    terminal.goes_on.set()
    output.close()
    recorded("log", terminal.lines(4))


def test_missing_streams_discard_output(tmp_path):
    stdout, stderr = write_both(None, None)
    stdout(b"lost")
    stderr(b"lost")
    assert not is_terminal(None)
    with open(tmp_path / "f", "w") as one, open(tmp_path / "g", "w") as other:
        out, err = write_both(one, other)
        assert out != err
    assert not is_terminal(one)


def test_nonblocking_pipe_is_awaited():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    got = bytearray()

    def read() -> None:
        while data := os.read(reading, 65536):
            got.extend(data)

    reader = threading.Thread(target=read)
    with open(writing, "w") as stream:
        write = write_to(stream)
        reader.start()
        write(b"x" * 1_000_000)
    reader.join(10)
    os.close(reading)
    assert len(got) == 1_000_000


def test_stream_without_a_descriptor_receives_text():
    stream = io.StringIO()
    write_to(stream)(b"caf\xc3\xa9 \xff\n")
    assert stream.getvalue() == "café �\n"


def test_drivers_own_lines_are_written():
    out = bytearray()
    say = Console(out.extend, level="info", clock=lambda: "12:01:33")
    say("debug", "unseen")
    say("info", "generation 1 has 2 workers")
    say("error", "it wrote:\n  Traceback")
    recorded("messages", out.decode())
    out.clear()
    say = Console(out.extend, colour=True, clock=lambda: "12:01:33")
    say("warning", "slow")
    recorded("messages", out.decode())


def test_no_file_gets_the_descriptor_of_a_closed_standard_stream():
    """Otherwise output for stderr would be written to the file."""
    script = (
        "import os, sys; from elastic.driver.processes.console import replace_closed_streams;"
        "replace_closed_streams(); opened = os.open('/dev/null', os.O_RDONLY);"
        "sys.stderr.write('lost'); sys.stderr.flush(); print(opened, os.get_inheritable(2))"
    )
    command = ["/bin/sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=True)
    assert done.stdout == "3 True\n"


# ---- exceptions and stacks -----------------------------------------------------------------------


def raised(who: str = "x") -> bytes:
    return msgspec.json.encode(Uncaught("d", f"ValueError: {who}", "short\n", "whole\n")) + b"\n"


def test_exception_is_shown_once_with_the_first_rank_and_kept_for_each(tmp_path):
    told = []
    screen = Screen(folder=tmp_path, on_unlogged=lambda: told.append("unsaid"))
    screen.output.feed(A, "stderr", b"before\n")
    for worker in (A, B):
        screen.output.feed(worker, "diagnostics", raised()[:10])
        screen.output.feed(worker, "diagnostics", raised()[10:])
    assert screen.output.tail(B) == "whole\n" and screen.output.sent == {A, B}
    screen.shown()
    assert bytes(screen.err) == b"[0] before\n[0] short\n"
    assert told == ["unsaid"]
    kept = [(tmp_path / f"rank.{rank}" / "stderr").read_text() for rank in (0, 1)]
    recorded("messages", kept)


def test_output_printed_by_a_worker_is_unchanged(screen):
    printed = b'Traceback (most recent call last):\n  File "x", line 1\nValueError: x\n'
    for worker in (A, B):
        screen.output.feed(worker, "stderr", printed)
    screen.shown()
    assert bytes(screen.err).count(b"ValueError: x") == 2


STACKS = (
    b'Thread 0x01 (most recent call first):\n  File "/x/site-packages/torch/a.py", line 1 in a\n'
)
STACKS += b'  File "train.py", line 2 in b\n'


@pytest.mark.parametrize("asked", [False, True])
async def test_stacks_are_shown_unless_requested_by_an_operator(asked):
    heard = []
    screen = Screen(
        asked=lambda worker: asked,
        on_lines=lambda worker, name, stream, lines: heard.append(stream),
    )
    screen.output.feed(A, "diagnostics", STACKS)
    assert heard == ["diagnostics"] * 3
    screen.output.drop(A)  # it exits before they could be shown
    screen.shown()
    first = bytes(screen.err).split(b"\n")[0]
    assert first == (b"" if asked else b'[0]   File "train.py", line 2 in b')
