"""Status line at the bottom of a terminal: the bytes written to the terminal."""

from __future__ import annotations

import pytest

from elastic.driver.processes.status_line import DIM, ERASE, PLAIN, StatusLine


class Terminal:
    """Keeps the rows that a terminal of 40 columns shows."""

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


def test_lines_scroll_above_the_status_line():
    terminal = Terminal()
    terminal.line.write(b"first\n")
    terminal.line.show(b"bert: 4 workers")
    terminal.line.write(b"second\n")
    terminal.line.write(b"third\n")
    assert terminal.rows == ["first", "second", "third", "bert: 4 workers"]
    terminal.line.show(b"bert: 3 workers")
    assert terminal.rows == ["first", "second", "third", "bert: 3 workers"]


def test_status_line_is_removed_at_the_end():
    terminal = Terminal()
    terminal.line.show(b"bert: 4 workers")
    terminal.line.write(b"last\n")
    terminal.line.show(b" ")
    terminal.line.write(b"more\n")
    assert terminal.rows == ["last", "more", ""]


def test_progress_bar_is_not_overwritten():
    terminal = Terminal()
    terminal.line.show(b"bert: 4 workers")
    terminal.line.write(b"10 %")
    terminal.line.show(b"bert: 3 workers")
    terminal.line.write(b"\r20 %")
    assert terminal.sent[-2:] == [ERASE + b"10 %", b"\r20 %"]
    terminal.line.write(b"\rdone\n")
    assert terminal.sent[-1].startswith(b"\rdone\n") and b"bert: 3 workers" in terminal.sent[-1]


@pytest.mark.parametrize("text", ["x" * 100, "漢" * 50, "a\x1b[2Jb\nc"])
def test_status_line_is_one_row_without_control_characters(text):
    terminal = Terminal()
    terminal.line.show(text.encode())
    [sent] = terminal.sent
    shown = sent.decode().removeprefix(DIM).removesuffix(PLAIN)
    assert shown.isprintable() and len(shown) <= 39
