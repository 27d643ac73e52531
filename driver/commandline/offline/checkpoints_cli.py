"""``elasticrun checkpoints``: list, verify, prune and export the checkpoints of a folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic.checkpoints import catalog
from elastic.checkpoints.catalog import CheckpointEntry
from elastic.checkpoints.export_format import format_of
from elastic.checkpoints.files.manifest import Manifest, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.driver.commandline.options.argument_parser import (
    ArgumentParser,
    add_declared,
    flag,
    switch,
    whole,
)
from elastic.errors import Invalid

if TYPE_CHECKING:
    from elastic.checkpoints.exporting import SkippedValue

DESCRIPTION = """\
List the checkpoints of a folder, oldest first, and show which of them are complete.

To write a checkpoint as a single file for torch.load, run elasticrun checkpoints export."""
# maximum number of attempts to export a checkpoint, which a running job may remove during the export
ATTEMPTS = 5
EXPORT = "export"  # first word of the command line `elasticrun checkpoints export`
EXPORT_DESCRIPTION = """\
Write the newest checkpoint of a folder, or the given commit, as one file with whole tensors. No job is needed."""


@dataclass
class CheckpointsOptions:
    """Parsed flags of ``elasticrun checkpoints``."""

    verify: bool = switch(
        "--verify",
        "Verify the checksums of all files; exit with 1 on corruption or without a checkpoint.",
    )
    prune: int | None = flag(
        "--prune",
        "N",
        "Remove incomplete checkpoints and all but the newest N; no job may be writing.",
        whole(1),
    )


@dataclass
class ExportOptions:
    """Parsed flags of ``elasticrun checkpoints export``."""

    out: str | None = flag(
        "--out",
        "FILE",
        "Output file for torch.load, or .safetensors (default: the commit's folder name with .pt).",
    )
    force: bool = switch("--force", "Overwrite FILE if it exists.")


def export_parser() -> ArgumentParser:
    """Return the parser of ``elasticrun checkpoints export``."""
    made = ArgumentParser(
        prog="elasticrun checkpoints export",
        usage="elasticrun checkpoints export [flags] DIR-OR-URL[@COMMIT]",
        description=EXPORT_DESCRIPTION,
    )
    add_declared(made.group("output"), ExportOptions)
    made.group("general")("-h --help", None, None, "Show this help and exit.", action="help")
    return made


def parser() -> ArgumentParser:
    """Return the parser of ``elasticrun checkpoints``."""
    made = ArgumentParser(
        prog="elasticrun checkpoints",
        usage="elasticrun checkpoints [flags] DIR-OR-URL\n"
        "       elasticrun checkpoints export [--out FILE] [--force] DIR-OR-URL[@COMMIT]",
        description=DESCRIPTION,
    )
    add_declared(made.group("actions"), CheckpointsOptions)
    made.group("general")("-h --help", None, None, "Show this help and exit.", action="help")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run ``elasticrun checkpoints`` and return its exit code.

    Raises:
        Invalid: a flag is invalid, the folder does not exist, or a running job writes to the folder to prune.
    """
    if arguments and arguments[0] == EXPORT:
        return _export(arguments[1:])
    options = CheckpointsOptions()
    wanted = "pass one folder, as in: elasticrun checkpoints /shared/checkpoints"
    folder = parser().with_one(arguments, options, wanted)
    storage = Storage(folder)
    try:
        if options.prune is not None:
            writer = catalog.writing_here(storage)
            if writer is not None:
                raise Invalid(
                    f"{storage.url} is in use: process {writer.pid} of this machine writes checkpoints there,"
                    " and removes old checkpoints (--checkpoint-keep). Prune the folder after the job has ended"
                )
            for name in catalog.prune(storage, options.prune):
                print(f"removed {name}")
        entries = [catalog.entry(storage, name) for name in catalog.names(storage)]
        if not entries:
            if not storage.exists():
                raise Invalid(f"{storage.url} does not exist: pass a folder or URL of checkpoints")
            print(f"{storage.url} has no checkpoints")
            return 1 if options.verify else 0
        damaged = 0
        for entry in entries:
            looked_at = _verified(storage, entry) if options.verify else entry
            damaged += bool(looked_at.trouble) and not looked_at.torn
            print(_line(looked_at, verified=options.verify))
        return 1 if damaged else 0
    except OSError as error:
        raise Invalid(
            f"{storage.url} can't be read: {error}. Check the path, its permissions and the credentials"
        ) from error


def _verified(storage: Storage, entry: CheckpointEntry) -> CheckpointEntry:
    """Verify the checksums of a checkpoint, and return its entry with the result.

    A checkpoint that a running job removes during the check is reported as incomplete, not as damaged. Raises OSError
    if the folder cannot be read.
    """
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


def _export(arguments: Sequence[str]) -> int:
    options = ExportOptions()
    wanted = (
        "pass one folder, as in: elasticrun checkpoints export /shared/checkpoints, or a commit in it, as in"
        " /shared/checkpoints@g3c450. To list a folder called export, run: elasticrun checkpoints ./export"
    )
    given = export_parser().with_one(arguments, options, wanted)
    if options.out is not None:
        _check_place(options.out)
    storage, which = Storage(given), ""
    try:
        url, at, commit = given.rpartition("@")
        # an existing folder may have an @ in its name
        if at and url and commit and not storage.exists():
            storage, which = Storage(url), commit
        found, out, left_out = _exported(storage, which, options)
    except OSError as error:
        raise Invalid(
            f"the checkpoint {given} can't be exported: {error}. Check that DIR is readable and --out writable"
        ) from error
    if left_out:
        names = [f"{each.name}{' except its tensors' * each.but_tensors}" for each in left_out]
        why = "torch.load does not load them by default"
        print(f"omitted, because {why}: {', '.join(names)}", file=sys.stderr)
    print(f"{out}: {found} of {storage.url}/{found.name}, {os.path.getsize(out) / 1e6:.1f} MB")
    return 0


def _check_place(out: str) -> None:
    """Raise Invalid if the file format is unknown or the folder does not exist. Called before checkpoints are read."""
    format_of(out)
    folder = os.path.dirname(out) or "."
    if not os.path.isdir(folder):
        raise Invalid(
            f"{out} can't be written, because the folder {folder} does not exist: create the folder, or pass"
            " another --out FILE"
        )


def _exported(
    storage: Storage, which: str, options: ExportOptions
) -> tuple[Manifest, str, list[SkippedValue]]:
    for _ in range(ATTEMPTS):
        found = catalog.chosen(storage, which) if which else _newest(storage)
        out = options.out or f"{found.name}.pt"
        if os.path.lexists(out) and not options.force:
            raise Invalid(
                f"{out} already exists: pass another --out FILE, or pass --force to overwrite the file"
            )
        # imports torch, which only this command needs
        from elastic.checkpoints import exporting

        try:
            return found, out, exporting.export(storage, found, out)
        except (OSError, UnreadableCommit) as error:
            name = f"{storage.url}/{found.name}"
            if not catalog.entry(storage, found.name).torn:
                if isinstance(error, OSError):
                    raise
                raise Invalid(
                    f"the checkpoint {name} can't be exported: {error.trouble}. Export another checkpoint as DIR@COMMIT"
                    " (elasticrun checkpoints DIR lists the commits)"
                ) from error
            removed = (
                f"{name} was removed during the export, probably by a running job that keeps only its newest"
                " checkpoints"
            )
            if which:
                raise Invalid(
                    f"{removed} (--checkpoint-keep): export a newer checkpoint"
                ) from error
            print(f"{removed}; exporting the newest one", file=sys.stderr)
    raise Invalid(
        f"{ATTEMPTS} checkpoints in {storage.url} were removed during the export: start the job with a larger"
        " --checkpoint-keep, or export a checkpoint after the job has ended"
    )


def _newest(storage: Storage) -> Manifest:
    for name in reversed(catalog.names(storage)):
        found = catalog.entry(storage, name)
        catalog.refuse_newer(storage, found)
        if found.manifest is not None:
            return found.manifest
        print(f"{storage.url}/{name} is skipped: {found.trouble}", file=sys.stderr)
    if not storage.exists():
        raise Invalid(f"{storage.url} does not exist: pass a folder or URL of checkpoints")
    raise Invalid(f"{storage.url} contains no complete checkpoint: pass another folder")
