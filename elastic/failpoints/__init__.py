"""Failpoints: named places in a worker where a test can inject a fault.

Without rules, a place costs one read of a global variable.

    ELASTIC_FAILPOINTS="bucket kill rank=2 step=7; before-commit slow=0.5 slot=1"   rules, or
    ELASTIC_FAILPOINTS=@FILE                                                        a file that holds rules

A rule is a place, an action and conditions. Rules are separated by ``;`` or newlines. Scripts can define their
own places: ``failpoint("evaluation")``. The built-in places:

    rendezvous        the worker has reported ready and waits for a world
    bucket            a gradient bucket is about to be sent
    shard-gradient    elastic.Shards: a backward pass has computed the gradient of a parameter (flip=gradient:SEED)
    optimizer-step    gradients are averaged; parameters are not changed yet
    zero-gather       zero=1: this rank has updated its part of the parameters, but lacks the other parts
    commit            a commit is about to be made
    snapshot          a part of the state was copied for a commit; other parts may follow
    hold              the worker waits at the safepoint of a planned change, or waits for the safepoint's number
    state-copy        state transfer: between the header and the tensors
    cut               the worker was notified that the world has ended; its collectives have not ended yet
    shutdown          in ``shutdown()``
    shard-copy        fully sharded state: this rank's shard is about to be copied
    shard-mirror      fully sharded state: the copy is about to be sent to other ranks
    shard-seal        fully sharded state: it is not known yet whether all ranks have their copies
    shard-moved       fully sharded state: in a new world, this rank has received its rows
    shard-placed      fully sharded state: in a new world, the rows are in place
    durable-file      durable commit: half of this rank's part is written
    durable-share     durable commit: this rank's part is written
    durable-manifest  durable commit: the manifest is about to be written
    durable-sealed    durable commit: the manifest is written
    durable-load      rank 0 is about to read a durable commit
    health-check      built-in health check: a result is about to be compared (flip=product:SEED)
    durable-rows      each rank is about to read its rows of a durable commit

Actions: kill, term, stop, segv, exit=CODE, raise=TEXT, hold-gil=S, hold-gil-busy=S, shut, slow=S, disk-full,
out-of-memory, wait=FILE, flip=WHAT:SEED (a bit of the state's weights, moments or gradients). See
`elastic.failpoints.actions`.

Conditions: worker, other-than, host, slot, incarnation, rank, size, generation, step (see `set_step`), each with one or
several values, as in ``rank=0,2``. ``hit=3`` means the third time that the other conditions hold. A rule takes effect
once per process, or repeatedly, every fifth time, with ``every=5`` (not in a file).

A file is reloaded whenever it is replaced (write the new rules to another file and rename it). A rule in a file takes
effect in ``victims=N`` processes (default: 1), which wait for each other so that they are hit at the same time; each
creates a file ``FILE.ID.N`` with its identity and the time. ``id=`` gives the ID (default: the place).
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from elastic.errors import Invalid
from elastic.failpoints.rules import Rule, parse
from elastic.rendezvous import worker_settings

_text = worker_settings.failpoints()
_lock = threading.Lock()
_rules: list[Rule] = []
_read: object = None  # the rules, or the file that contains them; None until they are read
_met: dict[Rule, int] = {}
_step = ""


def failpoint(place: str) -> None:
    """Inject a fault if ELASTIC_FAILPOINTS contains a rule for this place whose conditions hold."""
    if _text:
        _reached(place)


def check() -> None:
    """Raise Invalid if ELASTIC_FAILPOINTS cannot be parsed. This function is called by ``init()``."""
    if _text:
        with _lock:
            _load()


def use(text: str) -> None:
    """Set the rules of this process, or the file that contains them, in place of those in the environment."""
    global _text, _read
    with _lock:
        _text, _read = text, None
        _rules.clear()
        _met.clear()


def in_use() -> bool:
    """Return whether this process may have rules."""
    return bool(_text)


def set_step(step: int) -> None:
    """Set the number of the current training step, for conditions such as ``step=7``."""
    global _step
    _step = str(step)


def _reached(place: str) -> None:
    with _lock:
        _load()
        struck = None
        facts: dict[str, str] | None = None
        for rule in _rules:
            if rule.place != place:
                continue
            facts = _facts() if facts is None else facts
            if not rule.means(facts):
                continue
            _met[rule] = _met.get(rule, 0) + 1
            if rule.due(_met[rule]):
                struck = rule
                break
    if struck is not None and facts is not None:
        from elastic.failpoints import actions

        file = Path(_text[1:]) if _text.startswith("@") else None
        actions.strike(struck, facts, file)


def _load() -> None:
    global _rules, _read
    if not _text.startswith("@"):
        if _read is None:
            _rules, _read = parse(_text), _text
        return
    try:
        status = os.stat(_text[1:])
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != _read:
            _rules, _read = parse(Path(_text[1:]).read_text()), seen
            _met.clear()
    except OSError as error:
        raise Invalid(
            f"ELASTIC_FAILPOINTS is {_text!r}, but this file can't be read: {error.strerror}. Create the file"
            " before the job starts"
        ) from error


def _facts() -> dict[str, str]:
    worker = worker_settings.worker()
    facts = {
        "worker": str(worker),
        "host": worker.host,
        "slot": str(worker.slot),
        "incarnation": str(worker.incarnation),
        "step": _step,
    }
    # The module is looked up and not imported, because a script may use failpoints before it imports torch.
    runtime = sys.modules.get("elastic.runtime.lifecycle")
    active = runtime.active() if runtime is not None else None
    if active is not None:
        facts |= {
            "rank": str(active.place.rank),
            "size": str(active.place.size),
            "generation": str(active.generation),
        }
    return facts
