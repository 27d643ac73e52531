"""``elasticrun checkpoints``: what a folder of checkpoints holds, whether it is whole, and what may go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.checkpoints import catalog
from elastic.checkpoints.catalog import CheckpointEntry
from elastic.checkpoints.storage import Storage
from elastic.driver.commandline.arguments import Parser, add_declared, flag, switch, whole
from elastic.errors import Invalid

DESCRIPTION = """\
Lists the checkpoints of a folder, oldest first, and says which of them can be taken."""


@dataclass
class CheckpointsOptions:
    """Flags as given."""

    verify: bool = switch(
        "--verify",
        "Read every file and compare its checksum; exit with 1 if one is damaged, or if there is no checkpoint.",
    )
    prune: int | None = flag(
        "--prune",
        "N",
        "Remove all but the newest N, and what was never completed. No job may be writing here.",
        whole(1),
    )


def parser() -> Parser:
    """All flags of ``elasticrun checkpoints``."""
    made = Parser(
        prog="elasticrun checkpoints",
        usage="elasticrun checkpoints [flags] DIR-OR-URL",
        description=DESCRIPTION,
    )
    add_declared(made.group("what to do"), CheckpointsOptions)
    made.group("general")("-h --help", None, None, "Show this.", action="help")
    return made


def main(arguments: Sequence[str]) -> int:
    """The exit code. Raises Invalid."""
    options = CheckpointsOptions()
    wanted = "give one folder, as in: elasticrun checkpoints /shared/checkpoints"
    folder = parser().with_one(arguments, options, wanted)
    storage = Storage(folder)
    try:
        if options.prune is not None:
            for name in catalog.prune(storage, options.prune):
                print(f"removed {name}")
        entries = [catalog.entry(storage, name) for name in catalog.names(storage)]
        if not entries:
            if not storage.exists():
                raise Invalid(f"{storage.url}: there is no such folder")
            print(f"{storage.url} has no checkpoints")
            return 1 if options.verify else 0
        damaged = 0
        for entry in entries:
            trouble = entry.trouble
            if entry.manifest is not None and options.verify:
                trouble = catalog.verify(storage, entry.manifest)
            damaged += bool(trouble) and not entry.torn
            print(_line(entry, trouble, verified=options.verify))
        return 1 if damaged else 0
    except OSError as error:
        raise Invalid(f"{storage.url} can't be read: {error}") from error


def _line(entry: CheckpointEntry, trouble: str, *, verified: bool) -> str:
    found = entry.manifest
    head = f"{entry.name}  commit {entry.name.commit}"
    if found is None or trouble:
        return f"{head}  {trouble}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.written_at))
    workers = "1 worker" if found.size == 1 else f"{found.size} workers"
    state = "verified" if verified else "complete"
    return f"{head}  {when}  {found.bytes / 1e6:.1f} MB  by {workers}  {state}"
