"""A line that stays at the bottom of a terminal: what the terminal is sent, piece by piece."""

from __future__ import annotations

import pytest

from elastic.driver.processes.status_line import DIM, ERASE, PLAIN, StatusLine


class Terminal:
    """Keeps rows as a terminal of 40 columns shows them."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.line = StatusLine(self.sent.append, lambda: 40)

    @property
    def rows(self) -> list[str]:
        text = b"".join(self.sent).decode().replace(DIM, "").replace(PLAIN, "")
        rows = [""]
        for part in text.replace(ERASE.decode(), "\0").replace("\n", "\n\1").split("\1"):
            for piece in part.split("\0"):
                if piece is not part.split("\0")[0]:
                    rows[-1] = ""
                rows[-1] += piece.rstrip("\n")
            if part.endswith("\n"):
                rows.append("")
        return rows


def test_lines_scroll_by_above_it():
    terminal = Terminal()
    terminal.line.write(b"first\n")
    terminal.line.show(b"bert: 4 workers")
    terminal.line.write(b"second\n")
    terminal.line.write(b"third\n")
    assert terminal.rows == ["first", "second", "third", "bert: 4 workers"]
    terminal.line.show(b"bert: 3 workers")
    assert terminal.rows == ["first", "second", "third", "bert: 3 workers"]


def test_at_the_end_nothing_of_it_is_left():
    terminal = Terminal()
    terminal.line.show(b"bert: 4 workers")
    terminal.line.write(b"last\n")
    terminal.line.show(b" ")
    terminal.line.write(b"more\n")
    assert terminal.rows == ["last", "more", ""]


def test_a_progress_bar_is_left_alone():
    terminal = Terminal()
    terminal.line.show(b"bert: 4 workers")
    terminal.line.write(b"10 %")
    terminal.line.show(b"bert: 3 workers")
    terminal.line.write(b"\r20 %")
    assert terminal.sent[-2:] == [ERASE + b"10 %", b"\r20 %"]
    terminal.line.write(b"\rdone\n")
    assert terminal.sent[-1].startswith(b"\rdone\n") and b"bert: 3 workers" in terminal.sent[-1]


@pytest.mark.parametrize("text", ["x" * 100, "漢" * 50, "a\x1b[2Jb\nc"])
def test_it_is_one_row_and_nothing_that_a_terminal_obeys(text):
    terminal = Terminal()
    terminal.line.show(text.encode())
    [sent] = terminal.sent
    shown = sent.decode().removeprefix(DIM).removesuffix(PLAIN)
    assert shown.isprintable() and len(shown) <= 39
