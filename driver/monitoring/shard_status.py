"""Status of a sharded state: its partition among workers, the sealed commit, and the sources of lost shards.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from elastic.driver import events
from elastic.driver.events import ShardsDivided
from elastic.driver.reasons import counted
from elastic.protocol.messages import Commit

Facts = Mapping[str, Any]
# display text for each field of `RowBytes`, which states the source of a lost shard's rows
_ORIGINS = {
    "memory": "a copy in its new worker's memory",
    "host": "memory of its host",
    "network": "another host",
    "checkpoint": "the checkpoint",
}


class ShardStatus:
    """Latest status of the sharded state of one job. If the state is not sharded, `facts` is None."""

    def __init__(self) -> None:
        self._workers = 0
        # Partition of the state in the newest world in which all members have trained.
        self._divided: ShardsDivided | None = None
        self._sealed: Commit | None = None
        self._step: int | None = None  # step counter of the state at the newest sealed commit

    def note(self, event: events.Event, actions: Sequence[events.Action]) -> bool:
        """Record an event and its actions. Return whether `facts` may have changed."""
        changed = False
        match event:
            case events.WorkerReady(shards=held) if held is not None and held.sealed is not None:
                changed = self._seals(held.sealed, None)
            case events.WorkerSpent(sealed=Commit() as sealed, step=step):
                changed = self._seals(sealed, step)
        for action in actions:
            if isinstance(action, events.ReportRecovery) and action.shards is not None:
                self._workers, self._divided = action.size, action.shards
                changed = True
        return changed

    def _seals(self, commit: Commit, step: int | None) -> bool:
        if self._sealed is not None and commit < self._sealed:
            return False
        if commit == self._sealed and (step is None or step == self._step):
            return False
        self._sealed, self._step = commit, step
        return True

    @property
    def facts(self) -> dict[str, Any] | None:
        """Return the values for `as_sentence`, or None before all workers of a world have reported their shards."""
        if self._divided is None:
            return None
        return {
            "workers": self._workers,
            "shards": self._divided.shards,
            "copy_hosts": self._divided.copy_hosts,
            "sealed": None if self._sealed is None else str(self._sealed),
            "step": self._step,
        }


def as_sentence(facts: Facts) -> str:
    """Describe a sharded state, for example ``sharded over 4 workers, copies on 1 other host, sealed step 120``."""
    shards = (
        "" if facts["shards"] == facts["workers"] else f" in {counted(facts['shards'], 'shard')}"
    )
    hosts = facts["copy_hosts"]
    copies = f"copies on {counted(hosts, 'other host')}" if hosts else "no copies on other hosts"
    sealed = f"step {facts['step']}" if facts["step"] is not None else f"commit {facts['sealed']}"
    known = facts["step"] is not None or facts["sealed"] is not None
    return f"sharded over {counted(facts['workers'], 'worker')}{shards}, {copies}" + (
        f", sealed {sealed}" if known else ""
    )


def recovery_facts(divided: ShardsDivided | None) -> dict[str, Any] | None:
    """Return the values for `source_sentence`, or None if the state is not sharded."""
    if divided is None:
        return None
    return {
        "lost": list(divided.lost),
        "from": msgspec.structs.asdict(divided.lost_rows),
        "read": divided.rows.checkpoint,
        "received": divided.received,
        "restored": None if divided.restored is None else str(divided.restored),
    }


def source_sentence(facts: Facts | None) -> str:
    """Describe the sources of lost shards, for example ``shard 2 from another host, 1.3 MB sent``.

    The description is empty if no shards were lost.
    """
    if facts is None:
        return ""
    if facts["read"]:
        return f"all shards from the checkpoint, {_megabytes(facts['read'])} read"
    sent = f"{_megabytes(facts['received'])} sent" if facts["received"] else "nothing sent"
    if not facts["lost"]:
        return ""
    origins = [text for name, text in _ORIGINS.items() if facts["from"][name]]
    shards = ", ".join(map(str, facts["lost"][:8]))
    more = f" and {len(facts['lost']) - 8} more" if len(facts["lost"]) > 8 else ""
    word = "shard" if len(facts["lost"]) == 1 else "shards"
    return f"{word} {shards}{more} from {' and '.join(origins) or 'no rows'}, {sent}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
