"""Formatting of a job's state as lines of text, in local time. `monitoring.dashboard.page_state` defines the state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from elastic.driver.monitoring.stalls import ENDS, StallEnd, as_sentence
from elastic.driver.reasons import ReasonKind, because, counted, start_checkpoint
from elastic.protocol.messages import Commit, at_step

State = dict[str, Any]
SHOWN = 64  # maximum number of workers to list
NO_RESPONSE = "not responding"  # phase of a job whose driver is stopped or overloaded


def status(state: State, *, most: int = SHOWN) -> list[str]:
    """Return lines with the state of a job, and one line for each worker, up to ``most`` workers."""
    now, values, rows = state["now"], state["set"], state["rows"]
    job, workers = values["job"], rows["workers"]
    lines = [
        f"job {job['name']}: {job['phase']}, {counted(job['size'], 'worker')} ({_limits(job)}),"
        f" generation {job['generation']}, for {span(now - (job['began'] or now))}"
    ]
    begins = values.get("begins")  # missing in reports of earlier versions
    if begins is not None:
        lines.append(f"  resumed from {start_checkpoint(begins)}")
    stall = values["stall"]
    if stall is not None:
        lines.append(f"  stalled for {span(now - stall['since'])}: {as_sentence(stall)}")
    # Reports of earlier versions contain no waits for a commit.
    wait = values.get("change_wait")
    if wait is not None:
        facts = {**wait, "for_s": now - wait["since"]}
        lines.append(f"  {because(ReasonKind.AWAITS_COMMIT, **facts)}")
    if job["phase"] == "starting" and job["size"]:
        lines.append(
            "  no worker has entered elastic.run: until then, a lost worker can end the job"
        )
    if job["ended"] is not None:
        lines.append(f"  ended with exit code {job['ended'][0]}: {job['ended'][1]}")
    lines.append(f"  {'; '.join(_progress(state))}")
    if values.get("shards"):  # missing in reports of earlier versions
        lines.append(f"  {values['shards']['text']}")
    last = [each for each in state["add"]["recoveries"] if each["kind"] == "recovery"][-1:]
    lines += [
        f"  last recovery {span(now - each['at'])} ago, in {each['total_ms']:.0f} ms: {each['why']}"
        + (f"; {each['shards']}" if each.get("shards") else "")
        for each in last
    ]
    for each in state["add"]["stalls"][-1:]:
        ago = span(now - each["since"] - each["seconds"])
        how = ENDS[StallEnd(each["end"])]
        lines.append(
            f"  last stall {ago} ago, for {span(each['seconds'])}: {as_sentence(each)}; {how}"
        )
    for each in values["held_up"] if stall is None else ():
        lines.append(f"  held up by {_held_up(each, now)}")
    for host, row in rows["hosts"].items():
        if row["state"] != "up":
            lines.append(f"  host {host} is {row['state']}{row['note'] and ': '}{row['note']}")
    # Reports of earlier versions contain no slots with failed health checks.
    lines += [
        f"  {because(ReasonKind.UNHEALTHY, **each)}; no worker is admitted there until one passes"
        for each in values.get("unhealthy", ())
    ]
    lines += [f"  {_quarantined(each)}" for each in values.get("quarantined", ())]
    merged = values.get("merged")  # missing in reports of earlier versions
    if merged is not None:
        late = ", ".join(merged["absent"])
        lines.append(
            f"  {merged['merges']} merges of {merged['islands']} islands, {merged['position']} inner steps"
            + (f"; the last merge did not wait for {late}" if late else "")
        )
    lines += [f"  mistake in the script: {text}" for text in values.get("mistakes", ())]
    table = [("rank", "worker", "state", "for", "process", "")]
    shown = sorted(workers.values(), key=_order)[:most]
    for row in shown:
        rank = "" if row["rank"] is None else str(row["rank"])
        worker = f"{row['host']}:{row['slot']}#{row['start']}"
        pid = str(row["pid"] or "")
        table.append((rank, worker, row["state"], span(now - row["since"]), pid, row["note"]))
    lines += columns(table)
    if len(workers) > len(shown):
        states = Counter(row["state"] for row in workers.values())
        summary = ", ".join(f"{count} {state}" for state, count in states.most_common())
        lines.append(f"... {len(workers)} in total: {summary}")
    return lines


def _quarantined(each: dict[str, Any]) -> str:
    evidence = because(ReasonKind.MISCOMPUTED, **each)
    return (
        f"{each['place']} is quarantined because of the worker in slot {each['slot']}: {evidence}"
    )


def job_row(
    name: str, pid: int, began: float, command: Sequence[str], state: State | None
) -> dict[str, Any]:
    """Return the row of one job in a list.

    Args:
        state: the state that the driver reports. None if the driver does not respond; the row then lacks these values.
    """
    row: dict[str, Any] = dict.fromkeys(("size", "least", "most", "generation", "stalled"))
    row["phase"] = NO_RESPONSE
    if state is not None:
        job = state["set"]["job"]
        row = {name: job[name] for name in ("phase", "size", "least", "most", "generation")}
        row["stalled"] = state["set"]["stall"] is not None
    return {"name": name, "pid": pid, "began": began, "command": list(command), **row}


def jobs(rows: Sequence[dict[str, Any]], now: float) -> list[str]:
    """Return the list of ``elasticrun jobs`` as lines of text."""
    if not rows:
        return ["no job of this user runs on this machine"]
    table = [("job", "driver", "phase", "workers", "for", "command")]
    for row in rows:
        workers = "unknown" if row["size"] is None else f"{row['size']} ({_limits(row)})"
        began = span(now - row["began"])
        command = " ".join(row["command"])
        phase = "stalled" if row["stalled"] else row["phase"]
        table.append((row["name"], str(row["pid"]), phase, workers, began, command[:60]))
    return columns(table)


def log_line(line: Sequence[Any]) -> str:
    """Format a line of the job's log with time and rank, for example ``12:01:33 [3] text``."""
    at, level, source, text = line
    mark = f"{level}: " if level in ("warning", "error") else ""
    return f"{clock(at)} {f'[{source}] ' if source else ''}{mark}{text}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _limits(job: dict[str, Any]) -> str:
    most = "all slots" if job["most"] >= 2**31 - 1 else job["most"]
    return f"{job['least']} to {most}"


def _order(row: dict[str, Any]) -> tuple[bool, int, str, int]:
    return row["rank"] is None, row["rank"] or 0, row["host"], row["slot"]


def _progress(state: State) -> list[str]:
    values, now = state["set"], state["now"]
    parts: list[str] = []
    commit = values["commit"]
    # texts of metrics, each with the time at which it was reported
    reported: list[tuple[str, float | None]] = []
    if commit is not None and commit.get("initial"):
        parts.append("no commit yet: the script has not called state.commit()")
    elif commit is not None:
        total = counted(commit["total"], "commit")
        reported.append((f"at {_commit(commit)}, {total} in all", commit["at"]))
    if values.get("steps") is not None:
        samples = values.get("samples")
        samples_text = "" if samples is None else f" ({samples:.4g} samples/s)"
        # Reports of earlier versions lack this time. In a stall, show no time, because the rate decays without new
        # reports.
        at = None if values["stall"] is not None else values.get("steps_at")
        reported.append((f"{values['steps']:.4g} steps/s{samples_text}", at))
    elif values["rate"] is not None:
        at = None if values["stall"] is not None or commit is None else commit["at"]
        reported.append((f"{values['rate']:g} commits/s", at))
    parts += _with_ages(reported, now)
    if commit is not None and commit.get("every", 1) > 1:
        parts.append(f"a failure repeats {commit['every']} steps at most")
    durable = values["durable"]
    if durable is not None:
        parts.append(f"durable {_commit(durable)} {span(now - durable['at'])} ago")
    goodput = values["goodput"]
    if goodput is not None and goodput["ratio"] is not None:
        parts.append(f"goodput {100 * goodput['ratio']:.1f} %")
    if goodput is not None and goodput["job"]["stalled"]:
        parts.append(f"stalled {span(goodput['job']['stalled'])} in total")
    parts += _with_ages(
        [
            (f"{name} {row['value']:.6g}", row["at"])
            for name, row in state["rows"]["reported"].items()
            if row["value"] is not None
        ],
        now,
    )
    return parts or ["no commit yet"]


def _with_ages(figures: Sequence[tuple[str, float | None]], now: float) -> list[str]:
    """Group metrics whose reports are equally old, and append the age to each group."""
    groups: dict[str, list[str]] = {}
    for text, at in figures:
        age = "" if at is None else f", reported {span(now - at)} ago"
        groups.setdefault(age, []).append(text)
    return [", ".join(texts) + age for age, texts in groups.items()]


def _held_up(each: dict[str, Any], now: float) -> str:
    name = f"rank {each['rank']} ({each['worker']})"
    if "since" in each:
        return (
            f"{name}: {counted(each['others'], 'worker')} waiting for {span(now - each['since'])}"
        )
    return f"{name}: waits {each['share']:.0%} of its time, the others {each['median']:.0%}"


def _commit(commit: dict[str, Any]) -> str:
    return at_step(Commit(commit["generation"], commit["number"]), commit.get("step"))
