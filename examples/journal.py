"""Read the journal of `elasticrun --journal FILE` while the job runs: members, process IDs and events.

The script prints one JSON object per line: ``{"at": seconds, "event": {...}, "actions": [{...}, ...]}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def lines(file: Path) -> Iterator[Json]:
    """Iterate over the complete lines of a file of JSON objects."""
    if file.exists():
        whole, _, _ = file.read_text().rpartition("\n")
        yield from (json.loads(line) for line in whole.splitlines() if line)


def events(file: Path, *kinds: str) -> Iterator[tuple[float, Json]]:
    """Iterate over (time, event) of these types."""
    for entry in lines(file):
        event = entry.get("event")
        if event and event["type"] in kinds:
            yield entry["at"], event


def actions(file: Path, *kinds: str) -> Iterator[tuple[float, Json]]:
    """Iterate over (time, action) of these types."""
    for entry in lines(file):
        for action in entry.get("actions") or ():
            if action["type"] in kinds:
                yield entry["at"], action


def pids(file: Path) -> list[int]:
    """Return the processes of the newest world in the order of their ranks.

    There are none before the first world or after the end of training, since the death of a worker would then fail the
    job.
    """
    if any(actions(file, "EndJob")):
        return []
    started = {tuple(event["worker"]): event["pid"] for _, event in events(file, "WorkerConnected")}
    members: list[Json] = []
    for _, world in actions(file, "PublishWorld"):
        members = world["members"]
    return [started[tuple(member["worker"])] for member in members]


def elasticrun() -> list[str]:
    """Return the command of this interpreter's environment."""
    command = Path(sys.executable).with_name("elasticrun")
    if not command.exists():
        raise SystemExit(f"{command} is not installed: run pip install -e . (or make install)")
    return [str(command)]
