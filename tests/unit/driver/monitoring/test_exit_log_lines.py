"""Log lines for many workers that exit at once."""

from __future__ import annotations

from elastic.driver.monitoring.exit_log_lines import ExitLines
from elastic.driver.reasons import ReasonKind, because
from harness.golden import recorded


def cools(slot: int, ended: str = "exit code 1"):
    return because(ReasonKind.SLOT_COOLS, worker=f"h:{slot}#1", exit=ended, wait_s=1.0)


async def test_first_exit_is_logged_at_once_and_later_ones_together():
    logged: list[tuple[str, str]] = []
    lines = ExitLines(lambda level, text: logged.append((level, text)))
    assert [lines.shares("warning", cools(slot)) for slot in range(16)] == [False] + [True] * 15
    assert lines.shares("warning", cools(16, "exit code 3")) and not logged
    assert not lines.shares("debug", None) and not logged
    assert not lines.shares("warning", because(ReasonKind.STRANDED))
    assert [level for level, _ in logged] == ["warning"] * 2
    assert "15 " in logged[0][1]
    recorded("log", logged[1][1])
    lines.flush()
    assert len(logged) == 2 and not lines.shares("warning", cools(1)), "from here on anew"


async def test_exits_at_startup_when_the_job_fails_then_no_cooldown_is_logged():
    levels: list[str] = []
    lines = ExitLines(lambda level, text: levels.append(level))
    assert lines.shares("warning", cools(0), starting=True) and lines.shares(
        "warning", cools(1), starting=True
    )
    assert not levels
    lines.job_failed()
    assert levels == ["debug"] * 2
    lines.flush()
    assert levels == ["debug"] * 2


async def test_exits_at_startup_when_the_job_continues_then_each_is_logged_once():
    levels: list[str] = []
    lines = ExitLines(lambda level, text: levels.append(level))
    assert lines.shares("warning", cools(0), starting=True) and lines.shares(
        "warning", cools(1), starting=True
    )
    lines.flush()
    assert levels == ["warning"] * 2


async def test_exits_in_a_world_when_the_job_fails_then_are_summarized():
    levels: list[str] = []
    lines = ExitLines(lambda level, text: levels.append(level))
    assert not lines.shares("warning", cools(0)) and lines.shares("warning", cools(1))
    lines.job_failed()
    assert not levels
    lines.flush()
    assert levels == ["warning"]
