"""A recovery as a line of the log. Pure."""

from __future__ import annotations

from elastic.driver.events import ReportRecovery


def recovery_line(report: ReportRecovery) -> str:
    """``recovered in 83 ms, generation 5, 3 workers: lost localhost:2#1 (signal 9 SIGKILL) | told 2, cut 5, ...``"""
    verb = {"recovery": "recovered", "change": "changed", "start": "started"}.get(
        report.kind, report.kind
    )
    noun = "worker" if report.size == 1 else "workers"
    phases = ", ".join(f"{name} {_ms(ms)}" for name, ms in report.phases_ms.items())
    copied = f"; copied {report.copied_bytes / 1e6:.1f} MB" if report.copied_bytes else ""
    return (
        f"{verb} in {_ms(report.total_ms)} ms, generation {report.generation},"
        f" {report.size} {noun}: {report.reason}{' | ' if phases else ''}{phases}{copied}"
    )


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if 0 < ms < 1 else f"{ms:.0f}"
