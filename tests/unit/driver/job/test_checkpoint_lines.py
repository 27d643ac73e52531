"""What the log says of checkpoints: few lines while they are frequent, and the last one in any case."""

from __future__ import annotations

from elastic.driver.job.checkpoint_lines import QUIET_S, CheckpointLines
from elastic.driver.job.checkpoint_shares import Made
from elastic.protocol.messages import Commit
from harness.golden import recorded


class Spoken:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[str, str]] = []
        self.about = CheckpointLines(lambda: self.now, lambda *line: self.lines.append(line))

    def made(self, number: int) -> None:
        self.about.made(Made(Commit(2, number), f"/shared/{number}", 400_000, 0.1))

    def info(self) -> list[str]:
        return [text.partition(":")[0] for level, text in self.lines if level == "info"]


def test_the_last_one_is_said_at_the_end() -> None:
    job = Spoken()
    job.made(20)
    job.made(40)
    job.made(60)
    job.now += 12.4  # the storage takes no more
    recorded("messages", job.info())
    job.about.ended()
    recorded("messages", job.info())


def test_what_was_said_is_not_said_again() -> None:
    job = Spoken()
    job.made(20)
    job.now += QUIET_S + 1
    job.made(40)
    job.about.ended()
    recorded("messages", job.info())


def test_one_that_comes_after_the_end_is_said() -> None:
    job = Spoken()
    job.made(20)
    job.about.ended()
    job.made(40)
    recorded("messages", job.info())
