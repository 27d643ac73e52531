"""The state of a job in one line: how many train, how far, how fast, and what was decided last. Pure."""

from __future__ import annotations

from elastic.driver.monitoring.dashboard.page_state import PageState
from elastic.driver.reasons import counted


def one_line(state: PageState) -> str:
    """``bert: 4 workers, generation 5 | step 960, 15.9 commits/s, loss 0.02 | recovered in 24 ms: lost h:1#1``."""
    job, reported = state.values["job"], state.tables["reported"]
    if not job["generation"]:
        return f"{job['name']}: {job['phase']}"
    size = counted(job["size"], "worker")
    phase = "" if job["phase"] == "training" else f" ({job['phase']})"
    parts = [f"{job['name']}: {size}, generation {job['generation']}{phase}"]
    far = []
    step, commit = reported.get("step"), state.values["commit"]
    if step is not None and step["value"] is not None:
        far.append(f"step {step['value']:.0f}")
    elif commit is not None:
        far.append(counted(commit["total"], "commit"))
    if state.series["speed"]:
        far.append(f"{state.series['speed'][-1][1]:g} commits/s")
    loss = reported.get("loss")
    if loss is not None and loss["value"] is not None:
        far.append(f"loss {loss['value']:.4g}")
    if far:
        parts.append(", ".join(far))
    if state.series["recoveries"]:
        last = state.series["recoveries"][-1]
        verb = "recovered" if last["kind"] == "recovery" else "changed"
        if last["kind"] != "start":
            parts.append(f"{verb} in {last['total_ms']:.0f} ms: {last['why']}")
    return " | ".join(parts)
