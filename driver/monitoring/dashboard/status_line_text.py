"""One-line status of a job: workers, progress, speed, and the last recovery. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.driver.monitoring.dashboard.page_state import PageState
from elastic.driver.monitoring.stalls import as_sentence
from elastic.driver.reasons import counted

PACE_S = 60.0


def one_line(state: PageState) -> str:
    """Return the state of a job as one line.

    For example ``bert: 4 workers, generation 5 | step 960 of 2000, 15.9 commits/s, 2 min left, loss 0.02 | recovered in
    24 ms: lost h:1#1``. The line includes the total number of steps if the script reports it as ``steps``.
    """
    job, reported = state.values["job"], state.tables["reported"]
    if not job["generation"]:
        return f"{job['name']}: {job['phase']}"
    size = counted(job["size"], "worker")
    phase = "" if job["phase"] == "training" else f" ({job['phase']})"
    parts = [f"{job['name']}: {size}, generation {job['generation']}{phase}"]
    far = []
    step, steps = (_value(reported, name) for name in ("step", "steps"))
    if step is not None and steps is not None and steps < step:
        # The script reports another quantity under this name, for example environment steps.
        steps = None
    commit = state.values["commit"]
    if step is not None:
        far.append(f"step {step:.0f}" + (f" of {steps:.0f}" if steps is not None else ""))
    elif commit is not None and commit.get("step") is not None:
        far.append(f"step {commit['step']}")
    elif commit is not None:
        far.append(counted(commit["total"], "commit"))
    if state.values["steps"] is not None:
        far.append(f"{state.values['steps']:.4g} steps/s")
    elif state.values["rate"] is not None:
        far.append(f"{state.values['rate']:g} commits/s")
    stall = state.values["stall"]
    left_s = None if steps is None or stall is not None else _left_s(state, steps)
    if left_s is not None:
        far.append(f"{_roughly(left_s)} left")
    loss = _value(reported, "loss")
    if loss is not None:
        far.append(f"loss {loss:.4g}")
    if far:
        parts.append(", ".join(far))
    if stall is not None:
        parts.append(f"stalled for {stall['seconds']:.0f} s: {as_sentence(stall)}")
    elif state.series["recoveries"]:
        last = state.series["recoveries"][-1]
        verb = "recovered" if last["kind"] == "recovery" else "changed"
        if last["kind"] != "start":
            parts.append(f"{verb} in {last['total_ms']:.0f} ms: {last['why']}")
    return " | ".join(parts)


def _value(reported: Mapping[str, Any], name: str) -> float | None:
    row = reported.get(name)
    value: float | None = None if row is None else row["value"]
    return value


def _left_s(state: PageState, steps: float) -> float | None:
    reported_steps = [(at, value) for at, name, value in state.series["metrics"] if name == "step"]
    recent = [
        each for each in reported_steps[:-2] if each[0] >= reported_steps[-1][0] - PACE_S
    ] + reported_steps[-2:]
    if len(recent) < 2:
        return None
    (began, first), (now, last) = recent[0], recent[-1]
    return max(0.0, steps - last) * (now - began) / (last - first) if last > first else None


def _roughly(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
