"""Reads what `elasticrun --journal FILE` writes while the job runs: who trains, under which process id, what happened.

One JSON object per line: ``{"at": seconds, "event": {...}, "actions": [{...}, ...]}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def lines(file: Path) -> Iterator[Json]:
    """The whole lines of a file of JSON objects; one that is still being written is left for later."""
    if file.exists():
        whole, _, _ = file.read_text().rpartition("\n")
        yield from (json.loads(line) for line in whole.splitlines() if line)


def events(file: Path, *kinds: str) -> Iterator[tuple[float, Json]]:
    """When and what: the events of these types."""
    for entry in lines(file):
        event = entry.get("event")
        if event and event["type"] in kinds:
            yield entry["at"], event


def actions(file: Path, *kinds: str) -> Iterator[tuple[float, Json]]:
    """When and what: the actions of these types."""
    for entry in lines(file):
        for action in entry.get("actions") or ():
            if action["type"] in kinds:
                yield entry["at"], action


def pids(file: Path) -> list[int]:
    """The processes of the newest world in the order of their ranks; none before the first world, and once training has
    ended: a worker that dies in what comes after that fails the job.
    """
    if any(actions(file, "EndJob")):
        return []
    started = {tuple(event["worker"]): event["pid"] for _, event in events(file, "WorkerConnected")}
    members: list[Json] = []
    for _, world in actions(file, "PublishWorld"):
        members = world["members"]
    return [started[tuple(member["worker"])] for member in members]


def elasticrun() -> list[str]:
    """The command that belongs to this interpreter."""
    command = Path(sys.executable).with_name("elasticrun")
    if not command.exists():
        raise SystemExit(f"{command} isn't installed; run: pip install -e .   (or: make install)")
    return [str(command)]
