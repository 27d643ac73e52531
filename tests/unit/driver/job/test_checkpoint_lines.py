"""Log lines about checkpoints: few while checkpoints are frequent, and always one for the last."""

from __future__ import annotations

from elastic.driver.job.checkpoint_lines import QUIET_S, CheckpointLines
from elastic.driver.job.checkpoint_shares import CheckpointCompleted
from elastic.protocol.messages import Commit
from harness.golden import recorded


class Spoken:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[str, str]] = []
        self.about = CheckpointLines(lambda: self.now, lambda *line: self.lines.append(line))

    def made(self, number: int) -> None:
        self.about.made(CheckpointCompleted(Commit(2, number), f"/shared/{number}", 400_000, 0.1))

    def info(self) -> list[str]:
        return [text.partition(":")[0] for level, text in self.lines if level == "info"]


def test_last_checkpoint_is_logged_at_the_end() -> None:
    job = Spoken()
    job.made(20)
    job.made(40)
    job.made(60)
    job.now += 12.4  # the storage accepts no more
    recorded("messages", job.info())
    job.about.ended()
    recorded("messages", job.info())


def test_logged_checkpoint_is_not_logged_again() -> None:
    job = Spoken()
    job.made(20)
    job.now += QUIET_S + 1
    job.made(40)
    job.about.ended()
    recorded("messages", job.info())


def test_checkpoint_after_the_end_is_logged() -> None:
    job = Spoken()
    job.made(20)
    job.about.ended()
    job.made(40)
    recorded("messages", job.info())
