"""``elasticrun checkpoints``: what a folder of checkpoints holds, whether it is whole, and what may go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.checkpoints import catalog
from elastic.checkpoints.catalog import CheckpointEntry
from elastic.checkpoints.files.storage import Storage
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
            writer = catalog.writing_here(storage)
            if writer is not None:
                raise Invalid(
                    f"{storage.url}: process {writer.pid} of this machine writes its checkpoints there, and removes old"
                    " ones itself (--checkpoint-keep); prune it once that has ended"
                )
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
            looked_at = _verified(storage, entry) if options.verify else entry
            damaged += bool(looked_at.trouble) and not looked_at.torn
            print(_line(looked_at, verified=options.verify))
        return 1 if damaged else 0
    except OSError as error:
        raise Invalid(f"{storage.url} can't be read: {error}") from error


def _verified(storage: Storage, entry: CheckpointEntry) -> CheckpointEntry:
    """A job that writes here may have removed it meanwhile: then it is torn, and not damaged. Raises OSError."""
    trouble = "" if entry.manifest is None else catalog.verify(storage, entry.manifest)
    if not trouble:
        return entry
    again = catalog.entry(storage, entry.name)
    return again if again.torn else replace(entry, manifest=None, trouble=trouble)


def _line(entry: CheckpointEntry, *, verified: bool) -> str:
    found = entry.manifest
    if found is None:
        return f"{entry.name}  commit {entry.name.commit}  {entry.trouble}"
    head = f"{entry.name}  {found}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.written_at))
    workers = "1 worker" if found.size == 1 else f"{found.size} workers"
    state = "verified" if verified else "complete"
    return f"{head}  {when}  {found.bytes / 1e6:.1f} MB  by {workers}  {state}"
