"""State of a live page: its sections, pending changes, and patches. Pure: no I/O, no clock.

A state is a dict of three kinds of sections. A patch updates a state. `applied` implements this in Python, and the
page's script in the browser:

    {"now": 1790000000.0,                          seconds since 1970, as are all times
     "set":  {"job": {...}, "commit": {...}},      values, replaced as a whole
     "rows": {"workers": {"h:0": {...} | null}},   tables: rows by key; null removes a row
     "add":  {"log": [[...], ...]}}                series: items to append; the oldest beyond TAILS are removed

The whole state is the patch that creates it from nothing (`full`). The sections:

    set   job         name, command, phase, generation, size, least, most, began, ended: null or [exit code, why]
          begins      null, or the checkpoint from which the job begins: name, place, and step or null
          commit      generation, number, at, total: the newest known commit, and the number of commits; step: that
                      of the state at the commit, if it has one
          durable     the same for the newest complete checkpoint; total counts checkpoints
          shards      null, or the division of a sharded state: workers, shards, copy_hosts, sealed (commit), step,
                      and text: all of these as a sentence
          steps       optimizer steps per second now, decaying like rate; null: unknown, or none was observed
          samples     samples per second of all workers; null: no loader reports its batch size
          steps_at    time of the report from which steps and samples were computed; null: no such report
          rate        commits per second now, decaying to 0 while none are possible; null: unknown
          stall       null, or the current stall: since, seconds, culprits: [{rank, worker, line, frozen}], more: number
                      of culprits that are not listed, others: number of waiting ranks, where and line: collective
                      and script line of the first waiting rank
          change_wait null, or the current wait of a planned change for a commit: since, for_s, joining and leaving:
                      numbers of workers, workers: the first joining workers
          goodput     workers: seconds by part; job: seconds by stretch, until at; counts: number of stretches by kind;
                      ratio: training / all, or null before training
          unhealthy   [{slot, outcome, code, line, took_s}]: slots whose last health check failed
          quarantined [{place, slot, step, shard, digest, right, witnesses, agreed}]: slots or hosts that are no
                      longer used because a worker computed wrong gradients, with the evidence
          held_up     [{worker, rank, others, since} or {worker, rank, share, median}]: workers for which others
                      currently wait, and workers that wait less than the others, worst first
          slowest     null, or the member with the longest time per step outside collectives: worker, rank, own_s,
                      step_s, and median_s: the median of own_s
    rows  hosts       by name: slots, state (up, leaving, drained, lost), order, note
          workers     by host:slot: host, slot, start, pid, rank, state (STATES), since, note, awaits: ranks that the
                      worker waits for in a stall; step_s: seconds from one commit to the next in its last report;
                      own_s: the part of step_s outside collectives; null: not reported in this world; usage: cores,
                      memory, gpu, gpu_memory, see sinks.Usage
          stacks      by host:slot: at, why, text
          reported    by name: rank, value, at: the latest number that the lowest reporting rank reported under the name
    add   world       [at, size]: each change of the size
          speed       [at, commits per second]
          metrics     [at, name, value]: the values of `reported`, at most once a second for each name
          stalls      past ones: as stall, with end: resumed, killed, lost, broken, job ended
          recoveries  {at, kind, generation, size, total_ms, phases_ms, why, shards}; shards: where lost shards of a
                      sharded state came from, or ""
          decisions   [at, action, target, reason]
          log         [at, level, source, line]: an empty source is the driver
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

Patch = dict[str, Any]
TAILS = {
    "world": 1000,
    "speed": 1000,
    "metrics": 8000,  # maximum number of stored points, for all reported names together
    "stalls": 200,
    "recoveries": 200,
    "decisions": 200,
    "log": 500,
}


@dataclass
class Pending:
    """Changes of a page that the next patch will contain."""

    values: set[str] = field(default_factory=set)
    rows: dict[str, set[str]] = field(default_factory=dict)
    add: dict[str, list[Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values or self.rows or self.add)


class PageState:
    """All sections of one live page, and their changes since the last patch."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.tables: dict[str, dict[str, Any]] = {
            "hosts": {},
            "workers": {},
            "stacks": {},
            "reported": {},
        }
        self.series: dict[str, deque[Any]] = {n: deque(maxlen=tail) for n, tail in TAILS.items()}
        # total number of items added to each series
        self.counts: dict[str, int] = dict.fromkeys(TAILS, 0)
        self._pending = Pending()

    @property
    def changed(self) -> bool:
        """Return whether anything has changed since the last patch."""
        return bool(self._pending)

    def set(self, name: str, value: Any) -> None:
        """Set the value of a section."""
        self.values[name] = value
        self._pending.values.add(name)

    def row(self, table: str, key: str, row: Any) -> None:
        """Set a row of a table, or remove it if ``row`` is None."""
        if row is None:
            self.tables[table].pop(key, None)
        else:
            self.tables[table][key] = row
        self._pending.rows.setdefault(table, set()).add(key)

    def add(self, name: str, item: Any) -> None:
        """Append an item to a series."""
        self.series[name].append(item)
        self.counts[name] += 1
        items = self._pending.add.setdefault(name, [])
        items.append(item)
        # Limits the memory if no patch is requested for a long time.
        if len(items) > 2 * TAILS[name]:
            del items[: TAILS[name]]

    def since(self, name: str, after: int) -> tuple[int, list[Any]]:
        """Return the number of the last item of a series, and the stored items with numbers above ``after``."""
        last = self.counts[name]
        wanted = max(0, last - max(0, after))
        return last, list(self.series[name])[-wanted:] if wanted else []

    def patch(self, now: float) -> Patch:
        """Return the changes of the page since the last patch."""
        pending, self._pending = self._pending, Pending()
        return {
            "now": now,
            "set": {name: self.values[name] for name in pending.values},
            "rows": {
                table: {key: self.tables[table].get(key) for key in keys}
                for table, keys in pending.rows.items()
            },
            "add": {name: items[-TAILS[name] :] for name, items in pending.add.items()},
        }

    def full(self, now: float) -> Patch:
        """Return the whole state of the page as a patch.

        Call `patch` first, because the state already includes pending changes.
        """
        return {
            "now": now,
            "set": self.values,
            "rows": self.tables,
            "add": {name: list(items) for name, items in self.series.items()},
        }


def applied(state: Patch | None, patch: Patch) -> Patch:
    """Apply a patch to a state and return the new state. The arguments are not modified.

    Args:
        state: the state before the patch. None means the empty state.
        patch: the changes.
    """
    before = state or {"set": {}, "rows": {}, "add": {}}
    rows = {table: dict(keys) for table, keys in before["rows"].items()}
    for table, keys in patch["rows"].items():
        known = rows.setdefault(table, {})
        for key, row in keys.items():
            if row is None:
                known.pop(key, None)
            else:
                known[key] = row
    add = {
        name: [*before["add"].get(name, ()), *patch["add"].get(name, ())][-tail:]
        for name, tail in TAILS.items()
    }
    return {"now": patch["now"], "set": {**before["set"], **patch["set"]}, "rows": rows, "add": add}
