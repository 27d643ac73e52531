"""Which durable commits a folder has, whether they are whole, and which one to go on from. Acts, without torch."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass

import msgspec
import psutil

from elastic.checkpoints import manifest
from elastic.checkpoints.files.checked import Check
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.manifest import Manifest, Name, Newer, NotReadable
from elastic.errors import Invalid

BLOCK = 1 << 20  # bytes read at once


class Torn(NotReadable):
    """A commit that was not written to its end."""


CLAIMS_READ = 8  # the newest ones, to see whether their jobs live
CLAIM = re.compile(r"run-(\d{4,9})")  # a file that says whose run has that number


@dataclass(frozen=True)
class CheckpointEntry:
    """A folder of a commit. ``trouble``: why it can't be taken; empty: it can. ``torn``: it was never completed.
    ``newer``: a newer version may take it.
    """

    name: Name
    manifest: Manifest | None
    trouble: str
    torn: bool = False
    newer: bool = False


def names(storage: Storage) -> list[Name]:
    """Of all folders of commits, whole or torn, oldest first. Raises OSError."""
    found = (manifest.parse(folder) for folder in storage.folders())
    return sorted(name for name in found if name is not None)


def claim_run(storage: Storage) -> int:
    """A number that no checkpoint here has yet, and that no other job is given. Raises OSError.

    In an object store two jobs that begin in the same moment may be given the same: there no file can be made only if
    there is none.
    """
    number = max((name.run for name in names(storage)), default=0) + 1
    process = psutil.Process()
    whose = Claimant(socket.gethostname(), process.pid, process.create_time())
    while not storage.claim(f"run-{number:04}", msgspec.json.encode(whose)):
        number += 1
    return number


class Claimant(msgspec.Struct, frozen=True):
    """The process that a run belongs to. ``began_at``: when it was started, in seconds since 1970."""

    host: str
    pid: int
    began_at: float


def writing_here(storage: Storage, before: int | None = None) -> Claimant | None:
    """Another process of this machine that lives and has begun a run; ``before``: one before this. Raises OSError."""
    claimed = (CLAIM.fullmatch(name) for name in storage.sizes())
    numbers = sorted(int(each[1]) for each in claimed if each)
    for number in [n for n in numbers if before is None or n < before][-CLAIMS_READ:]:
        with contextlib.suppress(msgspec.MsgspecError, psutil.Error, FileNotFoundError):
            found = msgspec.json.decode(storage.read(f"run-{number:04}"), type=Claimant)
            if found.host != socket.gethostname() or found.pid == os.getpid():
                continue
            process = psutil.Process(found.pid)
            # One that has ended may stay in the table of processes: in a container, where nobody reaps.
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and process.create_time() == found.began_at:
                return found
    return None


def give_back_run(storage: Storage, number: int) -> None:
    """A run that was claimed, and in which nothing was written. Raises OSError."""
    storage.remove_file(f"run-{number:04}")


def read(storage: Storage, name: Name) -> Manifest:
    """A commit whose files are all there with their sizes. Raises Torn, NotReadable, OSError."""
    try:
        found = manifest.decode_manifest(storage.read(f"{name}/{manifest.MANIFEST}"))
    except FileNotFoundError:
        raise Torn("it was not completed: there is no manifest.json") from None
    if found.name != name:
        raise NotReadable(f"its manifest is that of {found.name}")
    files = storage.sizes(str(name))
    if manifest.MANIFEST not in files:
        raise Torn("it was removed meanwhile")
    trouble = manifest.missing(found, files)
    if trouble:
        raise NotReadable(trouble)
    return found


def entry(storage: Storage, name: Name) -> CheckpointEntry:
    """Raises OSError."""
    try:
        return CheckpointEntry(name, read(storage, name), "")
    except NotReadable as error:
        torn, newer = isinstance(error, Torn), isinstance(error, Newer)
        return CheckpointEntry(name, None, str(error), torn, newer)


def refuse_newer(storage: Storage, found: CheckpointEntry) -> None:
    """Who goes on from an older one would in time remove what is newer. Raises Invalid."""
    if found.newer:
        raise Invalid(
            f"{storage.url}/{found.name} can't be taken: {found.trouble}; nothing was changed there: start the version"
            " that has written it, or begin anew with --fresh, which leaves it alone"
        )


def verify(storage: Storage, found: Manifest) -> str:
    """Reads all files and compares their checksums. What is wrong; empty: nothing. Raises OSError."""
    for file, stored in found.files.items():
        check = Check(stored)
        try:
            with storage.reading(f"{found.name}/{file}") as stream:
                while block := stream.read(BLOCK):
                    check.update(block)
        except FileNotFoundError:
            return f"{file} is missing"
        if not check.passed():
            return f"{file} is damaged: its checksum differs"
    return ""


def chosen(storage: Storage, which: str) -> Manifest:
    """By its folder, ``r0002-g0003-c00000450``, or by its commit where that is unique, ``g3c450`` (``3.450`` before).

    Raises Invalid with those that there are, OSError.
    """
    have = names(storage)
    fitting = [name for name in have if which in (str(name), str(name.commit), name.commit.dotted)]
    if len(fitting) != 1:
        what = "no commit" if not fitting else "several commits"
        there = ", ".join(map(str, (fitting or have)[-8:])) or "none"
        how = "; give the whole name of one" if fitting else ""
        raise Invalid(f"{storage.url} has {what} {which}; there are: {there}{how}")
    try:
        return read(storage, fitting[0])
    except NotReadable as error:
        raise Invalid(f"{storage.url}/{fitting[0]} can't be taken: {error}") from error


def prune(storage: Storage, keep: int, floor: int = 0) -> list[Name]:
    """Removes what `manifest.superfluous` says. Returns what was removed. Raises OSError."""
    have = names(storage)
    # Only the newest has to be proven whole: of the others a manifest says that they were.
    whole: list[Name] = []
    for name in reversed(have):
        if whole:
            if manifest.MANIFEST in storage.sizes(str(name)):
                whole.append(name)
        elif entry(storage, name).manifest is not None:
            whole.append(name)
    gone = manifest.superfluous(have, whole, keep, floor)
    for name in gone:
        with contextlib.suppress(FileNotFoundError):
            # From here on nobody takes it for whole, however far the removal comes.
            storage.remove_file(f"{name}/{manifest.MANIFEST}")
            storage.remove_folder(str(name))
    return gone
